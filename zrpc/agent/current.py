"""The current agent: that of the context, else the process's default."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zrpc.errors import NotInitializedError, not_initialized

if TYPE_CHECKING:
    from zrpc.agent.agent import Agent

# Set in every thread that runs handlers, so that one process can have several agents.
_current: contextvars.ContextVar[Agent] = contextvars.ContextVar("zrpc_agent")
_default: Agent | None = None


def set_default_agent(agent: Agent | None) -> None:
    """Makes ``agent`` the agent of all contexts of this process that have no other."""
    global _default
    _default = agent


def default_agent() -> Agent | None:
    """Returns the process's default agent, even if it has shut down."""
    return _default


def latest_agent() -> Agent | None:
    """Returns this context's agent or the process's default, even if it has shut down."""
    return _current.get(None) or _default


def find_agent() -> Agent | None:
    """Returns this context's agent or the process's default; None if it has shut down."""
    agent = latest_agent()
    return agent if agent is not None and not agent.closed else None


def current_agent() -> Agent:
    """Returns the agent that `find_agent` finds.

    Raises:
        NotInitializedError: there is none, or it has shut down.
    """
    agent = _current.get(None) or _default
    if agent is None or agent.outbox.closed:
        raise not_initialized()
    return agent


def agent_that_is_set() -> Agent:
    """Like `current_agent`, with the message of torch's functions that need one to be set."""
    agent = find_agent()
    if agent is None:
        raise NotInitializedError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling "
            "zrpc.init_rpc)?"
        )
    return agent


@contextlib.contextmanager
def as_current(agent: Agent) -> Iterator[Agent]:
    """Makes ``agent`` the current one inside the ``with`` block."""
    token = _current.set(agent)
    try:
        yield agent
    finally:
        _current.reset(token)


def context_of(agent: Agent) -> contextvars.Context:
    """Returns a copy of the current context in which ``agent`` is the current one.

    zrpc's own variables are left out: this may be a handler of another agent.
    """
    context = contextvars.Context()
    for variable, value in contextvars.copy_context().items():
        if not variable.name.startswith("zrpc_"):
            context.run(variable.set, value)
    context.run(_current.set, agent)
    return context


def _forget_in_child() -> None:
    # The child has none of the threads and sockets of the parent's agent.
    set_default_agent(None)
    _current.set(None)  # type: ignore[arg-type]


os.register_at_fork(after_in_child=_forget_in_child)
