"""The numbers of one worker's calls to one actor, at the caller.

`zrpc.services.actors.mailbox` gives the reason why they are drawn so late.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from zrpc.calls.pending_call import PendingCall, State
from zrpc.calls.pending_calls import PendingCalls
from zrpc.errors import OwnerDied, RpcError
from zrpc.wire.kind import Tag
from zrpc.wire.message import Message

__all__ = ["CallOrder", "mailbox_is_full", "was_stopped"]

_SENDING, _QUEUED = State.SENDING, State.QUEUED


class CallOrder:
    """Numbers the calls of this worker to one actor. Any thread may call its methods.

    All RRefs of this worker to the actor share it, and each call keeps one of them until it has an
    outcome.

    Args:
        title: the name of the actor's class.
        owner: the name of the worker that has the actor.
        series: the number of this series, which no other has had.
        pack: packs the series and a number.
        skip: reports to the owner that a number is not used, by what was packed.
    """

    __slots__ = ("__weakref__", "_numbers", "_owner", "_pack", "_series", "_skip", "title")

    def __init__(
        self,
        title: str,
        owner: str,
        series: int,
        pack: Callable[[int, int], bytes],
        skip: Callable[[bytes], None],
    ) -> None:
        self.title = title
        self._owner = owner
        self._series = series
        self._pack = pack
        self._skip = skip
        self._numbers = itertools.count()  # atomic under the interpreter's lock

    def enter(self, calls: PendingCalls, call: PendingCall, message: Message) -> State:
        """Puts a call into the table, and gives its message a number.

        It does not wait for room: then the calls of a slow actor would hold up those to others. If
        too many bytes are in flight to this actor, it fails at once.

        Returns:
            SENDING, or UNSENT if it is settled already.
        """
        call.what = f"{self.title}.{call.what or 'to_here'}"
        call.died = self.died
        state = calls.enter(call, message.nbytes, self)
        if state is _QUEUED:
            calls.settle(call.call_id, mailbox_is_full(self.title, self._owner, calls.limit))
            return call.state
        if state is _SENDING:
            turn = self._pack(self._series, next(self._numbers))
            skip, before = partial(self._skip, turn), call.undo
            call.undo = skip if before is None else partial(_call_both, before, skip)
            extensions = message.extensions = [*message.extensions]
            for place, (tag, data) in enumerate(extensions):
                if tag == Tag.SUBJECT:
                    extensions[place] = tag, data + turn
        return state

    def died(self, why: str) -> OwnerDied:
        """Returns the error of a call whose callee is lost."""
        return OwnerDied(f"the actor {self.title} on {self._owner} is lost: {why}")

    def gone(self, why: str) -> OwnerDied:
        """Returns the error of a call that is not made, since the callee is known to be lost."""
        error = self.died(f"{why}; make it again on a worker that lives")
        error.executed = False
        return error


def mailbox_is_full(title: str, owner: str, limit: int) -> RpcError:
    """Returns the error of a call for which an actor's mailbox has no room."""
    error = RpcError(
        f"the mailbox of the actor {title} on {owner} is full: calls of {limit} bytes wait for it "
        "(max_bytes_in_flight). It is slower than its callers: wait for some results before the "
        "next calls, or raise the option on both workers"
    )
    error.executed = False
    return error


def was_stopped(title: str, owner: str, by: str) -> RpcError:
    """Returns the error of a call of an actor that a worker has stopped."""
    error = RpcError(f"the actor {title} on {owner} was stopped by {by}")
    error.executed = False
    return error


def _call_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()
