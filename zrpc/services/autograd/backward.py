"""Backward passes: one worker's part in them.

The worker that begins a pass first finds out which tensors lead to the roots. Messages say what
their tensors were computed from. If that is not known here, because a message went to another
worker, its sender is asked (DEPENDENCIES). Then it asks each worker that has sent tensors which
lead to the roots to take part, and says which (BACKWARD). Each runs its engine once, over what
leads to the roots and nothing else, and answers when that is done.

A `Receive` node sends the gradients of its tensors back (GRADIENT), and a turn waits for
them; see `zrpc.services.autograd.nodes`. The first gradients to a worker travel with BACKWARD if
it needs them before all others, and its last ones with its answer.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler
from zrpc.calls.execution import RequestJob
from zrpc.calls.pending_call import PendingCall
from zrpc.errors import BackwardError, RpcError
from zrpc.runtime.interrupts import raised_by_handler
from zrpc.services.autograd import ddp, engine
from zrpc.services.autograd.accelerator import visit_accelerator
from zrpc.services.autograd.contexts import (
    PASS_LAYOUT,
    Contexts,
    creator_of,
    current_id,
    pass_fields,
    pass_name,
    unknown_context,
)
from zrpc.services.autograd.dependencies import UsedTensors
from zrpc.services.autograd.last_gradients import LastGradients
from zrpc.services.autograd.node_hooks import OwnHook
from zrpc.services.autograd.nodes import Gradients, append_turn, without_gaps
from zrpc.services.autograd.pass_errors import accelerator_stalled, messages_lost, worker_died
from zrpc.services.autograd.state import ContextState, Pass, Receive
from zrpc.wire.exceptions import dump_exception, load_exception
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["Passes"]

# How long a pass waits for an accelerator to compute what other workers wait for. It fails after
# that: if a node of the pass has failed meanwhile, torch's engine runs no more nodes, and does not
# report that before this thread returns.
_ACCELERATOR_SECONDS = 60.0

# The pass whose engine this thread runs, and its context.
_current_pass: contextvars.ContextVar[tuple[int, Pass] | None] = contextvars.ContextVar(
    "zrpc_autograd_pass", default=None
)


class Part(NamedTuple):
    """What one worker does in a pass.

    Attributes:
        sent: which tensors of which messages that it has sent lead to the roots.
        arrived: the messages, by sender and id, whose gradients it sends back.
        retain_graph: whether another pass may go over the same graph.
    """

    sent: Mapping[int, Sequence[int]]
    arrived: Sequence[tuple[MemberId, int]]
    retain_graph: bool


class _PartAsked:
    """Follows BACKWARD, the request for another worker's part, to its answer."""

    def __init__(self, passes: Passes, context_id: int, pass_: Pass) -> None:
        self._passes = passes
        self._context_id = context_id
        self._pass = pass_

    def on_settled(self, call: PendingCall) -> None:
        """Takes the answer, with gradients, or the error; in the I/O thread."""
        self._passes.on_part_answered(self._context_id, self._pass, call.peer, call.claim())


