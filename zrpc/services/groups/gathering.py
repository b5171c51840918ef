"""Finds the members of a new group."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any

from zrpc.agent.agent import Agent
from zrpc.calls.cancel_scope import current_scope
from zrpc.errors import RpcError, RpcTimeoutError, has_shut_down
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.thread_pool import pass_gate
from zrpc.services.groups.group import RRefGroup, WorkerGroup, names_that_match
from zrpc.services.groups.service import GroupService
from zrpc.services.rref.rref import RRef


def gather(
    agent: Agent, members: str | Iterable[Any], size: int | None, timeout: float, live: bool
) -> WorkerGroup | RRefGroup[Any]:
    """Returns a group; see `zrpc.group`."""
    if isinstance(members, str):
        names = _await_workers(agent, members, size, agent.caller.timeout(timeout))
        return WorkerGroup(names, members if live else None)
    if size is not None or live:
        raise ValueError(
            "expected a pattern of names, such as 'worker*', for size= and live=: a list has its "
            "members already"
        )
    listed = list(members)
    if not listed:
        raise ValueError("expected members for a group, found none")
    if all(isinstance(each, RRef) for each in listed):
        return RRefGroup(listed)
    for each in listed:
        if isinstance(each, bool) or not isinstance(each, str | int | WorkerInfo):
            raise TypeError(
                "expected workers (names, ranks, WorkerInfos), or RRefs and nothing else, for a "
                f"group, found one of type {type(each).__name__}"
            )
    return WorkerGroup([agent.membership.find(each).name for each in listed])


def _await_workers(agent: Agent, pattern: str, size: int | None, timeout: float) -> list[str]:
    """Returns the names of the workers that match a pattern, once there are enough of them.

    Raises:
        RpcTimeoutError: there are not.
        RpcError: there is none, and no size was given.
    """
    names = names_that_match(agent, pattern)
    if size is None:
        if not names:
            known = ", ".join(info.name for info in agent.get_worker_infos()[:8])
            raise RpcError(
                f"expected workers whose names match {pattern!r}, found none; there are {known}. "
                "Pass size= to wait for them"
            )
        return names
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"expected a size of 1 or more for a group, found {size!r}")
    scope = current_scope()
    timeout = timeout if scope is None else scope.bounded(timeout)
    deadline = monotonic() + timeout
    gates = agent.service(GroupService).gates
    handle = agent.joined.add(lambda _: gates.open())
    try:
        while True:
            gate = gates.add()  # first: a worker that joins after the look opens it
            names = names_that_match(agent, pattern)
            if len(names) >= size:
                return names
            if agent.closed:
                raise has_shut_down()
            left = max(0.0, deadline - monotonic()) if timeout else -1
            if not pass_gate(gate, left):
                raise RpcTimeoutError(
                    f"expected {size} workers whose names match {pattern!r} within {timeout:g} s, "
                    f"found {len(names)}{': ' if names else ''}{', '.join(names)}"
                )
    finally:
        handle.remove()
        gates.open()  # the last gate is no longer waited for
