"""Signal handlers that a test sets."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

Handle = Callable[..., Any]


@contextlib.contextmanager
def signal_handlers() -> Iterator[Handle]:
    """Yields a function that sets a handler, of SIGUSR1 by default; undoes that in the end."""
    before: dict[int, Any] = {}

    def handle(handler: Any, number: int = signal.SIGUSR1) -> Any:
        before.setdefault(number, signal.getsignal(number))
        signal.signal(number, handler)
        return signal.getsignal(number)

    try:
        yield handle
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
