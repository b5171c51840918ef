"""One worker's part of a backward pass: one run of torch's engine, over what leads to the roots."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.calls.pending_call import PendingCall
from zrpc.errors import BackwardError, RpcError, WorkerDied, text_of
from zrpc.runtime.interrupts import UninterruptedLock, raised_by_handler
from zrpc.services.autograd import ddp, engine
from zrpc.services.autograd.contexts import PASS_LAYOUT, in_context, pass_fields, pass_name
from zrpc.services.autograd.dependencies import Origin, Sources, UsedTensors
from zrpc.services.autograd.nodes import (
    Gradients,
    OwnHook,
    append_wait,
    exit_of,
    running,
    visit_accelerator,
    without_gaps,
)
from zrpc.services.autograd.state import ContextState, SentTensor
from zrpc.wire.devices import TO_CPU
from zrpc.wire.exceptions import dump_exception, load_exception
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId, rank_of
from zrpc.wire.message import Message

# How long a pass waits for an accelerator to compute what other workers wait for. It fails after
# that: if a node of the pass has failed meanwhile, torch's engine runs no more nodes, and does not
# report that before this thread returns.
ACCELERATOR_SECONDS = 60.0


class Part(NamedTuple):
    """What one worker does in a pass.

    Attributes:
        sent: which tensors lead to the roots, for each message that it has sent.
        arrived: the messages whose gradients it sends back.
        retain_graph: whether another pass may go over the same graph.
    """

    sent: Mapping[int, Sequence[int]]
    arrived: Sequence[Origin]
    retain_graph: bool


class RunningPart:
    """Runs one worker's part of a pass.

    One thread runs it. Any thread may call `fail` and `fail_as`; the I/O thread does.

    Attributes:
        state, context_id: the context.
        pass_id: the pass.
        mailbox: what arrives for it.
        linked: the workers that it waits for, or that wait for it. They hear of a failure.
    """

    def __init__(self, agent: Agent, state: ContextState, pass_id: int) -> None:
        self.state = state
        self.context_id = state.context_id
        self.pass_id = pass_id
        self.mailbox = state.mailbox(pass_id)
        self.linked: frozenset[MemberId] = frozenset()
        self._agent = agent
        # Gradients that have arrived, until their `Send` nodes run.
        self._gradients: dict[int, Gradients] = {}
        # Messages whose gradients must still be computed, with their numbers here.
        self._uncomputed: dict[Origin, int] = {}
        self._awaited = 0  # messages whose gradients must still arrive

    # -- for the thread that runs it -------------------------------------------------------

    def run(self, part: Part, roots: Sequence[torch.Tensor], linked: Iterable[MemberId]) -> None:
        """Runs the engine; ``linked`` are workers of the pass beside those that ``part`` names."""
        before = running.set(self)
        try:
            sent = self.state.take(part.sent, part.arrived, part.retain_graph)
            self._awaited = len(sent)
            receives = self.state.receives
            self._uncomputed = {origin: receives[origin].number for origin in part.arrived}
            members = {sender for sender, _ in part.arrived}.union(linked)
            members.update(tensors[0].to for tensors in sent.values())
            members.discard(self._agent.worker_info.member_id)
            self.linked = frozenset(members)
            self._check_linked()
            self._run_engine(part, roots, sent)
        except BaseException as error:
            # Also if Ctrl-C ends it, or a hook that exits: the others must not wait for this part.
            if isinstance(error, Exception) and not raised_by_handler(error):
                self.fail(error)
                self.mailbox.check()
            self.fail(RpcError(f"interrupted by {type(error).__name__}"))
            raise
        finally:
            running.set(before)

    def _check_linked(self) -> None:
        """Raises if a worker that takes part is lost already, or some of its messages are.

        What is lost from now on fails the pass: see `AutogradService`.
        """
        for member in self.linked:
            if member in self._agent.membership.lost:
                raise worker_died(self._agent, member)
            if member in self.state.incomplete:
                raise messages_lost(self._agent, member)

    def _run_engine(
        self, part: Part, roots: Sequence[torch.Tensor], sent: Mapping[int, list[SentTensor]]
    ) -> None:
        last, reach = self.state.start, 0
        for number, tensors in sent.items():
            wait = OwnHook(self._await_gradients, tensors[0].to, number)
            last = append_wait(last, wait, exit_of(tensors[0].exit, sorted(part.sent[number])))
            reach = reduce(or_, [tensor.reach for tensor in tensors], reach)
        # Only if it is needed: to make it takes longer than to record it.
        name = pass_name(self.context_id, self.pass_id) if self._agent.recorder else ""
        with self._agent.span(f"backward {name}"):
            engine.run(roots, last, part.retain_graph, self.state, reach)

    def _await_gradients(self, to: MemberId, number: int, _: object) -> None:
        """Waits for the gradients of the tensors of a sent message; a hook of a node."""
        deadline = time.monotonic() + ACCELERATOR_SECONDS
        # Without an accelerator, all that is needed was received before this was sent.
        while max(self._uncomputed.values(), default=0) > number and visit_accelerator():
            self.mailbox.check()
            if time.monotonic() > deadline:
                raise BackwardError(
                    f"expected gradients that an accelerator computes within "
                    f"{ACCELERATOR_SECONDS:.0f} seconds, found none: look for an error or a long "
                    "computation in this worker's part of the pass"
                )
        gradients = self.mailbox.wait((to, number), self._agent.receiver.receive)
        self._awaited -= 1
        if isinstance(gradients, Message):
            gradients = self._agent.codec.unpack(gradients) if gradients.body else ()
        self._gradients[number] = gradients

    def gradients_of(self, send_id: int) -> Gradients:
        """Returns the gradients of a sent message, and forgets them; for a `Send` node."""
        return self._gradients.pop(send_id, ())

    def send_gradients(self, sender: MemberId, send_id: int, gradients: Gradients) -> None:
        """Sends the gradients of tensors that were received; for a `Receive` node."""
        self.mailbox.check()
        self._uncomputed.pop((sender, send_id), None)
        self._send((sender, send_id), gradients)

    def _send(self, origin: Origin, gradients: Gradients) -> None:
        """Sends the gradients of a received message alone."""
        peer, send_id = origin
        message = Message(Kind.GRADIENT)
        if any(gradient is not None for gradient in gradients):
            with in_context(None):
                self._agent.codec.encoder(peer, TO_CPU).pack(without_gaps(gradients), message)
        message.extensions = [*message.extensions, self._extension(send_id)]
        self._agent.outbox.post(peer, message)

    def _extension(self, send_id: int = 0) -> tuple[int, bytes]:
        return Tag.PASS, PASS_LAYOUT.pack(self.context_id, self.pass_id, send_id)

    # -- for any thread --------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Fails the whole pass, because this worker's part has failed."""
        if self.mailbox.fail(lambda: error):
            self._abort(dump_exception(error, repr(self._agent.worker_info), same_main=False))

    def fail_as(self, body: bytes) -> None:
        """Fails the whole pass with the error of another worker's part."""
        if self.mailbox.fail(lambda: load_exception(body)):
            self._abort(body)

    def _abort(self, body: bytes) -> None:
        for peer in self.linked:
            aborted = Message(Kind.ABORT, body=body, extensions=[self._extension()])
            self._agent.outbox.post(peer, aborted)


