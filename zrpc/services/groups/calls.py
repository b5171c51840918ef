"""A call of each member of a group: the same call to all, and one deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zrpc.agent.agent import Agent
from zrpc.calls.future import Future
from zrpc.calls.future_error import without_frames
from zrpc.calls.pending_calls import OVERHEAD_BYTES
from zrpc.errors import GroupError
from zrpc.services.groups.future import GroupFuture
from zrpc.services.groups.merged import merge
from zrpc.services.groups.packing import Bodies
from zrpc.services.groups.shared_call import share_out
from zrpc.services.groups.target import Deadline, Joining, Target
from zrpc.services.streams.service import StreamService
from zrpc.services.streams.stream import Stream


def call_each(
    agent: Agent,
    targets: Sequence[Target],
    body: tuple[Any, Any, Any],
    timeout: float,
    joining: Joining | None = None,
) -> GroupFuture[Any]:
    """Calls each member, and returns the future of all results.

    Args:
        agent: makes the calls.
        targets: the members.
        body: a function or the name of a method, args and kwargs.
        timeout: of the whole.
        joining: which workers that join meanwhile are called for items of `zrpc.share`.

    Raises:
        ValueError: an argument has not as many values as there are members.
        SerializationError: an argument for all can't be pickled.
    """
    bodies = Bodies(agent, [each.info for each in targets], *body)
    deadline = Deadline(agent.caller, timeout)
    order = _in_order_of_room(agent, targets, bodies.nbytes)
    if bodies.shared is not None:
        first = [(place, targets[place]) for place in order]
        return share_out(agent, first, bodies, bodies.shared, deadline, joining)
    parts: dict[int, Future[Any]] = {}
    try:
        for place in order:
            try:
                parts[place] = targets[place].ask(bodies.body(place), deadline.left())
            except Exception as error:  # of this member only: the others are called
                parts[place] = failed(error)
    except BaseException:  # Ctrl-C: nobody gets the future
        for part in parts.values():
            part.cancel()
        raise
    in_order = [parts[place] for place in range(len(targets))]
    return GroupFuture(in_order, [each.name for each in targets])


def stream_each(
    agent: Agent,
    targets: Sequence[Target],
    body: tuple[Any, Any, Any],
    timeout: float,
    deadline: float,
    joining: Joining | None = None,
) -> Stream[Any]:
    """Calls a generator of each member, and returns the stream of all items.

    Args:
        agent: makes the calls.
        targets: the members.
        body: a function or the name of a method, args and kwargs.
        timeout: for an item of a member.
        deadline: seconds for the whole; 0 for no limit.
        joining: which workers that join meanwhile are called for items of `zrpc.share`.

    Raises:
        Exception: see `call_each`.
    """
    seconds, limit = agent.caller.timeout(timeout), Deadline(agent.caller, deadline)
    bodies = Bodies(agent, [each.info for each in targets], *body)
    order = [(place, targets[place]) for place in _in_order_of_room(agent, targets, bodies.nbytes)]
    merged = merge(agent, order, bodies, seconds, limit, joining)
    return Stream(merged, agent.service(StreamService).dropped.append)


def _in_order_of_room(agent: Agent, targets: Sequence[Target], nbytes: int) -> list[int]:
    """Returns the places of the members: last those whose calls may have to wait for room.

    Otherwise one member that is slow, or stands still, would use up the time of all others.
    """
    calls = agent.caller.calls
    loads = calls.loads() if calls.limit else {}

    def may_wait(place: int) -> bool:
        return any(
            load.waiting or load.used + nbytes + OVERHEAD_BYTES > calls.limit
            for load in loads.get(targets[place].info.member_id, ())
        )

    return sorted(range(len(targets)), key=may_wait)


def failed(error: Exception) -> Future[Any]:
    """Returns a future that has failed."""
    future: Future[Any] = Future()
    # Its frames refer to what goes to the other members.
    future.set_exception(without_frames(error))
    return future


def make_each(
    agent: Agent, targets: Sequence[Target], body: tuple[Any, Any, Any], timeout: float
) -> list[Any]:
    """Asks each member to make a value, and returns the references.

    Raises:
        GroupError: some of the calls can't be sent.
        Exception: see `call_each`.
    """
    bodies = Bodies(agent, [each.info for each in targets], *body)
    if bodies.shared is not None:
        raise ValueError(
            "expected share() in a call by rpc_sync, rpc_async or rpc_stream, found it in one by "
            "remote: which member is free is known from its results"
        )
    deadline = Deadline(agent.caller, timeout)
    made: dict[int, Any] = {}
    errors: dict[int, Exception] = {}
    for place in _in_order_of_room(agent, targets, bodies.nbytes):
        try:
            made[place] = targets[place].ask(bodies.body(place), deadline.left())
        except Exception as error:
            errors[place] = without_frames(error)
    if errors:
        raise GroupError.of(errors, made, [each.name for each in targets])
    return [made[place] for place in range(len(targets))]
