"""Distributed autograd of one agent.

Every message within a context carries the context's id in an extension, and which of its tensors
belong to the graph. If there are such tensors, the sender appends a `Send` node to its chain and
the receiver a `Receive` node: see ``zrpc.services.autograd.message_hooks``. Contexts are in
``zrpc.services.autograd.contexts``.

The worker that begins a backward pass first finds out which tensors lead to the roots. Messages say
what their tensors were computed from. If that is not known here, because a message went to another
worker, its sender is asked (DEPENDENCIES). Then it asks each worker that has sent tensors which
lead to the roots to take part, and says which (BACKWARD). Each runs its engine once, over what
leads to the roots and nothing else, and answers when that is done.

A `Receive` node sends the gradients of its tensors back (GRADIENT), and a wait takes them; see
`zrpc.services.autograd.nodes`. The first gradients to a worker travel with BACKWARD if it needs
them before all others, and its last ones with its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent, find_agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.execution import RequestJob
from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import RpcError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.services.autograd import engine
from zrpc.services.autograd.contexts import Contexts, checked_id, pass_fields
from zrpc.services.autograd.message_hooks import Crossing
from zrpc.services.autograd.nodes import running, torch_pass_error
from zrpc.services.autograd.part import (
    Initiator,
    Part,
    Participant,
    messages_lost,
    worker_died,
)
from zrpc.services.autograd.state import ContextState
from zrpc.services.autograd.torch_passes import is_incomplete
from zrpc.services.rref.extended import BackwardOfValue
from zrpc.torch_internals import wrap_engine
from zrpc.wire.exceptions import load_exception
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message


class AutogradService(Service, BackwardOfValue):
    """Plugs distributed autograd into an agent that has RRefs.

    Attributes:
        contexts: the contexts that this worker takes part in.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.contexts = Contexts(agent)
        self._crossing = Crossing(self.contexts)
        # Backward passes by their ids. Single operations on the dict are atomic.
        self._running: dict[int, Initiator | Participant] = {}

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.RELEASE: self.contexts.on_release,
            Kind.ENLIST: self.contexts.on_enlist,
            Kind.DEPENDENCIES: self._on_dependencies,
            Kind.BACKWARD: self._on_backward,
            Kind.GRADIENT: self._on_gradient,
            Kind.ABORT: self._on_abort,
        }

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {
            Tag.GRAPH: self._crossing.read_graph,
            Tag.PASS: self.contexts.read_pass,
        }

    @override
    def message_hooks(self) -> MessageHooks:
        return self._crossing

    def __len__(self) -> int:
        """Returns how many contexts this worker takes part in."""
        return len(self.contexts.states())

    @override
    def stats(self) -> Mapping[str, int]:
        return {"autograd_contexts": len(self)}

    # -- backward passes -----------------------------------------------------------------

    def loses_gradients(self, roots: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Returns whether a pass of torch's own would leave out gradients of some inputs."""
        own = self.agent.membership.own_id
        states = [each for each in self.contexts.states() if each.sends and each.receives]
        return any(is_incomplete(state, own, roots, inputs) for state in states)

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a backward pass through all workers; see `zrpc.autograd.backward`."""
        engine.check_roots(roots)
        state = self.contexts.find(context_id)
        if state.peers and (last_calls := self.agent.caller.last_calls) is not None:
            last_calls.check()
        initiator = Initiator(self.agent, state, self.contexts.draw_id())
        self._running[initiator.pass_id] = initiator
        try:
            initiator.begin(roots, retain_graph)
        finally:
            self._end(initiator)

    def _end(self, part: Initiator | Participant) -> None:
        part.mailbox.close()
        self._running.pop(part.pass_id, None)

    def _on_dependencies(self, request: Message) -> None:
        self.agent.callee.requests.accept(request)
        fail = self.agent.callee.fail
        self.agent.pool.submit(RequestJob(request, fail, self._answer_dependencies))

    def _answer_dependencies(self, request: Message) -> None:
        """Answers what the tensors that this worker has sent were computed from; in the pool."""
        try:
            sources = self._join(request).sources()
        except Exception as error:
            self.agent.callee.answer_error(request, error)
        else:
            self.agent.callee.answer(request, tuple(sources))

    def _join(self, request: Message) -> ContextState:
        """Returns the context of a request; raises if it has ended."""
        context_id = pass_fields(request)[0]
        state = self.contexts.join(context_id, request.sender)
        if state is None:
            raise self.contexts.unknown(context_id)
        return state

    def _on_backward(self, request: Message) -> None:
        self.agent.callee.requests.accept(request)
        self.agent.receiver.run(RequestJob(request, self.agent.callee.fail, self._take_part))

    def _take_part(self, request: Message) -> None:
        """Runs this worker's part of a pass for the worker that has begun it; in the pool."""
        try:
            _, pass_id, send_id = pass_fields(request)
            part, gradients = self.agent.codec.unpack(request)
            participant = Participant(self.agent, self._join(request), pass_id, request.sender)
            self._running[pass_id] = participant
            try:
                participant.answer(request, Part(*part), send_id, gradients)
            finally:
                self._end(participant)
        except Exception as error:
            self.agent.callee.answer_error(request, error)

    def _on_gradient(self, message: Message) -> None:
        context_id, pass_id, send_id = pass_fields(message)
        state = self.contexts.state_of(context_id)
        if state is not None:
            state.mailbox(pass_id).deliver((message.sender, send_id), message)

    def _on_abort(self, message: Message) -> None:
        context_id, pass_id, _ = pass_fields(message)
        body = bytes(message.body)
        part = self._running.get(pass_id)
        if part is not None:
            # It goes on to the workers of this part: some may not know the one that has failed.
            part.fail_as(body)
        elif (state := self.contexts.state_of(context_id)) is not None:
            state.mailbox(pass_id).fail(lambda: load_exception(body))

    @override
    def tick(self) -> None:
        for part in list(self._running.values()):
            if isinstance(part, Participant):
                part.tick()

    @override
    def awaited_members(self) -> Collection[MemberId]:
        return {member for part in list(self._running.values()) for member in part.linked}

    @override
    def backward_of_value(
        self, owner: WorkerInfo, rref: Any, context_id: int, retain_graph: bool
    ) -> None:
        context_id = checked_id(context_id)
        if owner.member_id == self.agent.worker_info.member_id:
            _backward_at_owner(rref, context_id, retain_graph)
            return
        if context_id < 0:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        body: Any = (_backward_at_owner, (rref, context_id, retain_graph), {})
        self.agent.caller.call(owner, Kind.CALL, body, -1)

    # -- events of the agent -------------------------------------------------------------

    @override
    def on_member_lost(self, member: MemberId) -> None:
        self.contexts.on_member_lost(member)
        self._fail_with(member, worker_died(self.agent, member))

    @override
    def on_messages_lost(self, member: MemberId) -> None:
        # They may be gradients, also those of a pass that begins here later.
        for state in self.contexts.states():
            if member in state.peers:
                state.incomplete.add(member)
        self._fail_with(member, messages_lost(self.agent, member))
        self.contexts.on_messages_lost(member)

    def _fail_with(self, member: MemberId, error: Exception) -> None:
        """Fails the passes that a member takes part in."""
        for part in list(self._running.values()):
            if member in part.linked:
                part.fail(error)

    @override
    def close(self) -> None:
        self.contexts.close()


def _backward_at_owner(rref: Any, context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    if context_id < 0:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        current_agent().service(AutogradService).backward(context_id, [value], retain_graph)


def context_of_hook() -> int | None:
    """Returns the context of the pass whose hook this thread runs, if it runs one."""
    run = running.get()
    return None if run is None else run.context_id


def _checking_inputs(run: Callable[..., Any]) -> Callable[..., Any]:
    """Lets passes of torch's own for some inputs fail if they would leave out gradients."""

    def wrapper(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else ()  # another torch may pass them in another way
        agent = find_agent() if inputs else None
        for service in agent.services if agent is not None else ():
            if isinstance(service, AutogradService) and service.loses_gradients(roots, inputs):
                raise torch_pass_error("torch.autograd.grad or backward(inputs=...)")
        return run(roots, *args, **kwargs)

    return wrapper


wrap_engine(_checking_inputs)