class Initiator(RunningPart):
    """Begins a pass, and has other workers take part."""

    def __init__(self, agent: Agent, state: ContextState, pass_id: int) -> None:
        super().__init__(agent, state, pass_id)
        self._own_id = agent.worker_info.member_id
        self._others: dict[MemberId, Part] = {}
        # Parts to ask for with the gradients of a received message.
        self._openings: dict[Origin, tuple[MemberId, Part]] = {}

    def begin(self, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs the pass from its roots, and returns when all workers have done their parts."""
        used = self._find_used(roots)
        parts = {
            member: Part(
                used.sent.get(member, {}), sorted(used.received.get(member, ())), retain_graph
            )
            for member in used.sent.keys() | {self._own_id}
        }
        own = parts.pop(self._own_id)
        self._others = parts
        self.run(own, roots, parts)

    def _find_used(self, roots: Sequence[torch.Tensor]) -> UsedTensors:
        """Finds the tensors that lead to the roots, on all workers."""
        used, tracer = UsedTensors(self.state.carried), self.state.tracer
        used.learn(self._own_id, self.state.sources())
        used.use(self._own_id, tracer.arrived(reduce(or_, map(tracer.reach, roots))))
        infos, call = self._agent.membership.infos, self._agent.caller.call_async
        while peers := used.to_ask():
            asked = {
                peer: call(infos[peer], Kind.DEPENDENCIES, None, 0, extension=self._extension())
                for peer in peers
            }
            for peer, future in asked.items():
                used.learn(peer, Sources(*future.wait()))
        return used

    @override
    def _run_engine(
        self, part: Part, roots: Sequence[torch.Tensor], sent: Mapping[int, list[SentTensor]]
    ) -> None:
        for peer, other in self._others.items():
            # What a worker has sent last is what it needs gradients of first. If these are
            # computed here, the worker can do nothing before them.
            latest = peer, max(other.sent)
            if latest in self._uncomputed:
                self._openings[latest] = peer, other
            else:
                self._ask(peer, other)
        super()._run_engine(part, roots, sent)
        for peer in self._others:
            self.mailbox.wait((peer, 0), self._agent.receiver.receive)

    def _ask(self, peer: MemberId, part: Part, send_id: int = 0, gradients: Gradients = ()) -> None:
        """Asks a worker to run its part, with the first gradients that it needs."""
        with in_context(None):
            self._agent.caller.call_notify(
                self._agent.membership.infos[peer],
                Kind.BACKWARD,
                (tuple(part), without_gaps(gradients)),
                0,
                self,
                extension=self._extension(send_id),
                devices=TO_CPU,
            )

    @override
    def _send(self, origin: Origin, gradients: Gradients) -> None:
        opening = self._openings.pop(origin, None)
        if opening is None:
            super()._send(origin, gradients)
        else:
            self._ask(*opening, origin[1], gradients)

    def on_settled(self, call: PendingCall) -> None:
        """Takes the answer to BACKWARD, with gradients, or the error; in the I/O thread."""
        try:
            peer, outcome = call.peer, call.claim()
            if isinstance(outcome, Exception):
                self.fail(outcome)
            elif outcome.kind == Kind.ERROR:
                self.fail_as(bytes(outcome.body))
            else:
                send_id = pass_fields(outcome)[2]
                if send_id:
                    self.mailbox.deliver((peer, send_id), outcome)
                self.mailbox.deliver((peer, 0), None)
        except Exception as error:  # no memory for a frame, say; the answer comes only once
            self.fail(error)
            raise


class Participant(RunningPart):
    """Takes part in a pass for the worker that has begun it.

    The gradients that it computes last for that worker travel with its answer. So they are held
    back until the part ends, or until that takes long: what is left of the part could wait for
    other workers, by a hook or a function of the user's that zrpc does not know of, and these could
    need the gradients.
    """

    def __init__(
        self, agent: Agent, state: ContextState, pass_id: int, initiator: MemberId
    ) -> None:
        super().__init__(agent, state, pass_id)
        self._initiator = initiator
        # Guards what follows, and is held while they are sent: the answer comes after that.
        self._lock = UninterruptedLock()
        self._held: tuple[Origin, Gradients] | None = None
        self._ticks = 0

    def answer(self, request: Message, part: Part, send_id: int, gradients: Gradients) -> None:
        """Runs the part and answers the request, which may have come with gradients.

        Raises:
            Exception: the pass has failed.
        """
        self.mailbox.check()
        if send_id:
            self.mailbox.deliver((self._initiator, send_id), gradients)
        try:
            self.run(part, (), [self._initiator])
        finally:
            self.mailbox.check()  # in place of what a hook has exited with
        with self._lock:
            (_, send_id), last = self._held or ((self._initiator, 0), ())
            self._held = None
        extension = self._extension(send_id)
        self._agent.callee.answer(request, without_gaps(last), extension, TO_CPU)

    @override
    def _send(self, origin: Origin, gradients: Gradients) -> None:
        is_last = not self._awaited and not self._uncomputed
        if is_last and origin[0] == self._initiator and not ddp.in_use():
            with self._lock:
                self._held = origin, gradients
        else:
            super()._send(origin, gradients)

    def tick(self) -> None:
        """Sends held-back gradients if what is left of the part takes long; in the I/O thread."""
        if self._held is not None:
            self._ticks += 1
            if self._ticks > 1:  # a whole one
                self._agent.pool.submit(self._send_held)

    def _send_held(self) -> None:
        with self._lock:
            if self._held is not None:
                super()._send(*self._held)
                self._held = None

    @override
    def fail(self, error: Exception) -> None:
        if not isinstance(error, (BackwardError, WorkerDied)):
            error = BackwardError(f"Error on Node {self._agent.worker_info.id}: {text_of(error)}")
        super().fail(error)


def worker_died(agent: Agent, member: MemberId) -> WorkerDied:
    """Returns the error of a pass that a lost member takes part in."""
    why = agent.why_gone(member)
    return WorkerDied(f"Error on Node {rank_of(member)}: during a backward pass, {why}")


def messages_lost(agent: Agent, member: MemberId) -> RpcError:
    """Returns the error of a pass if some of its messages may be lost."""
    return RpcError(
        f"during a backward pass, messages from {agent.membership.infos[member]} were lost: a "
        "connection broke, or there was no memory or file descriptor for them; run the pass again "
        "in a new context"
    )
