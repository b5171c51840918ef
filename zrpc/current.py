"""Which agent a call goes through: that of the context, else the process's default."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zrpc.errors import NotInitializedError

if TYPE_CHECKING:
    from zrpc.agent import Agent

__all__ = ["as_current", "current_agent", "default_agent", "find_agent", "set_default_agent"]

# Set in every thread that runs handlers, so that several agents can live in one process.
_current: contextvars.ContextVar[Agent] = contextvars.ContextVar("zrpc_agent")
_default: Agent | None = None


def set_default_agent(agent: Agent | None) -> None:
    """Makes ``agent`` the one of all contexts of this process that have no other."""
    global _default
    _default = agent


def default_agent() -> Agent | None:
    """The process's default agent, also one that has shut down."""
    return _default


def latest_agent() -> Agent | None:
    """The agent of this context, or the process's default, also one that has shut down."""
    return _current.get(None) or _default


def find_agent() -> Agent | None:
    """The agent of this context, or the process's default, where there is one that serves."""
    agent = latest_agent()
    return agent if agent is not None and not agent.closed else None


def current_agent() -> Agent:
    """As `find_agent`, but there must be one.

    Raises:
        NotInitializedError: there is none, or it has shut down.
    """
    agent = _current.get(None) or _default
    if agent is None or agent.closed:
        raise not_initialized()
    return agent


def not_initialized() -> NotInitializedError:
    """The error of a call without an agent."""
    return NotInitializedError("RPC has not been initialized. Call zrpc.init_rpc first.")


def has_shut_down() -> NotInitializedError:
    """The error of a call by way of an agent that is closed."""
    return NotInitializedError(
        "RPC has not been initialized any more: this worker has shut down, and its calls with it"
    )


@contextlib.contextmanager
def as_current(agent: Agent) -> Iterator[Agent]:
    """Makes ``agent`` the one of the present context."""
    token = _current.set(agent)
    try:
        yield agent
    finally:
        _current.reset(token)


def context_of(agent: Agent) -> contextvars.Context:
    """A new context in which ``agent`` is the current one."""
    context = contextvars.Context()
    context.run(_current.set, agent)
    return context


def _forget_in_child() -> None:
    # The threads and sockets of the parent's agent are not the child's.
    set_default_agent(None)
    _current.set(None)  # type: ignore[arg-type]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
