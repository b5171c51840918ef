"""The verbs of groups: a call of each member, a reference to each result, a stream of all items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zrpc.calls.future import Future
from zrpc.constants import Seconds
from zrpc.errors import GroupError
from zrpc.services.groups.call import GroupCall
from zrpc.services.groups.future import GroupFuture
from zrpc.services.groups.merged import Merged, StreamSharer
from zrpc.services.groups.shared_call import share_out
from zrpc.services.streams.service import StreamService
from zrpc.services.streams.stream import Stream


def call_each(call: GroupCall) -> GroupFuture[Any]:
    """Calls each member, and returns the future of all results."""
    if call.shared is not None:
        return share_out(call)
    return future_of_all(call.ask_all(), call.names)


def future_of_all(
    asked: Iterable[tuple[int, Future[Any] | None, Exception | None]], names: Sequence[str]
) -> GroupFuture[Any]:
    """Returns one future of what was asked of each member.

    Args:
        asked: for each member its place, and the future, or why it could not be asked; or neither,
            if nothing is to come.
        names: of the members.
    """
    parts: dict[int, Future[Any]] = {}
    try:
        for place, part, error in asked:
            parts[place] = part or Future()
            if error is not None:
                parts[place].set_exception(error)
            elif part is None:
                parts[place].set_result(None)
    except BaseException:  # Ctrl-C: nobody gets the future
        for each in parts.values():
            each.cancel()
        raise
    return GroupFuture([part for _, part in sorted(parts.items())], names)


def make_each(call: GroupCall) -> list[Any]:
    """Asks each member to make a value, and returns the references.

    Raises:
        GroupError: some of the calls can't be sent.
        ValueError: `zrpc.share` was called for an argument.
    """
    if call.shared is not None:
        raise ValueError(
            "expected share() in a call by rpc_sync, rpc_async or rpc_stream, found it in one by "
            "remote: which member is free is known from its results"
        )
    made: dict[int, Any] = {}
    errors: dict[int, Exception] = {}
    for place, asked, error in call.ask_all():
        if error is None:
            made[place] = asked
        else:
            errors[place] = error
    if errors:
        raise GroupError.of(errors, made, call.names)
    return [value for _, value in sorted(made.items())]


def stream_each(call: GroupCall, timeout: Seconds) -> Stream[Any]:
    """Calls a generator of each member, and returns the stream of all items.

    Args:
        call: the call; its time is that for the whole.
        timeout: for an item of a member.
    """
    agent, share = call.agent, call.shared
    names, what = call.names, "members of the group"
    if share is not None:
        names, what = [f"item {number}" for number in range(len(share.items))], "items"
    title = f"{call.name} on {len(names)} {what}"
    merged = Merged(agent, title, names, what, agent.caller.timeout(timeout))
    try:
        if share is not None:
            merged.sharer = StreamSharer(merged, call)
            merged.sharer.begin(call.joining)
        else:
            for place, stream, error in call.ask_all():
                if error is None:
                    merged.add(place, stream)
                else:
                    merged.end(place, error)
    except BaseException:  # Ctrl-C: nobody gets the stream
        merged.close()
        raise
    return Stream(merged, agent.service(StreamService).dropped.append)
