"""Calls that are made at the same time, each in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

# A thread's stack in bytes: more than there are addresses.
_TOO_LARGE = 1 << 48


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """Lets the system refuse to start a thread, as it does when there are too many."""
    before = threading.stack_size(_TOO_LARGE)
    try:
        yield
    finally:
        threading.stack_size(before)


def assert_raised(outcomes: Iterable[Any], kind: type[BaseException], *texts: str) -> None:
    """Checks that all calls have raised the same kind of error, with these texts."""
    for error in outcomes:
        assert isinstance(error, kind), error
        assert [text for text in texts if text not in str(error)] == [], error


def start_all(calls: Sequence[Callable[[], Any]], seconds: float) -> Callable[[], list[Any]]:
    """Starts the calls; returns a function that returns what each returned or raised.

    That function fails if a call takes longer than ``seconds``.
    """
    outcomes: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()

    def finish() -> list[Any]:
        for thread in threads:
            thread.join(seconds)
            assert not thread.is_alive(), "a call does not end"
        return [outcomes[n] for n in range(len(calls))]

    return finish
