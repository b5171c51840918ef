"""Plugs actors into an agent: their end, and the end of calls that don't report theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import ActorStats, Handler, Service
from zrpc.calls.execution import RequestJob
from zrpc.calls.function_names import handler_name
from zrpc.calls.result_sink import ResultSink, SinkBefore
from zrpc.constants import UNSET_RPC_TIMEOUT
from zrpc.errors import RpcError
from zrpc.services.actors.actor import ActorSink
from zrpc.services.actors.mailbox import Mailbox
from zrpc.services.actors.order import was_stopped
from zrpc.services.rref.messages import RRefId, read_ids
from zrpc.services.rref.orders import ActorOrders
from zrpc.services.rref.service import RRefService
from zrpc.services.rref.value import OwnedValue
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message


class ActorService(Service):
    """Ends actors, and looks after the order of their calls.

    Attributes:
        on_stop: called with the mailbox of each actor of this worker that is stopped, in the pool
            and before its calls are refused.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._rrefs = agent.service(RRefService)
        self.on_stop: list[Callable[[Mailbox], None]] = []

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.SKIP: self._on_skip, Kind.STOP: self._on_stop}

    # -- the order of calls ----------------------------------------------------------------

    def _on_skip(self, message: Message) -> None:
        self._skip(message.sender, *read_ids(message, bytes(message.body)))

    def _skip(self, sender: MemberId, rref_id: RRefId, turn: tuple[int, int]) -> None:
        value = self._rrefs.find_value(rref_id)

        def skip() -> None:
            if value.mailbox is not None:
                value.mailbox.do(value.mailbox.skip(sender, turn))

        value.when_ready(skip)

    @override
    def on_unhandled(self, message: Message) -> None:
        # If it was not read at all, its caller sends SKIP.
        ids = (message.attachments or {}).get(Tag.SUBJECT, ())
        of_actor = ids[2:] if message.kind == Kind.REMOTE else ids
        if len(of_actor) > 1:
            self._skip(message.sender, *of_actor)

    @override
    def actors(self) -> Mapping[str, ActorStats]:
        found: dict[str, list[tuple[list[str], int]]] = {}
        for mailbox in self._rrefs.mailboxes():
            lanes = mailbox.look()
            running = [handler_name(each) for runs, _ in lanes for each in runs]
            waiting = sum(len(each) for _, each in lanes)
            found.setdefault(mailbox.title, []).append((running, waiting))
        return {
            title: ActorStats(
                number=len(all_),
                running=sum(len(running) for running, _ in all_),
                waiting=sum(waiting for _, waiting in all_),
                calls=sorted({name for running, _ in all_ for name in running if name}),
            )
            for title, all_ in found.items()
        }

    @override
    def tick(self) -> None:
        for mailbox in list(self._rrefs.busy):
            mailbox.do(mailbox.sweep())

    @override
    def on_member_lost(self, member: MemberId) -> None:
        for mailbox in self._rrefs.mailboxes():
            mailbox.do(mailbox.forget(member))

    @override
    def on_answered(self, member: MemberId) -> None:
        for mailbox in list(self._rrefs.busy):
            mailbox.do(mailbox.on_answered(member))

    @override
    def awaited_members(self) -> Collection[MemberId]:
        busy = list(self._rrefs.busy)
        return {MemberId(each) for mailbox in busy for each in mailbox.missing()}

    # -- the end of an actor ---------------------------------------------------------------

    def _on_stop(self, request: Message) -> None:
        rref_id = request.attachment(Tag.SUBJECT)[0]
        value = self._rrefs.find_value(rref_id)
        self.agent.callee.requests.accept(request)
        stop = RequestJob(request, self.agent.callee.fail, partial(self._stop, rref_id, value))
        # The calls that wait for the constructor must not begin when it has ended.
        if not value.before_others(stop):
            self.agent.receiver.run(stop)

    def _stop(self, rref_id: RRefId, value: OwnedValue, request: Message) -> None:
        """Stops an actor; in the pool, or in the thread that has made it."""
        callee, mailbox = self.agent.callee, value.mailbox
        if mailbox is None:
            callee.refuse(request, _why_no_actor(value))
            return
        request.scope.mailbox = mailbox
        for follower in self.on_stop:
            follower(mailbox)
        made_as = None if value.actor is None else value.actor.made_as
        if made_as is not None and made_as != rref_id:  # else who stops it has told its maker
            own_id = self.agent.worker_info.member_id
            self.agent.service(ActorOrders).end_restarts(made_as, own_id, UNSET_RPC_TIMEOUT)
        by = self.agent.callees.describe(request.sender)
        error = was_stopped(mailbox.title, self.agent.worker_info.name, by)
        sink = ActorSink(_StopSink(callee, value, mailbox.stopped or error))
        begin = partial(callee.on_call, request, sink, partial(_close_method, value))
        # If it fails while it waits for the end, it has stopped the actor nevertheless.
        mailbox.do(mailbox.stop(error, (request, begin, partial(callee.answer_error, request))))


def _why_no_actor(value: OwnedValue) -> BaseException:
    """Returns the error of a stop of something else; of what has failed, its own."""
    try:
        found = type(value.get()).__name__
    except BaseException as error:
        return error
    return RpcError(f"stop() ends an actor, and the value of this RRef is none: it is a {found}")


def _close_method(value: OwnedValue) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns what closes an actor."""
    close = None if value.ended else getattr(value.get(), "close", None)
    return close if callable(close) else _nothing, (), {}


def _nothing() -> None:
    """Closes an actor that has no ``close()``."""


@dataclass(slots=True, eq=False)
class _StopSink(SinkBefore[ResultSink]):
    """Drops an actor once it is closed, and then answers who has stopped it.

    Args:
        error: of what is asked of the actor from then on.
    """

    _value: OwnedValue
    _error: BaseException

    def answer(self, request: Message, value: object) -> None:
        """Takes the result of ``close()``, which nobody gets."""
        del value
        self._value.end(self._error)
        self._sink.answer(request, None)

    def fail(self, request: Message, error: BaseException, report: bool = True) -> None:
        """Takes what ``close()`` has raised."""
        self._value.end(self._error)
        self._sink.fail(request, error, report)
