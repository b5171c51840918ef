"""Plugs names into an agent: actors that are made under a name, and found by it."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import override

from zrpc.actors import ActorLabel
from zrpc.agent.agent import Agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.future import Future
from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import RpcError, WorkerDied, expecting, has_shut_down, of_lost_message
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.actors.mailbox import Mailbox
from zrpc.services.actors.service import ActorService
from zrpc.services.names.messages import Holder, Naming, dump, parse
from zrpc.services.names.registry import NameRegistry
from zrpc.services.names.waiting import Waiting
from zrpc.services.rref.messages import NO_FORK, Fork, RRefId
from zrpc.services.rref.rref import RRef
from zrpc.services.rref.service import RRefService
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

Follower = Callable[[Holder, bool], object]

# What has no answer is sent again after this time: a message may be lost with its connection.
_REPEAT_SECONDS = 2.0
# For how long actors that could not be made are kept, and how many at most: for makers that share
# the name, and were told who has it before it was free again.
_KEPT_SECONDS = 10.0
_MAX_KEPT = 64


@dataclass(slots=True, eq=False)
class _Named:
    """An actor of this worker that has a name.

    Attributes:
        number: of the claim that was granted.
        rref: the name's own reference.
        what: what was made, and by whom, for messages to people.
    """

    number: int
    rref: RRef[Any]
    what: str


class NameService(Service, MessageHooks):
    """The names of actors: those that this worker's actors have, and questions about others."""

    tag = Tag.NAMING

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._own_id = agent.worker_info.member_id
        self._rrefs = agent.service(RRefService)
        membership = agent.membership
        # Guards what follows. Nothing is sent and no other code is called under it.
        self._lock = UninterruptedLock()
        self._registry = NameRegistry(
            self._own_id,
            lambda: membership.living,
            lambda: [member for member in list(membership.infos) if member not in membership.lost],
        )
        # What is called with the holder, by the number of the claim or question; removed after
        # that.
        self._followers: dict[int, list[Follower]] = {}
        # The actors of this worker, by name.
        self._named: dict[str, _Named] = {}
        # Those that could not be made, each with the time until which it is kept.
        self._failed: deque[tuple[float, _Named]] = deque()
        # What threads wait for; of one that makes an actor, with its id.
        self._waiting: dict[Waiting[Any], RRefId | None] = {}
        self._next_repeat = 0.0
        agent.service(ActorService).on_stop.append(self.release)

    # -- questions -------------------------------------------------------------------------

    def ask(
        self,
        name: str,
        follower: Follower,
        *,
        claims: bool = False,
        past: Holder | None = None,
    ) -> int:
        """Asks who holds a name, or claims it, see `NameRegistry.ask`; returns the number.

        ``follower`` is called with the holder, and whether that is this claim; soon or in the midst
        of this, in any thread.
        """
        with self._lock:
            number = self._registry.ask(name, claims, past)
            self._followers[number] = [follower]
        self._settle()
        return number

    def drop_question(self, name: str, number: int) -> None:
        """Ends a question whose answer nobody waits for any longer."""
        with self._lock:
            if self._followers.pop(number, None) is not None:
                self._registry.free(name, number)
        self._settle()

    @contextlib.contextmanager
    def waits(self, waiting: Waiting[Any], rref_id: RRefId | None = None) -> Iterator[None]:
        """While a thread waits: fails it if this worker closes, or its actor's owner is lost.

        Args:
            waiting: what it waits for.
            rref_id: the actor that is made; `answer` is then called with who has its name.
        """
        with self._lock:
            self._waiting[waiting] = rref_id
        try:
            if self.agent.closed:
                raise has_shut_down()
            # Lost before this thread waited: `on_member_lost` does not come again.
            if waiting.member in self.agent.membership.lost:
                error = WorkerDied(self.agent.why_gone(waiting.member))
                error.executed = False
                waiting.fail(error)
            yield
        finally:
            with self._lock:
                del self._waiting[waiting]

    # -- at the owner ----------------------------------------------------------------------

    @override
    def when_ready(self, request: Message, begin: Callable[[], None]) -> None:
        """Claims the name of an actor that this worker is asked to make; then lets it begin."""
        naming: Naming = request.attachment(Tag.NAMING)
        self.ask(
            naming.name,
            partial(self._on_claimed, request, begin, naming),
            claims=True,
            past=naming.past,
        )

    def _on_claimed(
        self,
        request: Message,
        begin: Callable[[], None],
        naming: Naming,
        holder: Holder,
        mine: bool,
    ) -> None:
        rref_id = request.attachment(Tag.SUBJECT)[0]
        value = self._rrefs.values.get(rref_id)
        if mine and value is not None:
            what = f"{naming.what} on {self.agent.worker_info.name}, made by "
            what += self.agent.callees.describe(request.sender)
            value.name = naming.name
            label = ActorLabel(naming.what, naming.name, naming.restarts)
            rref = self._handle(rref_id, label if naming.actor else None)
            with self._lock:
                self._named[naming.name] = _Named(holder.number, rref, what)
            value.when_ready(partial(self._on_made, naming.name, holder.number, value))
            begin()
        else:
            if mine:  # the maker is this worker, and waits no longer
                self._give_up(naming.name, holder.number)
            elif value is not None:
                what = f"{naming.what} is not made: its name {naming.name!r} is taken"
                value.set(error=of_lost_message(what, False))
            self.agent.receiver.run(partial(self._answer_empty, request))
        self._tell(request.sender, rref_id, None if mine else holder)

    def _handle(self, rref_id: RRefId, label: ActorLabel | None) -> RRef[Any]:
        """Returns one more handle of a value that this worker owns; of an actor with its label."""
        fork = Fork(rref_id, NO_FORK, self._own_id, NO_FORK)
        rref = RRef._of_fork(self._rrefs, fork, self._rrefs.retain_value(rref_id))
        if label is not None:
            rref._number_calls(label)
        return rref

    def _answer_empty(self, request: Message) -> None:
        self.agent.callee.answer(request, None)

    def _on_made(self, name: str, number: int, value: Any) -> None:
        try:
            value.get()
        except BaseException:
            self._give_up(name, number, failed=True)

    def _give_up(self, name: str, number: int, failed: bool = False) -> None:
        """Gives up a name, and its reference; soon, if the actor could not be made."""
        gone = []  # outlives the lock
        with self._lock:
            if name in self._named and self._named[name].number == number:
                gone.append(self._named.pop(name))
                if failed:
                    self._failed.append((time.monotonic() + _KEPT_SECONDS, gone[0]))
                    gone += self._forget_failed()
            self._registry.free(name, number)
        self._settle()

    def _forget_failed(self) -> list[_Named]:
        """Takes out the failed actors that are not kept any longer. The lock is held."""
        gone, now = [], time.monotonic()
        while self._failed and (self._failed[0][0] < now or len(self._failed) > _MAX_KEPT):
            gone.append(self._failed.popleft()[1])
        return gone

    def release(self, mailbox: Mailbox) -> None:
        """Gives up the names of an actor that is stopped, by whatever RRef. From any thread."""
        with self._lock:
            named = [(n, e.number, e.rref._value) for n, e in self._named.items()]
        found = [(n, number) for n, number, value in named if value and value.mailbox is mailbox]
        for name, number in found:
            self._give_up(name, number)

    def describe(self, name: str, number: int, shares: bool | None) -> Future[Any]:
        """Returns what has a name here by a claim, see `zrpc.services.names.claims.get_actor`.

        If the grant has not arrived yet, that is waited for.
        """
        answer: Future[tuple[str, Any] | None] = Future()
        look = partial(self._describe, name, number, shares, answer)
        with self._lock:
            followers = self._followers.get(number)
            if followers is not None:
                followers.append(lambda *_: self.agent.completions.submit(look))
        if followers is None:
            look()
        return answer

    def _describe(
        self, name: str, number: int, shares: bool | None, answer: Future[tuple[str, Any] | None]
    ) -> None:
        with self._lock:
            named = self._named.get(name)
            if named is None or named.number != number:
                self._registry.deny(name, number)
                failed = [each for _, each in self._failed if each.number == number]
                named = failed[0] if failed and shares else None
        self._settle()
        rref = named.rref if named is not None and shares is not False else None
        answer.set_result(None if named is None else (named.what, rref))

    # -- messages --------------------------------------------------------------------------

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.NAMES: self._on_message, Kind.NAMED: self._on_named}

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {Tag.NAMING: lambda _, data: Naming.parse(data)}

    @override
    def message_hooks(self) -> MessageHooks:
        return self

    def _on_message(self, message: Message) -> None:
        content = parse(message.body)
        with self._lock:
            self._registry.handle(message.sender, content)
        self._settle()

    def _settle(self) -> None:
        """Sends what the registry has to send, and passes on what it has found out."""
        registry = self._registry
        with self._lock:
            outgoing, registry.outgoing = registry.outgoing, []
            settled, registry.settled = registry.settled, []
            lost, registry.lost = registry.lost, []
        for member, content in outgoing:
            self.agent.outbox.post(member, Message(Kind.NAMES, body=dump(content)))
        for number, holder in settled:
            # More may be added until this is done.
            while followers := self._next_followers(number):
                for follower in followers:
                    follower(holder, holder == (self._own_id, number))
        for name, number in lost:
            self._give_up(name, number)

    def _next_followers(self, number: int) -> list[Follower]:
        with self._lock:
            followers = self._followers.get(number, [])
            if followers:
                self._followers[number] = []
            else:
                self._followers.pop(number, None)
            return followers

    def _tell(self, maker: MemberId, rref_id: RRefId, holder: Holder | None) -> None:
        """Tells the maker of an actor that it has its name, or who has it."""
        if maker == self._own_id:
            self._on_outcome(rref_id, holder)
        else:
            body = json.dumps([rref_id, holder]).encode()
            self.agent.outbox.post(maker, Message(Kind.NAMED, body=body))

    def _on_named(self, message: Message) -> None:
        with expecting("who has a name"):
            (created_on, local_id), holder = json.loads(bytes(message.body))
            rref_id = RRefId(MemberId(int(created_on)), int(local_id))
            holder = holder and Holder(MemberId(int(holder[0])), int(holder[1]))
        self._on_outcome(rref_id, holder)

    def _on_outcome(self, rref_id: RRefId, holder: Holder | None) -> None:
        with self._lock:
            makers = [waiting for waiting, of in self._waiting.items() if of == rref_id]
        for maker in makers:
            maker.answer(holder)

    # -- events of the agent ---------------------------------------------------------------

    @override
    def on_member_lost(self, member: MemberId) -> None:
        with self._lock:
            waiting = [each for each in self._waiting if each.member == member]
            self._registry.on_member_lost(member)
        for each in waiting:
            each.fail(WorkerDied(self.agent.why_gone(member)))
        self._settle()

    @override
    def tick(self) -> None:
        now = time.monotonic()
        if now < self._next_repeat:
            return
        self._next_repeat = now + _REPEAT_SECONDS
        with self._lock:
            gone = self._forget_failed()  # noqa: F841  # outlives the lock
            self._registry.repeat()
        self._settle()

    @override
    def on_messages_lost(self, member: MemberId) -> None:
        self._next_repeat = 0.0
        text = (
            f"a message from {self.agent.membership.infos[member]} is lost, which may have said "
            "whether an actor has its name: a connection broke. zrpc.get_actor() finds it if it has"
        )
        for each in self._makers():
            if each.member == member:
                each.fail(RpcError(text))

    @override
    def awaited_members(self) -> Collection[MemberId]:
        return {each.member for each in self._makers()} - {self._own_id}

    def _makers(self) -> list[Waiting[Any]]:
        """Returns the waits of threads that make actors."""
        with self._lock:
            return [waiting for waiting, of in self._waiting.items() if of is not None]

    @override
    def idle(self) -> bool:
        with self._lock:
            return not self._registry.claiming

    @override
    def stats(self) -> Mapping[str, int]:
        return {"names_held": len(self._named)}

    @override
    def close(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
            named, self._named = self._named, {}
            failed, self._failed = self._failed, deque()
        for each in waiting:
            each.fail(has_shut_down())
        named.clear()
        failed.clear()
