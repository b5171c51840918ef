"""Plugs published weights into an agent: the names, the publishers, and the copies of this host.

All messages are ordinary calls, of the functions at the end of this module.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.agent.service import Service
from zrpc.calls.future import Future
from zrpc.calls.future_group import wait_all
from zrpc.errors import RpcError
from zrpc.functions import async_execution
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.gates import Gates
from zrpc.runtime.interrupts import UninterruptedLock, uninterrupted
from zrpc.runtime.thread_pool import pass_gate
from zrpc.services.shm.service import LEAST_BYTES, SharedMemoryService
from zrpc.services.weights.publications import Publication, PublicationId, Publications
from zrpc.services.weights.versions import Answer, HostCopy, Versions
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId

T = TypeVar("T")

# For how long nothing was pushed or asked for, before waits end with the mesh.
_QUIET_SECONDS = 0.5


class _Holder(Protocol):
    """What holds a version until this worker shuts down."""

    def drop(self) -> None:
        """Drops the version."""


class WeightsService(Service):
    """What one worker knows of published weights, and its own publishers and copies.

    Attributes:
        publications: who publishes what.
        subscribers: those of this worker.
        dropped: what `withdraw` needs of each publisher that nothing refers to any longer.
            Finalizers append to it, at any moment, so they do nothing else.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # Guards what follows; nothing is sent and no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self.publications = Publications(agent.membership.is_gone)
        self._published: dict[PublicationId, Versions] = {}
        self._copies: dict[PublicationId, HostCopy] = {}
        self.subscribers: weakref.WeakSet[_Holder] = weakref.WeakSet()
        self.dropped: deque[tuple[str, PublicationId, int]] = deque()
        self._gates = Gates()  # of the threads that wait for a publication to begin
        self._numbers = itertools.count(1)
        self._hook: RemovableHandle | None = None
        self._told: frozenset[MemberId] | None = None  # see `_watch_joins`
        # When a version was last asked for or pushed, and whether that was the end; see `tick`.
        self._used_at = monotonic()
        self._over = False

    @property
    def own_id(self) -> MemberId:
        """This worker."""
        return self.agent.membership.own_id

    # -- names -----------------------------------------------------------------------------

    def publish(self, name: str, versions: Versions) -> tuple[PublicationId, int]:
        """Takes a name at all members, and tells them.

        Returns:
            The publication, and the number that its versions exceed.

        Raises:
            RpcError: another worker publishes under that name, or a member does not answer.
        """
        id, membership = PublicationId(self.own_id, next(self._numbers)), self.agent.membership
        before = 0
        try:
            for member in membership.living:  # in this order, see `publications`
                before = max(before, self._claim_at(member, name, id))
            with self._lock:
                self._published[id] = versions
            self.learn(name, id, before)  # first here: it tells those that join from now on
            for error in self._tell(membership.living, _learn, name, id, before):
                raise error
        except BaseException:
            with self._lock:
                self._published.pop(id, None)
            self._tell(membership.living, _end, name, id, before)
            raise
        return id, before

    def _claim_at(self, member: MemberId, name: str, id: PublicationId) -> int:
        """Claims a name at a member; returns the highest earlier version that it knows of."""
        try:
            holder, bound = self._call(member, _claim, name, id)
            while holder is not None and self._gives_way(holder, name):
                holder, bound = self._call(member, _claim, name, id)
        except RpcError:
            if member in self.agent.membership.lost:
                return 0
            raise
        if holder is not None:
            info = self.agent.membership.infos.get(holder)
            where = "this worker" if holder == self.own_id else info
            raise RpcError(
                f"expected no publisher of {name!r}, found one on {where}: close it first, or "
                "publish under another name"
            )
        return int(bound)

    def withdraw(self, name: str, id: PublicationId, last: int) -> None:
        """Ends a publication of this worker, and tells all members."""
        with self._lock:
            found = self._published.get(id)
        if found is None:
            return
        try:
            # First: a reader that has learned of the end knows how high its versions were.
            self._tell(self.agent.membership.living, _end, name, id, last)
        finally:
            with self._lock:
                self._published.pop(id, None)
            found.end()

    def _gives_way(self, holder: MemberId, name: str) -> bool:
        with contextlib.suppress(RpcError):  # it is lost
            return bool(self._call(holder, _withdraw_dropped, name))
        return False

    def withdraw_dropped(self, name: str) -> bool:
        """Ends a publication under a name if its publisher was dropped; returns whether it was."""
        for each in list(self.dropped):
            if each[0] == name:
                self.withdraw(*each)
                with contextlib.suppress(ValueError):  # another thread has done the same
                    self.dropped.remove(each)
                return True
        return False

    def _watch_joins(self) -> None:
        """From now on, tells workers that join what is published; the others are told otherwise."""
        with self._lock:
            if self._told is not None:
                return
            self._told = frozenset(self.agent.membership.living)
        self._hook = self.agent.joined.add(self._tell_member)

    def _tell_member(self, info: WorkerInfo) -> None:
        """Tells a worker that has joined what is published."""
        with self._lock:
            known = () if info.member_id in (self._told or ()) else self.publications.all()
        for each in known:
            with contextlib.suppress(RpcError):  # this worker leaves
                self.agent.caller.call_notify(
                    info, Kind.CALL, (_learn, each, {}), -1, _Unfollowed()
                )

    def _tell(
        self, members: Iterable[MemberId], function: Callable[..., Any], *args: Any
    ) -> list[Exception]:
        """Calls a function on members at once, and on this one; waits until all have answered.

        Returns the errors of members that live.
        """
        errors: list[Exception] = []
        futures: list[tuple[MemberId, Future[Any]]] = []
        for member in members:
            try:
                if member == self.own_id:
                    self._call(member, function, *args)
                else:
                    info = self.agent.membership.infos[member]
                    body: Any = (function, args, {})
                    call = self.agent.caller.call_async(info, Kind.CALL, body, -1)
                    futures.append((member, call))
            except RpcError as error:
                errors.append(error)
        for member, future in futures:
            try:
                future.wait()
            except RpcError as error:
                if member not in self.agent.membership.lost:
                    errors.append(error)
        return errors

    def claim(self, name: str, id: PublicationId) -> tuple[MemberId | None, int]:
        """Claims a name here; see `Publications.claim`."""
        with self._lock:
            return self.publications.claim(name, id)

    def learn(self, name: str, id: PublicationId, before: int, last: int | None = None) -> None:
        """Learns of a publication; see `Publications.learn`."""
        self._watch_joins()
        with self._lock:
            self.publications.learn(name, id, before, last)
        self._gates.open()

    def end(self, name: str, id: PublicationId, last: int | None = None) -> None:
        """Learns that a publication has ended; see `Publications.end`."""
        with self._lock:
            self.publications.end(name, id, last)
            copy = self._copies.pop(id, None)
        if copy is not None:
            copy.end()

    def latest(self, name: str) -> tuple[Publication | None, bool]:
        """Returns the latest publication under a name, and whether it has begun and not ended."""
        with self._lock:
            found = self.publications.latest(name)
            live = found is not None and found.announced and self.publications.is_live(found)
            return found, live

    def wait_for_news(self, name: str, deadline: float) -> bool:
        """Waits until a publication is announced; returns False if the deadline passes first."""
        gate = self._gates.add()
        try:
            if not (passed := self.agent.closed or self.latest(name)[1]):
                passed = not self._over and pass_gate(gate, _left(deadline))
            if self._over and not self.latest(name)[1]:
                raise _over()
            return passed
        finally:
            self._gates.forget(gate)

    # -- versions --------------------------------------------------------------------------

    def newest(
        self, id: PublicationId, known: int, at_least: int, contents: bool
    ) -> Future[Answer | None]:
        """Returns a future of the newest version that this worker has published."""
        self._used_at = monotonic()
        with self._lock:
            found = self._published.get(id)
        if found is None:
            ended: Future[Answer | None] = Future()
            ended.set_result(None)
            return ended
        return found.ask(known, at_least, contents)

    def copied(self, id: PublicationId, known: int, number: int) -> Future[Answer | None]:
        """Returns a future of a version of another host's publisher, which comes here once."""
        with self._lock:
            copy = self._copies.get(id)
            if copy is None:
                copy = HostCopy(partial(self._fetch, id), self._keep, self.agent.pool.submit)
                # Under the lock: a peer is marked as lost before `on_member_lost`.
                if id.owner not in self.agent.membership.lost:
                    self._copies[id] = copy
        return copy.ask(known, number)

    def _fetch(self, id: PublicationId, known: int, number: int) -> Answer | None:
        """Gets a version from its publisher; that ends when it comes, or the publisher is lost."""
        answer: Answer | None = self._call(id.owner, _newest, id, known, number, True, timeout=0)
        if answer is None:
            with self._lock:
                self._copies.pop(id, None)
        return answer

    def ask(self, id: PublicationId, known: int, at_least: int, deadline: float) -> Answer | None:
        """Waits for a version, and gets it for a subscriber of this worker.

        Returns:
            The newest version; None if the publication has ended.

        Raises:
            WorkerDied: the publisher, or the worker that gets versions for this host, is gone.
            RpcTimeoutError: the deadline has passed.
        """
        source = self.source(id.owner)
        near = source == id.owner
        answer: Answer | None
        answer = self._call(id.owner, _newest, id, known, at_least, near, timeout=_left(deadline))
        if near or answer is None or answer.number == known:
            return answer
        answer = self._call(source, _copied, id, known, answer.number, timeout=_left(deadline))
        return answer

    def source(self, owner: MemberId) -> MemberId:
        """Returns the worker that lends a publisher's versions on this host."""
        membership = self.agent.membership
        if owner == self.own_id or membership.reaches_by_ipc(owner):
            return owner
        here = (m for m in membership.living if m == self.own_id or membership.reaches_by_ipc(m))
        return min(here)

    def _call(
        self, member: MemberId, function: Callable[..., T], *args: Any, timeout: float = -1
    ) -> Any:
        """Calls one of the functions below, on another worker or here."""
        if member != self.own_id:
            info = self.agent.membership.infos[member]
            return self.agent.caller.call(info, Kind.CALL, (function, args, {}), timeout)
        with self.agent.as_current():
            result = function(*args)
        return _value_of(result, max(timeout, 0)) if isinstance(result, Future) else result

    # -- memory ----------------------------------------------------------------------------

    def room(self, size: int) -> torch.Tensor:
        """Returns memory for a version, which is lent to workers on this host if it is large.

        Raises:
            MemoryError: there is not so much.
        """
        self._used_at = monotonic()
        if size < LEAST_BYTES or not self.agent.options.shared_memory:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        shared = self.agent.service(SharedMemoryService)
        with uninterrupted:  # an error of a signal handler would leave the segment taken
            buffer = shared.hold(size)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def return_unused(self) -> None:
        """Returns at once what this worker no longer uses of others' memory."""
        self.agent.service(SharedMemoryService).send_notes()

    def _keep(self, flat: torch.Tensor) -> torch.Tensor:
        if flat.nbytes < LEAST_BYTES:
            return flat
        try:
            return self.room(flat.nbytes).copy_(flat)
        except MemoryError:
            return flat  # copied for each reader, as any large message

    # -- the end ---------------------------------------------------------------------------

    @override
    def tick(self) -> None:
        """Ends the loads that wait, once no worker will publish or push any more."""
        if not self.agent.graceful_shutdown.ends_waits:
            return
        if monotonic() - self._used_at < _QUIET_SECONDS:
            return
        with self._lock:
            self._over = True
            published = list(self._published.values())
        self._gates.open()
        for versions in published:
            if versions.waits_for():
                self.agent.completions.submit(partial(versions.fail, _over()))

    @override
    def on_member_lost(self, member: MemberId) -> None:
        with self._lock:
            gone = [self._copies.pop(id) for id in list(self._copies) if id.owner == member]
        for copy in gone:  # not here: it completes futures
            self.agent.completions.submit(copy.end)

    @override
    def close(self) -> None:
        with self._lock:
            ended = [*self._published.values(), *self._copies.values()]
            self._published.clear()
            self._copies.clear()
        if self._hook is not None:
            self._hook.remove()
        self._gates.end()
        for versions in ended:
            versions.end()
        for subscriber in list(self.subscribers):
            subscriber.drop()


