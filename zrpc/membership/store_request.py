"""One request to a store, for whose answer a thread waits only until a deadline.

TCPStore waits for its host's answer in C++, without limit, and past Ctrl-C. A host that is stopped,
or cut off, would hold up all the workers that meet in its store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from zrpc.errors import RendezvousError

__all__ = ["request"]

T = TypeVar("T")

# Also a request that begins at its deadline has this long: those that find out what is missing do.
_LEAST_SECONDS = 1.0
# How long a thread that is interrupted waits for an answer that is almost there.
_MOMENT_SECONDS = 0.2


def request(call: Callable[[], T], deadline: float) -> T:
    """Makes a request to a store; returns its answer.

    The request is made in a thread of its own. If there is no answer, that thread stays until the
    connection to the store breaks, or the process ends.

    Args:
        call: makes the request.
        deadline: on the clock of ``time.monotonic``.

    Raises:
        RendezvousError: there is no answer in time.
        Exception: as ``call`` raises it.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    begun = time.monotonic()
    thread = threading.Thread(target=run, name="zrpc-store", daemon=True)
    thread.start()
    try:
        thread.join(max(_LEAST_SECONDS, deadline - begun))
    except BaseException:  # Ctrl-C
        thread.join(_MOMENT_SECONDS)
        raise
    if errors:
        raise errors[0]
    if not answers:
        raise RendezvousError(
            "expected the store in which the workers meet to answer, found no answer for "
            f"{time.monotonic() - begun:.1f} s: its host, which is rank 0 or the launcher, is "
            "stopped, or the network to it is cut"
        )
    return answers[0]
