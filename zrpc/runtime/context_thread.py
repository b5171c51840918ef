"""The kind of thread that an agent starts."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any


class ContextThread(threading.Thread):
    """A daemon thread that runs in a copy of its owner's context.

    Args:
        context: the owner's context. An agent gives the same to all its threads, so the context
            variables set there (the current agent) hold in all of them.
        name: the thread's name.
        target: what the thread calls.
        args: the arguments of that call.
    """

    def __init__(
        self,
        context: contextvars.Context,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(target=context.copy().run, args=(target, *args), name=name, daemon=True)
        # Tells leak checks which threads belong together.
        self.owner = context
