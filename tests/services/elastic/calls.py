"""What the workers of an elastic mesh call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import zrpc
from zrpc.agent.agent import Agent

PATIENCE = 20.0
entered = threading.Event()
finish = threading.Event()


def slow() -> str:
    """A handler that runs until the test lets it end."""
    entered.set()
    finish.wait(PATIENCE)
    return "done"


def call(
    agent: Agent, to: str | int, function: Callable[..., Any] = max, args: tuple[Any, ...] = (1, 2)
) -> Any:
    with agent.as_current():
        return zrpc.rpc_sync(to, function, args)
