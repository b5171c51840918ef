"""A request to a store, for whose answer a thread waits only until a deadline.

TCPStore waits for its host's answer in C++, without limit, and past Ctrl-C. A host that is stopped,
or cut off, would hold up all the workers that meet in its store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from zrpc.errors import RendezvousError

__all__ = ["ask"]

T = TypeVar("T")

# Also a request that begins at its deadline has this long: those that find out what is missing do.
_LEAST_SECONDS = 1.0
# How long a thread that is interrupted waits for an answer that is almost there.
_MOMENT_SECONDS = 0.2


def ask(call: Callable[[], T], deadline: float) -> T:
    """Makes a request to a store in a thread of its own; returns its answer.

    If there is none, that thread stays until the connection to the store breaks, or the process
    ends.

    Args:
        call: makes the request.
        deadline: on the clock of ``time.monotonic``.

    Raises:
        RendezvousError: there is no answer in time.
        Exception: as ``call`` raises it.
    """
    begun = time.monotonic()
    answer: Future[T] = Future()

    threading.Thread(target=_answer, args=(answer, call), name="zrpc-store", daemon=True).start()
    try:
        wait([answer], max(_LEAST_SECONDS, deadline - begun))
    except BaseException:  # Ctrl-C
        wait([answer], _MOMENT_SECONDS)
        raise
    if not answer.done():
        raise RendezvousError(
            "expected the store in which the workers meet to answer, found no answer for "
            f"{time.monotonic() - begun:.1f} s: its host, which is rank 0 or the launcher, is "
            "stopped, or the network to it is cut"
        )
    return answer.result()


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)
