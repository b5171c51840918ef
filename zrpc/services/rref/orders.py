"""The actors that this worker has RRefs to: the order of its calls, and where they are made again.

An actor with ``restart=True`` keeps its id when its owner dies. The worker that made it has drawn
that id. As soon as another worker joins under the owner's name, the maker sends it what made the
actor. All workers that have RRefs let them mean that worker from then on, and list their forks
there (`References.move`). A call that comes before what makes the actor waits for that, as for any
new value. So that it does not wait in vain, each worker also tells the maker where its calls go. If
the maker has nothing to make there, because the actor was stopped or the maker has dropped its last
RRef, it tells the new owner that there will be no value, and answers that nothing is made. From
then on, a worker fails its own calls, since it knows which actor they are for.

A worker that stops an actor tells its maker at the same time as its owner: neither may keep the
other from hearing of it. If the maker knows of a later owner, it stops the actor there.

What makes the actor belongs to the order of the maker's calls to it, which lives as long as the
maker has an RRef. A name has a reference of its own, so the maker of an actor with a name keeps an
RRef until the actor is stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from typing_extensions import Unpack, override

from zrpc.actors import ActorLabel
from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.agent.service import Service
from zrpc.calls.call_options import CallOptions
from zrpc.calls.future import Future
from zrpc.calls.future_group import collect_all
from zrpc.constants import UNSET_RPC_TIMEOUT, Seconds
from zrpc.errors import OwnerDied, RpcError, WorkerDied
from zrpc.functions import async_execution
from zrpc.membership.worker_info import WorkerInfo
from zrpc.services.actors.actor import stop_within
from zrpc.services.actors.order import Beside, CallOrder
from zrpc.services.rref.messages import RRefId, pack_id
from zrpc.services.rref.service import RRefService
from zrpc.services.rref.value import READY
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

logger = logging.getLogger(__name__)


class ActorOrders(Service):
    """The orders of this worker's calls to actors. Any thread may call its methods."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._service = agent.service(RRefService)  # its lock guards the orders
        self._orders: weakref.WeakValueDictionary[RRefId, CallOrder] = weakref.WeakValueDictionary()
        self._series = itertools.count(1)
        # RRefs to actors with names, which this worker makes again.
        self._kept: dict[RRefId, Any] = {}
        self._watches = False  # whether there was an actor that may be made again

    def order_of(
        self,
        rref_id: RRefId,
        label: ActorLabel,
        owner: WorkerInfo,
        again: Callable[..., Any] | None = None,
    ) -> CallOrder:
        """Returns what numbers this worker's calls to an actor.

        Args:
            rref_id: the actor.
            label: what is known of it.
            owner: its worker.
            again: at its maker, what makes it again on the worker ``to``.
        """
        with self._service.lock:
            order = self._orders.get(rref_id)
            if order is None:
                skip = partial(self._skip, rref_id)
                order = CallOrder(label, owner, next(self._series), pack_id, skip)
                order.again = again if label.restarts else None
                self._orders[rref_id] = order
            watches, self._watches = self._watches, self._watches or label.restarts
        if self._watches and not watches:
            self.agent.joined.add(lambda _: self.follow())
        if order.owner.member_id != owner.member_id:
            self.follow()  # the worker that has sent the RRef has looked before this one
        return order

    def _skip(self, rref_id: RRefId, owner: MemberId, turn: bytes) -> None:
        self.agent.outbox.post(owner, Message(Kind.SKIP, body=pack_id(*rref_id) + turn))

    def keep(self, rref: Any) -> None:
        """Keeps an RRef to an actor with a name, if this worker makes it again.

        If the constructor fails, the name is free for others, and must not be claimed again.
        """
        with self._service.lock:
            if rref._order is None or rref._order.again is None:
                return
            self._kept[rref._rref_id] = rref
        with contextlib.suppress(WorkerDied):
            made = rref._ask_beside(READY, 0, self.agent.caller.call_async)
            owner = rref._owner.member_id
            made.add_done_callback(partial(self._on_made, rref._rref_id, owner))

    def _on_made(self, rref_id: RRefId, owner: MemberId, made: Future[None]) -> None:
        try:
            made.value()
        except Exception:  # WorkerDied may be the constructor's own
            if owner not in self.agent.membership.lost:
                self.forget(rref_id)

    @override
    def close(self) -> None:
        self._kept.clear()

    # -- another owner -----------------------------------------------------------------------

    def owner_of(self, rref: Any) -> WorkerInfo:
        """Returns the worker that an RRef to an actor means now."""
        if rref._owner.member_id in self.agent.membership.lost:
            self.follow()
            rref._owner = rref._order.owner
        owner: WorkerInfo = rref._owner
        return owner

    def check(self, rref: Any) -> None:
        """Lets an RRef whose owner is lost mean another one.

        Raises:
            OwnerDied: there is none, and the RRef has no other error.
        """
        order, membership = rref._order, self.agent.membership
        if order is not None and order.label.restarts:
            if isinstance(rref._failure, WorkerDied):
                rref._failure = None
            if self.owner_of(rref).member_id not in membership.lost:
                return
        if rref._failure is not None:
            return
        advice, maker = "make it again on a worker that lives", rref._rref_id.created_on
        why = self.agent.why_gone(rref._owner.member_id)
        if order is None:
            error = OwnerDied(
                f"{why}; it owned the value of this RRef, which is lost with it: {advice}"
            )
            error.executed = False  # it is not called at all
            raise error
        if order.label.restarts and membership.is_gone(maker):
            advice = f"the worker that made it is lost too: {advice}"
        elif order.label.restarts:
            name = membership.infos[maker].name
            advice = f"{name} makes it again when another worker joins as {order.owner.name}"
        raise order.gone(f"{why}; {advice}")

    @override
    def on_member_lost(self, member: MemberId) -> None:
        if self._watches:
            self.agent.completions.submit(self.follow)

    def follow(self) -> None:
        """Lets the RRefs of actors mean the workers that have taken the places of lost owners."""
        service, membership = self._service, self.agent.membership
        owners: dict[RRefId, MemberId] = {}
        moved: list[tuple[RRefId, CallOrder, WorkerInfo, WorkerInfo]] = []
        with service.lock:
            for rref_id, order in list(self._orders.items()):
                if not order.label.restarts:
                    continue
                gone = membership.is_gone(order.owner.member_id)
                if gone and not membership.is_gone(rref_id.created_on):
                    successor = membership.successor(order.owner)
                    if successor is not None:
                        moved.append((rref_id, order, successor, order.owner))
                        order.move(successor, next(self._series))
                if not membership.is_gone(order.owner.member_id):
                    owners[rref_id] = order.owner.member_id
            # Also those forks that have come since an order was moved.
            service.references.move(owners)
        service.settle_references()
        for each in moved:
            if each[0].created_on == service.member:
                self.agent.receiver.run(partial(self._make, *each[:3]))  # it may wait for room
            else:
                self.agent.completions.submit(partial(self._ask_maker, *each))

    # -- at the maker, and calls to it ---------------------------------------------------------

    def _make(self, rref_id: RRefId, order: CallOrder, owner: WorkerInfo) -> None:
        """Makes an actor again on the worker that has its place; in the pool."""
        again = order.again
        try:
            if again is not None:
                rref = again(to=owner)
                if rref_id in self._kept:
                    self.keep(rref)
                return
        except Exception:
            if self.agent.closed:
                return
            logger.exception("the actor %s can't be made again on %s", order.label, owner)
        self._refuse(rref_id, owner.member_id)

    def _refuse(self, rref_id: RRefId, owner: MemberId) -> None:
        """Tells a worker that an actor is not made there."""
        service = self._service
        fork_id = service.new_id()
        with service.lock:
            service.references.create(rref_id, fork_id, owner)
            service.references.on_not_made(rref_id, fork_id, owner)
            service.references.drop(fork_id)
        service.settle_references()

    def _ask_maker(
        self, rref_id: RRefId, order: CallOrder, owner: WorkerInfo, lost: WorkerInfo
    ) -> None:
        """Tells the maker of an actor where this worker's calls go, instead of to a lost worker."""
        with contextlib.suppress(RpcError):  # it is lost, and the new owner knows of that; or this
            maker = self.agent.membership.infos[rref_id.created_on]
            body: Any = make_again, (rref_id, owner.member_id), {}
            asked = self.agent.caller.call_async(maker, Kind.CALL, body, UNSET_RPC_TIMEOUT)
            asked.add_done_callback(partial(self._on_asked, order, lost))

    def _on_asked(self, order: CallOrder, lost: WorkerInfo, asked: Future[bool]) -> None:
        with contextlib.suppress(RpcError):
            if not asked.value():  # its calls fail here from now on, with errors that name it
                order.end_restarts()
                order.move(lost, next(self._series))

    def answer(self, rref_id: RRefId, owner: MemberId) -> bool:
        """Makes an actor again, as its maker, for a worker whose calls go to ``owner``.

        Returns:
            Whether it does.
        """
        self.follow()
        order = self._orders.get(rref_id)
        if order is not None and order.again is not None:
            return True
        self._refuse(rref_id, owner)
        return False

    def stop(self, rref: Any, timeout: Seconds, call: Callable[..., Any] | None = None) -> Any:
        """Does what `RRef.stop` does; with ``caller.call_async`` it returns a future of that."""
        caller, order = self.agent.caller, rref._order
        told = ended = None
        if order is not None and order.label.restarts:
            owner, about = self.owner_of(rref).member_id, Beside(order, "stop()")
            told = self.end_restarts(rref._rref_id, owner, timeout, order=about)
        # If its owner is lost, the maker may know of a later one; `_outcome` asks for its answer.
        if told is None or owner not in self.agent.membership.lost:
            rref._check()
            within = rref._value is not None and stop_within(rref._value.mailbox, rref._owner)
            ask = call or caller.call if told is None and not within else caller.call_async
            ended = ask(rref._owner, Kind.STOP, None, timeout, **rref._about("stop()"))
            if within or told is None:
                return None if within else ended
        # The value of each of these is a future, and not its error: so both are waited for.
        parts = [each.then(_itself) for each in (told, ended) if each is not None]
        stopped = collect_all(parts).then(partial(self._outcome, rref, told, ended))
        return stopped.wait() if call is None else stopped

    def _outcome(
        self, rref: Any, told: Future[bool], ended: Future[None] | None, _: Future[Any]
    ) -> None:
        """Raises the error of a stop, once the maker and the owner of the actor have answered."""
        elsewhere = False
        with contextlib.suppress(WorkerDied):  # then nobody makes it again either
            elsewhere = told.value()
        rref._order.end_restarts()
        if ended is not None and not elsewhere:
            ended.value()
        elif not elsewhere:
            rref._check()

    def end_restarts(
        self, rref_id: RRefId, owner: MemberId, timeout: Seconds, **about: Unpack[CallOptions]
    ) -> Future[bool] | None:
        """Lets an actor not be made again, see `forget`; returns None if no other worker makes it.

        Args:
            rref_id: of the actor, that its maker has.
            owner: the worker that has it, as far as this one knows.
            timeout: of the call of its maker.
            **about: see `CallOptions`.
        """
        maker = rref_id.created_on
        if maker == self._service.member:
            self.stop_elsewhere(rref_id, owner)
        elif not self.agent.membership.is_gone(maker):
            body: Any = forget, (rref_id, owner), {}
            info = self.agent.membership.infos[maker]
            return self.agent.caller.call_async(info, Kind.CALL, body, timeout, **about)
        return None

    def forget(self, rref_id: RRefId) -> CallOrder | None:
        """Forgets, as its maker, what makes an actor again; returns what numbers its calls."""
        with self._service.lock:
            order, kept = self._orders.get(rref_id), self._kept.pop(rref_id, None)  # noqa: F841
        if order is not None:
            order.again = None
        return order

    def stop_elsewhere(self, rref_id: RRefId, owner: MemberId) -> Future[bool]:
        """Forgets an actor, and stops it if it is on another worker than ``owner``.

        Returns:
            A future of whether it was.
        """
        order, is_gone = self.forget(rref_id), self.agent.membership.is_gone
        if order is not None:
            order.end_restarts()
        if order is None or order.owner.member_id == owner or is_gone(order.owner.member_id):
            nothing: Future[bool] = Future()
            nothing.set_result(False)
            return nothing
        about: CallOptions = {"extension": (Tag.SUBJECT, pack_id(*rref_id))}
        about["order"] = Beside(order, "stop()")
        call = self.agent.caller.call_async
        stopped = call(order.owner, Kind.STOP, None, UNSET_RPC_TIMEOUT, **about)
        return stopped.then(lambda stopped: stopped.value() is None)


def make_again(rref_id: RRefId, owner: MemberId) -> bool:
    """Runs on the maker of an actor: another worker's calls go to ``owner``."""
    return _orders_here().answer(rref_id, owner)


@async_execution
def forget(rref_id: RRefId, owner: MemberId) -> Future[bool]:
    """Runs on the maker of an actor, which is stopped; see `ActorOrders.stop_elsewhere`."""
    return _orders_here().stop_elsewhere(rref_id, owner)


def _itself(future: Future[Any]) -> Future[Any]:
    return future


def _orders_here() -> ActorOrders:
    return current_agent().service(ActorOrders)
