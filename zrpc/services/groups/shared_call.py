"""A call of a group in which each item goes to a member that is free."""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from zrpc.calls.future import Future
from zrpc.calls.future_callback import call_or_repeat
from zrpc.calls.future_error import without_frames
from zrpc.constants import Seconds
from zrpc.errors import WorkerDied, was_not_executed
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.interrupts import UninterruptedLock, raise_if_of_handler
from zrpc.services.groups.call import GroupCall, Joining
from zrpc.services.groups.future import GroupFuture
from zrpc.wire.exceptions import copied


class Sharer(ABC):
    """Gives out the items of one call. Its steps run in the threads that complete its requests.

    Args:
        call: has the items, and the members.
    """

    def __init__(self, call: GroupCall) -> None:
        self._agent = call.agent
        self._targets = dict(call.targets)
        self._context = contextvars.copy_context()  # of the caller: its handler, its gradients
        self._handle: Any = None
        assert call.shared is not None
        self._items = call.shared.items
        # Guards the rest, and the targets. One thread at a time gives out items.
        self._lock = UninterruptedLock()
        self._call: GroupCall | None = call
        self._waiting = deque(range(len(self._items)))
        self._free = deque(self._targets)  # members that have no item, by place
        self._place_of: dict[int, int] = {}  # the members that have had the items, by item
        # Members that have called nothing for their last item, as stopped actors do. They get items
        # only if there are no others.
        self._idle: set[int] = set()
        self._gone: set[int] = set()  # those that are lost: they get none
        self._busy = 0  # members that have one
        self._running = False
        self._lost: WorkerDied | None = None

    def begin(self, joining: Joining | None) -> None:
        """Gives items to all members; also to workers that join later and belong to the group."""
        if joining is not None:
            self._handle = self._agent.joined.add(partial(self._on_joined, joining))
            if self._call is None:
                self._handle.remove()
        self.go_on()

    def _on_joined(self, joining: Joining, info: WorkerInfo) -> None:
        call, target = self._call, joining(info)
        known = any(each.info.member_id == info.member_id for each in self._targets.values())
        if call is None or target is None or known:
            return
        place = call.add(info.member_id)
        if place is None:
            return
        with self._lock:
            self._targets[place] = target
            self._free.append(place)
        self.go_on()

    def go_on(self) -> None:
        """Gives items to all members that are free."""
        with self._lock:
            if self._running:
                return
            self._running = True
        try:
            self._context.copy().run(self._run)
        except BaseException as error:  # Ctrl-C, or no memory
            self._running = False
            self._give_up(error)
            raise

    def _run(self) -> None:
        while (given := self._next()) is not None:
            self._try_to_give(*given)
        self._fail_if_stuck()

    def _next(self) -> tuple[int, int, GroupCall] | None:
        """Returns an item, and the place of a member that gets it; None if it must stop."""
        with self._lock:
            call = self._call
            ready: Sequence[int] = self._free
            if self._idle and self._works():
                ready = [place for place in ready if place not in self._idle]
            if call is None or not (self._waiting and ready and self._has_room()):
                self._running = False
                return None
            self._busy += 1
            place, item = ready[0], self._waiting.popleft()
            self._free.remove(place)
            self._place_of[item] = place
            return item, place, call

    def _works(self) -> bool:
        """Returns whether a member does what it is asked for. The lock is held."""
        return len(self._idle | self._gone) < len(self._targets)

    def _has_room(self) -> bool:
        """Returns whether another item may be given out now. The lock is held."""
        return True

    def _try_to_give(self, item: int, place: int, call: GroupCall) -> None:
        try:
            body = call.body(place, self._items[item])
            self._give(item, place, body, call.time_left())
        except Exception as error:
            raise_if_of_handler(error)
            self._on_error(item, place, error)

    @abstractmethod
    def _give(self, item: int, place: int, body: Any, seconds: Seconds) -> None:
        """Sends an item to a member."""

    @abstractmethod
    def _fail(self, item: int, error: Exception) -> None:
        """Fails an item."""

    def _give_up(self, error: BaseException) -> None:  # noqa: B027
        """Fails all items that are left, unless the timeouts of their readers do that.

        A step has failed, so members may get none any more.
        """

    def _on_error(self, item: int, place: int, error: Exception) -> None:
        """Fails an item whose member has failed, unless another member gets it."""
        again = self.note_end(item, error)
        self._take_back(place, error)
        if again:
            self.go_on()
        else:
            self._fail(item, without_frames(error))

    def _take_back(self, place: int, outcome: object = None) -> None:
        """Notes that a member is done with its item; if it is lost, it gets no other one."""
        with self._lock:
            self._busy -= 1
            # The function may have failed as another worker was lost.
            lost = self._targets[place].info.member_id in self._agent.membership.lost
            if lost and isinstance(outcome, WorkerDied):
                self._lost = outcome
                self._gone.add(place)
            else:
                self._free.append(place)

    def note_end(self, item: int, error: BaseException | None) -> bool:
        """Notes how an item has ended; returns whether another member gets it, by `go_on`."""
        with self._lock:
            if error is None or not was_not_executed(error):
                self._idle.discard(self._place_of[item])
                return False
            self._idle.add(self._place_of[item])
            again = self._works() or isinstance(error, WorkerDied)
            if again:
                self._waiting.appendleft(item)
            return again

    def _fail_if_stuck(self) -> None:
        """Fails the items that are left if no member is."""
        with self._lock:
            lost, left = self._lost, list(self._waiting)
            if lost is None or self._free or self._busy:
                return
            self._waiting.clear()
        for item in left:
            error = type(lost)(*lost.args)
            error.executed = False
            self._fail(item, error)

    def finish(self, _: object = None) -> None:
        """Gives out no more items, and frees what is kept for them."""
        self._call = None  # it has what went to all, and its shared memory
        if self._handle is not None:
            self._handle.remove()


