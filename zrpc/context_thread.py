"""The kind of thread that an agent starts."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["ContextThread"]


class ContextThread(threading.Thread):
    """A daemon thread that runs in a copy of its owner's context.

    Args:
        context: the owner's: an agent gives the same to all its threads, so that the context
            variables set there (the current agent) hold in them.
        name: the thread's name.
        target: what it runs.
        args: the arguments of that.
    """

    def __init__(
        self,
        context: contextvars.Context,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(target=context.copy().run, args=(target, *args), name=name, daemon=True)
        # Tells those that look for what was left behind which threads belong together.
        self.owner = context