class Passes:
    """The backward passes that one worker begins or takes part in."""

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        self._agent = agent
        self._contexts = contexts
        self._own_id = agent.worker_info.member_id
        # The gradients that are held back just now. Single operations on the set are atomic.
        self._held: set[LastGradients] = set()

    def handlers(self) -> Mapping[Kind, Handler]:
        """Returns the handlers of messages about passes, in the I/O thread."""
        return {
            Kind.DEPENDENCIES: self._on_dependencies,
            Kind.BACKWARD: self._on_backward,
            Kind.GRADIENT: self._on_gradient,
            Kind.ABORT: self._on_abort,
        }

    def _on_dependencies(self, request: Message) -> None:
        self._agent.callee.accept(request)
        self._agent.pool.submit(RequestJob(request, self._answer_dependencies))

    def _on_backward(self, request: Message) -> None:
        self._agent.callee.accept(request)
        self._agent.receiver.run(RequestJob(request, self._take_part))

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a backward pass through all workers; see `zrpc.autograd.backward`."""
        engine.check_roots(roots)
        state = self._contexts.find(context_id)
        if state.peers and (last_calls := self._agent.caller.last_calls) is not None:
            last_calls.check()
        pass_ = state.find_pass(self._contexts.draw_id())
        used = self._find_used(state, pass_, roots)
        parts = {
            member: Part(used.sent_by(member), sorted(used.arrived_at(member)), retain_graph)
            for member in used.members() | {self._own_id}
        }
        try:
            self._run(state, pass_, roots, parts.pop(self._own_id), parts)
        finally:
            pass_.finish()

    def _find_used(
        self, state: ContextState, pass_: Pass, roots: Sequence[torch.Tensor]
    ) -> UsedTensors:
        """Finds the tensors that lead to the roots, at all workers."""
        tracer, used, found = state.tracer, UsedTensors(state.carried), 0
        for root in roots:
            found |= tracer.trace(root)
        used.learn(self._own_id, state.dependencies())
        used.use(self._own_id, found)
        while peers := used.to_ask():
            asked = {peer: self._ask(state, pass_, peer, Kind.DEPENDENCIES, None) for peer in peers}
            for peer, future in asked.items():
                used.learn(peer, future.wait())
        return used

    def _answer_dependencies(self, request: Message) -> None:
        """Answers what the tensors that this worker has sent were computed from; in the pool."""
        try:
            context_id = pass_fields(request)[0]
            state = self._contexts.join(context_id, request.sender)
            if state is None:
                raise unknown_context(context_id)
            dependencies = state.dependencies()
        except Exception as error:
            self._agent.callee.answer_error(request, error)
        else:
            self._agent.callee.answer(request, dependencies)

    def _run(
        self,
        state: ContextState,
        pass_: Pass,
        roots: Sequence[torch.Tensor],
        part: Part,
        others: Mapping[MemberId, Part],
    ) -> None:
        """Runs this worker's part of a pass, and has others run theirs."""
        token = _current_pass.set((state.context_id, pass_))
        try:
            sent = state.take(part.sent, part.arrived, part.retain_graph)
            creator = creator_of(pass_.pass_id)
            receivers = {message.to for message in sent}
            senders = {sender for sender, _ in part.arrived}
            received = {origin: state.receives[origin] for origin in part.arrived}
            linked = (receivers | senders | others.keys() | {creator}) - {self._own_id}
            pass_.begin(linked, received, len(sent), others.keys())
            self._check_linked(state, linked)
            for peer, other in others.items():
                # What a worker has sent last is what it needs gradients of first. If these are
                # computed here, the worker can do nothing before them.
                latest = peer, max(other.sent)
                if latest in received:
                    pass_.openings[latest] = other
                else:
                    self._ask_part(state.context_id, pass_, peer, other)
            last, leaves = state.start, 0
            for message in sent:
                wait = OwnHook(self._await_gradients, message.send_id, message.position)
                last = append_turn(last, wait, list(message.exits.values()))
                leaves |= message.leaves
            # Only if it is needed: to make it takes longer than to record it.
            name = pass_name(state.context_id, pass_.pass_id) if self._agent.recorder else ""
            with self._agent.span(f"backward {name}"):
                engine.run(roots, last, part.retain_graph, state, leaves)
            pass_.wait_for_parts(self._receive_for(pass_))
        except BaseException as error:
            # Also if Ctrl-C ends it, or a hook that exits: the others must not wait for this part.
            reason: Exception = RpcError(f"interrupted by {type(error).__name__}")
            if isinstance(error, Exception) and not raised_by_handler(error):
                reason = error
            self._fail(state.context_id, pass_, reason)
            if reason is not error and creator_of(pass_.pass_id) == self._own_id:
                raise
            pass_.check()
        finally:
            _current_pass.reset(token)

    def _check_linked(self, state: ContextState, linked: Iterable[MemberId]) -> None:
        """Raises if a worker that takes part is lost already, or some of its messages are.

        What is lost from now on fails the pass: see `fail_passes_with`.
        """
        for member in linked:
            if member in self._agent.membership.lost:
                raise worker_died(self._agent, member)
            if member in state.incomplete:
                raise messages_lost(self._agent, member)

    def _ask_part(
        self,
        context_id: int,
        pass_: Pass,
        peer: MemberId,
        part: Part,
        send_id: int = 0,
        gradients: Gradients = (),
    ) -> None:
        """Asks a worker to run its part of a pass, with the first gradients that it needs."""
        token = current_id.set(None)  # outside of contexts
        try:
            self._agent.caller.call_notify(
                self._agent.membership.infos[peer],
                Kind.BACKWARD,
                [part, without_gaps(gradients)],
                0,
                (Tag.PASS, PASS_LAYOUT.pack(context_id, pass_.pass_id, send_id)),
                _PartAsked(self, context_id, pass_),
            )
        finally:
            current_id.reset(token)

    def on_part_answered(
        self, context_id: int, pass_: Pass, peer: MemberId, outcome: Message | Exception
    ) -> None:
        """Takes the answer to BACKWARD, or the error that came instead. In the I/O thread."""
        if isinstance(outcome, Exception):
            self._fail(context_id, pass_, outcome)
        elif outcome.kind == Kind.ERROR:
            self._fail_as(context_id, pass_, bytes(outcome.body))
        else:
            send_id = pass_fields(outcome)[2]
            if send_id:
                pass_.deliver(send_id, outcome)
            pass_.end_part(peer)

    def _ask(self, state: ContextState, pass_: Pass, peer: MemberId, kind: Kind, body: Any) -> Any:
        """Sends a request about a pass; returns a future of the answer."""
        data = PASS_LAYOUT.pack(state.context_id, pass_.pass_id, 0)
        return self._agent.caller.call_async(
            self._agent.membership.infos[peer], kind, body, 0, extension=(Tag.PASS, data)
        )

    def _take_part(self, request: Message) -> None:
        """Runs this worker's part of a pass for the worker that has begun it; in the pool."""
        held = None
        try:
            context_id, pass_id, send_id = pass_fields(request)
            part, gradients = self._agent.codec.unpack(request)
            state = self._contexts.join(context_id, request.sender)
            if state is None:
                raise unknown_context(context_id)
            pass_ = state.find_pass(pass_id)
            pass_.check()
            if send_id:
                pass_.deliver(send_id, gradients)
            held = self._run_for(request.sender, state, pass_, part)
        except Exception as error:
            self._agent.callee.answer_error(request, error)
            return
        send_id, gradients = held or (0, ())
        data = PASS_LAYOUT.pack(context_id, pass_id, send_id)
        self._agent.callee.answer(request, without_gaps(gradients), (Tag.PASS, data))

    def _run_for(
        self, beginner: MemberId, state: ContextState, pass_: Pass, part: Part
    ) -> tuple[int, Gradients] | None:
        """Runs this worker's part of a pass; returns what is left to send to the beginner."""
        post = partial(self._post_gradients, beginner, state.context_id, pass_)
        last = pass_.last = LastGradients(beginner, post)
        try:
            self._run(state, pass_, [], part, {})
            return last.take()
        finally:
            self._held.discard(last)
            pass_.finish()

    def tick(self) -> None:
        """Has gradients sent that were held back for long; in the I/O thread."""
        for last in list(self._held):
            if last.tick():
                self._held.discard(last)
                self._agent.pool.submit(last.send)

    def _on_gradient(self, message: Message) -> None:
        context_id, pass_id, send_id = pass_fields(message)
        state = self._contexts.state_of(context_id)
        if state is not None:
            state.find_pass(pass_id).deliver(send_id, message)

    # The nodes call the next three. Nodes know the context's id and not its state, which refers to
    # them by way of the graph: the collector can't see a cycle through objects of C++.

    def _await_gradients(self, send_id: int, position: int, _: Any) -> None:
        """Waits for the gradients of tensors that were sent; for a turn."""
        pass_ = _pass_of_thread()
        deadline = time.monotonic() + _ACCELERATOR_SECONDS
        # Without an accelerator, all that is needed was received before this was sent.
        while pass_.must_answer_after(position) and visit_accelerator():
            pass_.check()
            if time.monotonic() > deadline:
                raise accelerator_stalled(_ACCELERATOR_SECONDS)
        gradients = pass_.wait(send_id, self._receive_for(pass_))
        if isinstance(gradients, Message):
            gradients = self._agent.codec.unpack(gradients) if gradients.body else ()
        pass_.store(send_id, gradients)

    def _receive_for(self, pass_: Pass) -> Receive:
        """Returns what receives while a pass waits; between two waits, nobody else need receive."""
        return partial(self._agent.receiver.receive, own_calls=pass_.parts_asked)

    def take_gradient(self, send_id: int, index: int) -> torch.Tensor | None:
        """Returns the gradient of a tensor that was sent; for a `Send` node."""
        return _pass_of_thread().gradient_of(send_id, index)

    def send_gradients(
        self, context_id: int, sender: MemberId, send_id: int, gradients: Gradients
    ) -> None:
        """Sends the gradients of tensors that were received; for a `Receive` node."""
        pass_ = _pass_of_thread()
        pass_.check()
        pass_.answered(sender, send_id)
        part = pass_.openings.pop((sender, send_id), None)
        if part is not None:
            self._ask_part(context_id, pass_, sender, part, send_id, gradients)
            return
        last = pass_.last
        if last and last.receiver == sender and pass_.complete and not ddp.in_use():
            last.hold(send_id, gradients)
            self._held.add(last)
            return
        self._post_gradients(sender, context_id, pass_, send_id, gradients)

    def _post_gradients(
        self,
        peer: MemberId,
        context_id: int,
        pass_: Pass,
        send_id: int,
        gradients: Gradients,
    ) -> None:
        message = Message(Kind.GRADIENT)
        if any(gradient is not None for gradient in gradients):
            token = current_id.set(None)  # outside of contexts
            try:
                self._agent.codec.encoder(peer).pack(without_gaps(gradients), message)
            finally:
                current_id.reset(token)
        data = PASS_LAYOUT.pack(context_id, pass_.pass_id, send_id)
        message.extensions = [*message.extensions, (Tag.PASS, data)]
        self._agent.outbox.post(peer, message)

    def _fail(self, context_id: int, pass_: Pass, error: Exception) -> None:
        """Fails the whole pass, because this worker's part has failed."""
        if creator_of(pass_.pass_id) != self._own_id and not isinstance(error, BackwardError):
            error = BackwardError(
                f"Error on Node {self._agent.worker_info.id}: {type(error).__name__}: {error}"
            )
        linked = pass_.linked
        if pass_.fail(lambda: error):
            body = dump_exception(error, repr(self._agent.worker_info), same_main=False)
            self._abort(context_id, pass_, linked, body)

    def _fail_as(self, context_id: int, pass_: Pass, body: bytes) -> None:
        """Fails the whole pass with the error of another worker's part."""
        linked = pass_.linked
        if pass_.fail(lambda: load_exception(body)):
            self._abort(context_id, pass_, linked, body)

    def _abort(self, context_id: int, pass_: Pass, linked: Iterable[MemberId], body: bytes) -> None:
        data = PASS_LAYOUT.pack(context_id, pass_.pass_id, 0)
        for peer in linked:
            aborted = Message(Kind.ABORT, body=body, extensions=[(Tag.PASS, data)])
            self._agent.outbox.post(peer, aborted)

    def fail_passes_with(self, member: MemberId, error: Exception) -> None:
        """Fails the passes that a member takes part in."""
        for state, pass_ in self._all():
            if member in pass_.linked:
                self._fail(state.context_id, pass_, error)

    def on_member_lost(self, member: MemberId) -> None:
        """Fails the passes that a member takes part in."""
        self.fail_passes_with(member, worker_died(self._agent, member))

    def on_messages_lost(self, member: MemberId) -> None:
        """Fails the passes that a member takes part in: lost messages may be gradients.

        They may also be those of a pass that begins here later.
        """
        for state in self._contexts.states():
            if member in state.peers:
                state.incomplete.add(member)
        self.fail_passes_with(member, messages_lost(self._agent, member))

    @staticmethod
    def context_of_thread() -> int | None:
        """Returns the context of the pass whose engine this thread runs: it is in a hook."""
        current = _current_pass.get()
        return None if current is None else current[0]

    def linked_members(self) -> set[MemberId]:
        """Returns the members that take part in passes that run here."""
        return {member for _, pass_ in self._all() for member in pass_.linked}

    def _all(self) -> list[tuple[ContextState, Pass]]:
        """Returns all passes; one that is done here has no linked members."""
        states = self._contexts.states()
        return [(state, each) for state in states for each in list(state.passes.values())]

    def _on_abort(self, message: Message) -> None:
        context_id, pass_id, _ = pass_fields(message)
        state = self._contexts.state_of(context_id)
        if state is not None:
            # It goes on to the workers of this part: some may not know the one that has failed.
            self._fail_as(context_id, state.find_pass(pass_id), bytes(message.body))


def _pass_of_thread() -> Pass:
    current = _current_pass.get()
    if current is None:
        raise RpcError(
            "expected zrpc.autograd.backward(context_id, roots), found torch's own backward: "
            "tensors that came from another worker within a context have gradients there"
        )
    return current[1]