class _Item(Future[Any]):
    """The future of an item.

    Attributes:
        given: that of the call of a member, once there is one; for what shows who waits for whom.
    """

    __slots__ = ("given",)

    given: Future[Any]


class _CallSharer(Sharer):
    """Gives out items by calls, and keeps their results.

    Attributes:
        parts: one future for each item.
    """

    def __init__(self, call: GroupCall) -> None:
        super().__init__(call)
        self.parts = [_Item() for _ in self._items]

    @override
    def _give(self, item: int, place: int, body: Any, seconds: Seconds) -> None:
        part = self.parts[item]
        if part.done():  # it was cancelled
            self._take_back(place)
            return
        call: Future[Any] = self._targets[place].ask(body, seconds)
        part.given = call
        part.add_done_callback(lambda _: call.cancel())
        call.add_done_callback(partial(self._on_answer, item, place))

    def _on_answer(self, item: int, place: int, call: Future[Any]) -> None:
        try:
            self._take(item, place, call)
            self.go_on()
        except BaseException as error:
            self._give_up(error)
            raise

    def _take(self, item: int, place: int, call: Future[Any]) -> None:
        """Takes the outcome of a member's call."""
        try:
            value = call.value()
        except Exception as error:
            self._on_error(item, place, error)
        except BaseException as error:  # the outcome of a test, say
            self._take_back(place)
            self._fail(item, error)
        else:
            self.note_end(item, None)
            self._take_back(place)
            self.parts[item]._complete_by(self.parts[item]._claim, value)

    @override
    def _fail(self, item: int, error: BaseException) -> None:
        self.parts[item]._complete_by(self.parts[item]._claim, None, [error])

    @override
    def _give_up(self, error: BaseException) -> None:
        for item in range(len(self.parts)):
            self._fail(item, copied(error, error.__cause__))


def share_out(call: GroupCall) -> GroupFuture[Any]:
    """Gives each item to a member that is free; returns the future of all results."""
    sharer = _CallSharer(call)
    names = [f"item {number}" for number in range(len(sharer.parts))]
    future = GroupFuture(sharer.parts, names, "items")
    # Also if it is cancelled: before the parts.
    future.add_done_callback(partial(call_or_repeat, sharer.finish))
    try:
        sharer.begin(call.joining)
    except BaseException:  # Ctrl-C: nobody gets the future
        future.cancel()
        raise
    return future
