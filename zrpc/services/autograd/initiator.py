"""The part of the worker that begins a backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.calls.pending_call import PendingCall
from zrpc.services.autograd.contexts import current_id, pass_fields
from zrpc.services.autograd.dependencies import Origin, UsedTensors
from zrpc.services.autograd.nodes import Gradients, without_gaps
from zrpc.services.autograd.part import Part, RunningPart
from zrpc.services.autograd.state import ContextState
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId

__all__ = ["Initiator"]


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
        used, found = UsedTensors(self.state.carried), 0
        for root in roots:
            found |= self.state.tracer.reach(root).arrived
        used.learn(self._own_id, self.state.dependencies())
        used.use(self._own_id, found)
        infos, call = self._agent.membership.infos, self._agent.caller.call_async
        while peers := used.to_ask():
            asked = {
                peer: call(infos[peer], Kind.DEPENDENCIES, None, 0, extension=self._extension())
                for peer in peers
            }
            for peer, future in asked.items():
                used.learn(peer, future.wait())
        return used

    @override
    def _begin(self) -> None:
        for peer, part in self._others.items():
            # What a worker has sent last is what it needs gradients of first. If these are
            # computed here, the worker can do nothing before them.
            latest = peer, max(part.sent)
            if latest in self._uncomputed:
                self._openings[latest] = peer, part
            else:
                self._ask(peer, part)

    def _ask(self, peer: MemberId, part: Part, send_id: int = 0, gradients: Gradients = ()) -> None:
        """Asks a worker to run its part, with the first gradients that it needs."""
        self._asked.add(peer)
        token = current_id.set(None)  # outside of contexts
        try:
            self._agent.caller.call_notify(
                self._agent.membership.infos[peer],
                Kind.BACKWARD,
                (tuple(part), without_gaps(gradients)),
                0,
                self._extension(send_id),
                self,
            )
        finally:
            current_id.reset(token)

    @override
    def _send(self, origin: Origin, gradients: Gradients) -> None:
        opening = self._openings.pop(origin, None)
        if opening is None:
            self._post(origin, gradients)
        else:
            self._ask(*opening, origin[1], gradients)

    @override
    def _wait_for_others(self) -> None:
        for peer in self._others:
            self.mailbox.wait((peer, 0), self._receive)

    def on_settled(self, call: PendingCall) -> None:
        """Takes the answer to BACKWARD, with gradients, or the error; in the I/O thread."""
        peer, outcome = call.peer, call.claim()
        if isinstance(outcome, Exception):
            self.fail(outcome)
        elif outcome.kind == Kind.ERROR:
            self.fail_as(bytes(outcome.body))
        else:
            send_id = pass_fields(outcome)[2]
            if send_id:
                self.mailbox.deliver((peer, send_id), outcome)
            self._asked.discard(peer)
            self.mailbox.deliver((peer, 0), None)
