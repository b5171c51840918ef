"""One worker's part of a backward pass: one run of torch's engine, over what leads to the roots."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zrpc.agent.agent import Agent
from zrpc.errors import RpcError
from zrpc.runtime.interrupts import raised_by_handler
from zrpc.services.autograd import engine
from zrpc.services.autograd.accelerator import visit_accelerator
from zrpc.services.autograd.contexts import PASS_LAYOUT, current_id, pass_name
from zrpc.services.autograd.dependencies import Origin
from zrpc.services.autograd.node_hooks import OwnHook
from zrpc.services.autograd.nodes import Gradients, append_wait, running, without_gaps
from zrpc.services.autograd.pass_errors import accelerator_stalled, messages_lost, worker_died
from zrpc.services.autograd.state import ContextState, SentMessage
from zrpc.wire.exceptions import dump_exception, load_exception
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["Part", "RunningPart"]

# How long a pass waits for an accelerator to compute what other workers wait for. It fails after
# that: if a node of the pass has failed meanwhile, torch's engine runs no more nodes, and does not
# report that before this thread returns.
ACCELERATOR_SECONDS = 60.0


class Part(NamedTuple):
    """What one worker does in a pass.

    Attributes:
        sent: which tensors of which messages that it has sent lead to the roots.
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
        state: the context.
        pass_id: the pass.
        mailbox: what arrives for it.
        linked: the workers that it waits for, or that wait for it. They hear of a failure.
    """

    def __init__(self, agent: Agent, state: ContextState, pass_id: int) -> None:
        self.state = state
        self.pass_id = pass_id
        self.mailbox = state.mailbox(pass_id)
        self.linked: frozenset[MemberId] = frozenset()
        self._agent = agent
        # Workers asked to take part, until they answer. Single operations on the set are atomic.
        self._asked: set[MemberId] = set()
        # Between two waits, no other thread need receive.
        self._receive = partial(agent.receiver.receive, own_calls=self._asked.__len__)
        # Gradients that have arrived, until their `Send` nodes run.
        self._gradients: dict[tuple[int, int], torch.Tensor | None] = {}
        # Messages whose gradients must still be computed, with their numbers here.
        self._uncomputed: dict[Origin, int] = {}
        self._awaited = 0  # messages whose gradients must still arrive

    @property
    def context_id(self) -> int:
        """The context of the pass."""
        return self.state.context_id

    # -- for the thread that runs it -------------------------------------------------------

    def run(self, part: Part, roots: Sequence[torch.Tensor], linked: Iterable[MemberId]) -> None:
        """Runs the engine; ``linked`` are workers of the pass beside those that ``part`` names."""
        token = running.set(self)
        try:
            sent = self.state.take(part.sent, part.arrived, part.retain_graph)
            self._awaited = len(sent)
            receives = self.state.receives
            self._uncomputed = {origin: receives[origin].number for origin in part.arrived}
            members = {sender for sender, _ in part.arrived}.union(linked)
            members.update(message.to for message in sent)
            members.discard(self._agent.worker_info.member_id)
            self.linked = frozenset(members)
            self._check_linked()
            self._begin()
            self._run_engine(part, roots, sent)
            self._wait_for_others()
        except BaseException as error:
            # Also if Ctrl-C ends it, or a hook that exits: the others must not wait for this part.
            if isinstance(error, Exception) and not raised_by_handler(error):
                self.fail(error)
                self.mailbox.check()
            self.fail(RpcError(f"interrupted by {type(error).__name__}"))
            raise
        finally:
            running.reset(token)

    def _begin(self) -> None:
        """Does what comes before the engine runs."""

    def _wait_for_others(self) -> None:
        """Waits for what must end before the pass does."""

    def _check_linked(self) -> None:
        """Raises if a worker that takes part is lost already, or some of its messages are.

        What is lost from now on fails the pass: see `Passes`.
        """
        for member in self.linked:
            if member in self._agent.membership.lost:
                raise worker_died(self._agent, member)
            if member in self.state.incomplete:
                raise messages_lost(self._agent, member)

    def _run_engine(
        self, part: Part, roots: Sequence[torch.Tensor], sent: Sequence[SentMessage]
    ) -> None:
        last, leaves = self.state.start, 0
        for message in sent:
            wait = OwnHook(self._await_gradients, message)
            last = append_wait(last, wait, message.exits.values())
            leaves |= message.leaves
        # Only if it is needed: to make it takes longer than to record it.
        name = pass_name(self.context_id, self.pass_id) if self._agent.recorder else ""
        with self._agent.span(f"backward {name}"):
            engine.run(roots, last, part.retain_graph, self.state, leaves)

    def _await_gradients(self, message: SentMessage, _: object) -> None:
        """Waits for the gradients of tensors that were sent; a hook of a node."""
        deadline = time.monotonic() + ACCELERATOR_SECONDS
        # Without an accelerator, all that is needed was received before this was sent.
        while max(self._uncomputed.values(), default=0) > message.number and visit_accelerator():
            self.mailbox.check()
            if time.monotonic() > deadline:
                raise accelerator_stalled(ACCELERATOR_SECONDS)
        gradients = self.mailbox.wait((message.to, message.number), self._receive)
        self._awaited -= 1
        if isinstance(gradients, Message):
            gradients = self._agent.codec.unpack(gradients) if gradients.body else ()
        for index, gradient in enumerate(gradients):
            self._gradients[message.number, index] = gradient

    def gradient_of(self, send_id: int, index: int) -> torch.Tensor | None:
        """Returns the gradient of a sent tensor, and forgets it; for a `Send` node."""
        return self._gradients.pop((send_id, index), None)

    def send_gradients(self, sender: MemberId, send_id: int, gradients: Gradients) -> None:
        """Sends the gradients of tensors that were received; for a `Receive` node."""
        self.mailbox.check()
        self._uncomputed.pop((sender, send_id), None)
        self._send((sender, send_id), gradients)

    def _send(self, origin: Origin, gradients: Gradients) -> None:
        self._post(origin, gradients)

    def _post(self, origin: Origin, gradients: Gradients) -> None:
        """Sends the gradients of a received message alone."""
        peer, send_id = origin
        message = Message(Kind.GRADIENT)
        if any(gradient is not None for gradient in gradients):
            token = current_id.set(None)  # outside of contexts
            try:
                self._agent.codec.encoder(peer).pack(without_gaps(gradients), message)
            finally:
                current_id.reset(token)
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
