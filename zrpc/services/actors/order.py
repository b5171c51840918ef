"""The numbers of one worker's calls to one actor, at the caller.

`zrpc.services.actors.mailbox` gives the reason why they are drawn so late.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

from zrpc.actors import ActorLabel
from zrpc.calls.pending_call import PendingCall, State
from zrpc.calls.pending_calls import PendingCalls
from zrpc.errors import OwnerDied, RpcError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.wire.kind import Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

_SENDING, _QUEUED = State.SENDING, State.QUEUED


@dataclass(slots=True, weakref_slot=True, eq=False)
class CallOrder:
    """Numbers the calls of this worker to one actor. Any thread may call its methods.

    All RRefs of this worker to the actor share it, and each call keeps one of them until it has an
    outcome.

    Args:
        label: what is known of the actor.
        owner: the worker that has the actor.
        series: the number of this series, which no other has had.
        pack: packs the series and a number.
        skip: reports to the owner that a number is not used, by what was packed.

    Attributes:
        label, owner: the same.
        whose: see `PendingCall`.
        again: at the worker that made the actor: makes it again on a worker. None if it must not.
    """

    label: ActorLabel
    owner: WorkerInfo
    series: InitVar[int]
    _pack: Callable[[int, int], bytes]
    _skip: Callable[[MemberId, bytes], None]
    again: Callable[..., Any] | None = None
    whose: str = field(init=False)
    _series: tuple[MemberId, int, Iterator[int]] = field(init=False)

    def __post_init__(self, series: int) -> None:
        self.whose = f" of {self.label.name!r}" if self.label.name else ""
        self.move(self.owner, series)

    def move(self, owner: WorkerInfo, series: int) -> None:
        """Begins another series: for an actor that is made again on another worker."""
        # The counter is atomic under the interpreter's lock.
        self._series = owner.member_id, series, itertools.count()
        self.owner = owner

    def end_restarts(self) -> None:
        """Notes that nobody makes the actor again."""
        self.label = self.label._replace(restarts=False)

    def enter(self, calls: PendingCalls, call: PendingCall, message: Message) -> State:
        """Puts a call into the table, and gives its message a number.

        It does not wait for room: then the calls of a slow actor would hold up those to others. If
        too many bytes are in flight to this actor, it fails at once.

        Returns:
            SENDING, or UNSENT if it is settled already.
        """
        call.what = f"{self.label.title}.{call.what or 'to_here'}"
        call.whose, call.died = self.whose, self.died
        owner, series, numbers = self._series
        state = calls.enter(call, message.nbytes, self)
        if state is _QUEUED:
            error: RpcError = mailbox_is_full(str(self.label), self.owner.name, calls.limit)
            calls.settle(call.call_id, error)
            return call.state
        if call.peer != owner:  # it was moved, in this moment or since it is not made again
            why = "another worker has its place; call it again"
            if not self.label.restarts:
                why = "it is not made again: it was stopped, or its maker has no RRef to it"
            calls.settle(call.call_id, self.gone(why))
            return call.state
        if state is _SENDING:
            turn = self._pack(series, next(numbers))
            skip, before = partial(self._skip, owner, turn), call.undo
            call.undo = skip if before is None else partial(_call_both, before, skip)
            extensions = message.extensions = [*message.extensions]
            for place, (tag, data) in enumerate(extensions):
                if tag == Tag.SUBJECT:
                    extensions[place] = tag, data + turn
        return state

    def died(self, why: str) -> OwnerDied:
        """Returns the error of a call whose callee is lost."""
        return OwnerDied(f"the actor {self.label} on {self.owner.name} is lost: {why}")

    def gone(self, why: str) -> OwnerDied:
        """Returns the error of a call that is not made, since the callee is known to be lost."""
        error = self.died(why)
        error.executed = False
        return error


@dataclass(frozen=True, slots=True)
class Beside:
    """Puts calls that have no number into the table, and names the actor in their errors.

    Args:
        order: that of the calls to the actor.
        what: the method.
    """

    _order: CallOrder
    _what: str

    def enter(self, calls: PendingCalls, call: PendingCall, message: Message) -> State:
        """Puts a call into the table; see `CallOrder.enter`."""
        order = self._order
        call.what, call.whose = f"{order.label.title}.{self._what}", order.whose
        call.died, call.order = order.died, None
        return calls.enter(call)


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
