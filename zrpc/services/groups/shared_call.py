"""A call of a group in which each item goes to a member that is free."""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.calls.future import Future
from zrpc.calls.future_error import without_frames
from zrpc.errors import WorkerDied
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.interrupts import UninterruptedLock, uninterrupted
from zrpc.services.groups.arguments import Share
from zrpc.services.groups.future import GroupFuture
from zrpc.services.groups.packing import Bodies
from zrpc.services.groups.sharing import Sharing
from zrpc.services.groups.target import Deadline, Joining, Target


class _SharedFuture(GroupFuture[Any]):
    """The future of all results, in the order of the items."""

    __slots__ = ("_sharer",)

    def __init__(self, sharer: _CallSharer) -> None:
        self._sharer = sharer
        names = [f"item {number}" for number in range(len(sharer.parts))]
        super().__init__(sharer.parts, names, "items")

    @override
    def cancel(self) -> bool:
        self._sharer.stop()  # or members that are free now would take more items
        return super().cancel()


class Sharer(ABC):
    """Gives out the items of one call. Its steps run in the threads that complete its calls.

    Args:
        agent: makes the calls.
        targets: the members with their places, first the ones to be used first.
        bodies: makes the requests.
        items: what is given out.
        deadline: of the whole.
    """

    def __init__(
        self,
        agent: Agent,
        targets: Sequence[tuple[int, Target]],
        bodies: Bodies,
        items: Sequence[Any],
        deadline: Deadline,
    ) -> None:
        self._agent = agent
        self._targets = dict(targets)
        self._known = {target.info.member_id for _, target in targets}
        self._bodies: Bodies | None = bodies
        self._items = items
        self._deadline = deadline
        self._sharing = Sharing(len(items), self._targets)
        self._context = contextvars.copy_context()  # of the caller: its handler, its gradients
        # Guards what is above, and the steps: one thread runs them, others leave theirs to it.
        self._lock = UninterruptedLock()
        self._running = self._again = False
        self._handle: Any = None
        self._lost: WorkerDied | None = None

    def begin(self, joining: Joining | None) -> None:
        """Gives items to all members; also to workers that join later and belong to the group."""
        if joining is not None:
            self._handle = self._agent.joined.add(partial(self._on_joined, joining))
            if self._bodies is None:
                self._handle.remove()
        self.go_on()

    def _on_joined(self, joining: Joining, info: WorkerInfo) -> None:
        with self._lock:
            bodies, known = self._bodies, info.member_id in self._known
            if bodies is None or known or not fnmatchcase(info.name, joining.pattern):
                return
            self._known.add(info.member_id)
        place = bodies.add(info)
        if place is None:
            return
        with self._lock:
            self._targets[place] = joining.target(info)
            self._sharing.join(place)
        self.go_on()

    def go_on(self) -> None:
        """Gives items to all members that are free."""
        with self._lock:
            self._again = True
            if self._running:
                return
            self._running = True
        self._context.copy().run(self._run)

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    bodies = self._bodies
                    given = (
                        self._sharing.next() if bodies is not None and self._has_room() else None
                    )
                    if given is None or bodies is None:
                        if self._again:
                            self._again = False
                            continue
                        self._running = False
                        break
                self._try_to_give(*given, bodies)
        except BaseException:  # Ctrl-C, in the thread that has made the call
            with self._lock:
                self._running = False
            raise
        self._fail_if_stuck()

    def _has_room(self) -> bool:
        """Returns whether another item may be given out now. The lock is held."""
        return True

    def _try_to_give(self, item: int, place: int, bodies: Bodies) -> None:
        try:
            target, body = self._targets[place], bodies.body(place, self._items[item])
            self._give(item, target, body, self._deadline.left())
        except Exception as error:
            self._on_error(item, error)

    def _on_error(self, item: int, error: Exception) -> None:
        """Fails an item whose member has failed, unless another member gets it."""
        if not self._end(item, error):
            self._fail(item, without_frames(error))

    @abstractmethod
    def _give(self, item: int, target: Target, body: Any, seconds: float) -> None:
        """Sends an item to a member."""

    def _end(self, item: int, error: object = None) -> bool:
        """Notes that a member is done with its item; returns whether another one gets it.

        That is so if its member was lost, and has not begun it.
        """
        lost = error if isinstance(error, WorkerDied) else None
        again = lost is not None and lost.executed is False
        with self._lock:
            self._sharing.end(item, lost=lost is not None, again=again)
            self._lost = lost or self._lost
        return again

    @abstractmethod
    def _fail(self, item: int, error: Exception) -> None:
        """Fails an item."""

    def _fail_if_stuck(self) -> None:
        with self._lock:
            lost = self._lost
            left = self._sharing.stop() if self._sharing.stuck and lost is not None else []
        for item in left:
            assert lost is not None
            error = type(lost)(*lost.args)
            error.executed = False
            self._fail(item, error)

    def stop(self) -> None:
        """Gives out no more items."""
        with self._lock:
            self._sharing.stop()

    def finish(self) -> None:
        """Frees what is kept for further items."""
        self._bodies = None  # they have what went to all, and its shared memory
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

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._left = len(self._items)
        self.parts = [_Item() for _ in self._items]
        for part in self.parts:
            part.add_done_callback(self._on_part_done)
        if not self.parts:
            self.finish()

    @override
    def _give(self, item: int, target: Target, body: Any, seconds: float) -> None:
        if self.parts[item].done():  # it was cancelled
            self._end(item)
            return
        call: Future[Any] = target.ask(body, seconds)
        self.parts[item].given = call
        self.parts[item].add_done_callback(partial(_cancel, call))
        call.add_done_callback(partial(self._on_answer, item))

    def _on_answer(self, item: int, call: Future[Any]) -> None:
        try:
            value = call.value()
        except Exception as error:
            self._on_error(item, error)
        except BaseException as error:  # the outcome of a test, say
            self._end(item)
            self._fail(item, error)
        else:
            self._end(item)
            self.parts[item]._complete_by(self.parts[item]._claim, value)
        self.go_on()

    @override
    def _fail(self, item: int, error: BaseException) -> None:
        part = self.parts[item]
        with uninterrupted:  # as `Future` does it
            if part._claim():
                part._keep_error([error])

    def _on_part_done(self, _: Any) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self.finish()


def _cancel(call: Future[Any], _: Any) -> None:
    call.cancel()


def share_out(
    agent: Agent,
    targets: Sequence[tuple[int, Target]],
    bodies: Bodies,
    share: Share,
    deadline: Deadline,
    joining: Joining | None,
) -> GroupFuture[Any]:
    """Gives each item to a member that is free; returns the future of all results.

    Args:
        agent: makes the calls.
        targets: the members with their places, first the ones to be used first.
        bodies: makes the requests.
        share: has the items.
        deadline: of the whole.
        joining: which workers that join meanwhile are used, too.
    """
    sharer = _CallSharer(agent, targets, bodies, share.items, deadline)
    future = _SharedFuture(sharer)
    try:
        sharer.begin(joining)
    except BaseException:  # Ctrl-C: nobody gets the future
        future.cancel()
        raise
    return future