class _Unfollowed:
    """Follows a call whose outcome does not matter."""

    def on_settled(self, call: Any) -> None:
        """Does nothing."""


def _over() -> RpcError:
    return RpcError(
        "expected a version of published weights, but no worker will push one: all have called "
        "shutdown, or the publisher's worker leaves"
    )


def _left(deadline: float) -> float:
    """Returns how many seconds are left, more than 0, which would mean no limit."""
    return max(deadline - monotonic(), 0.001)


def _value_of(future: Future[T], timeout: float) -> T:
    """Waits for a future of this worker, and for no longer than a timeout; see `wait_all`."""
    try:
        return wait_all([future], timeout)[0]
    finally:
        future.cancel()  # unless it is done: nobody waits for it any longer


def _service() -> WeightsService:
    return current_agent().service(WeightsService)


# The functions that workers call on each other.


def _claim(name: str, id: PublicationId) -> tuple[MemberId | None, int]:
    return _service().claim(name, id)


def _learn(name: str, id: PublicationId, before: int, last: int | None = None) -> None:
    _service().learn(name, id, before, last)


def _end(name: str, id: PublicationId, last: int) -> None:
    _service().end(name, id, last)


def _withdraw_dropped(name: str) -> bool:
    return _service().withdraw_dropped(name)


@async_execution
def _newest(*question: Any) -> Future[Answer | None]:
    return _service().newest(*question)


@async_execution
def _copied(*question: Any) -> Future[Answer | None]:
    return _service().copied(*question)
