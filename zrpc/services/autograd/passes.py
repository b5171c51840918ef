"""The backward passes of one worker: those that it begins, and those that it takes part in.

The worker that begins a pass first finds out which tensors lead to the roots. Messages say what
their tensors were computed from. If that is not known here, because a message went to another
worker, its sender is asked (DEPENDENCIES). Then it asks each worker that has sent tensors which
lead to the roots to take part, and says which (BACKWARD). Each runs its engine once, over what
leads to the roots and nothing else, and answers when that is done.

A `Receive` node sends the gradients of its tensors back (GRADIENT), and a wait takes them; see
`zrpc.services.autograd.nodes`. The first gradients to a worker travel with BACKWARD if it needs
them before all others, and its last ones with its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler
from zrpc.calls.execution import RequestJob
from zrpc.services.autograd import engine
from zrpc.services.autograd.contexts import Contexts, pass_fields, unknown_context
from zrpc.services.autograd.initiator import Initiator
from zrpc.services.autograd.nodes import running
from zrpc.services.autograd.part import Part
from zrpc.services.autograd.participant import Participant
from zrpc.services.autograd.pass_errors import messages_lost, worker_died
from zrpc.services.autograd.state import ContextState
from zrpc.wire.exceptions import load_exception
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["Passes", "context_of_hook"]


class Passes:
    """The backward passes that run on one worker."""

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        self._agent = agent
        self._contexts = contexts
        # By the pass's id. Single operations on the dict are atomic.
        self._running: dict[int, Initiator | Participant] = {}

    def handlers(self) -> Mapping[Kind, Handler]:
        """Returns the handlers of messages about passes, in the I/O thread."""
        return {
            Kind.DEPENDENCIES: self._on_dependencies,
            Kind.BACKWARD: self._on_backward,
            Kind.GRADIENT: self._on_gradient,
            Kind.ABORT: self._on_abort,
        }

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a backward pass through all workers; see `zrpc.autograd.backward`."""
        engine.check_roots(roots)
        state = self._contexts.find(context_id)
        if state.peers and (last_calls := self._agent.caller.last_calls) is not None:
            last_calls.check()
        initiator = Initiator(self._agent, state, self._contexts.draw_id())
        self._running[initiator.pass_id] = initiator
        try:
            initiator.begin(roots, retain_graph)
        finally:
            self._end(initiator)

    def _end(self, part: Initiator | Participant) -> None:
        part.mailbox.close()
        self._running.pop(part.pass_id, None)

    def _on_dependencies(self, request: Message) -> None:
        self._agent.callee.accept(request)
        self._agent.pool.submit(RequestJob(request, self._answer_dependencies))

    def _answer_dependencies(self, request: Message) -> None:
        """Answers what the tensors that this worker has sent were computed from; in the pool."""
        try:
            dependencies = self._join(request).dependencies()
        except Exception as error:
            self._agent.callee.answer_error(request, error)
        else:
            self._agent.callee.answer(request, dependencies)

    def _join(self, request: Message) -> ContextState:
        """Returns the context of a request; raises if it has ended."""
        context_id = pass_fields(request)[0]
        state = self._contexts.join(context_id, request.sender)
        if state is None:
            raise unknown_context(context_id)
        return state

    def _on_backward(self, request: Message) -> None:
        self._agent.callee.accept(request)
        self._agent.receiver.run(RequestJob(request, self._take_part))

    def _take_part(self, request: Message) -> None:
        """Runs this worker's part of a pass for the worker that has begun it; in the pool."""
        try:
            _, pass_id, send_id = pass_fields(request)
            part, gradients = self._agent.codec.unpack(request)
            participant = Participant(self._agent, self._join(request), pass_id, request.sender)
            self._running[pass_id] = participant
            try:
                participant.answer(request, Part(*part), send_id, gradients)
            finally:
                self._end(participant)
        except Exception as error:
            self._agent.callee.answer_error(request, error)

    def _on_gradient(self, message: Message) -> None:
        context_id, pass_id, send_id = pass_fields(message)
        state = self._contexts.state_of(context_id)
        if state is not None:
            state.mailbox(pass_id).deliver((message.sender, send_id), message)

    def _on_abort(self, message: Message) -> None:
        context_id, pass_id, _ = pass_fields(message)
        body = bytes(message.body)
        part = self._running.get(pass_id)
        if part is not None:
            # It goes on to the workers of this part: some may not know the one that has failed.
            part.fail_as(body)
        elif (state := self._contexts.state_of(context_id)) is not None:
            state.mailbox(pass_id).fail(lambda: load_exception(body))

    def tick(self) -> None:
        """Sends held-back gradients if the part that they belong to takes long."""
        for part in list(self._running.values()):
            if isinstance(part, Participant):
                part.tick()

    def linked_members(self) -> set[MemberId]:
        """Returns the members that take part in passes that run here."""
        return {member for part in list(self._running.values()) for member in part.linked}

    def on_member_lost(self, member: MemberId) -> None:
        """Fails the passes that a member takes part in."""
        self._fail_with(member, worker_died(self._agent, member))

    def on_messages_lost(self, member: MemberId) -> None:
        """Fails the passes that a member takes part in: lost messages may be gradients.

        They may also be those of a pass that begins here later.
        """
        for state in self._contexts.states():
            if member in state.peers:
                state.incomplete.add(member)
        self._fail_with(member, messages_lost(self._agent, member))

    def _fail_with(self, member: MemberId, error: Exception) -> None:
        for part in list(self._running.values()):
            if member in part.linked:
                part.fail(error)


def context_of_hook() -> int | None:
    """Returns the context of the pass whose hook this thread runs, if it runs one."""
    run = running.get()
    return None if run is None else run.context_id
