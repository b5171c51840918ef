"""The autograd contexts that live at one worker, and how all workers learn of their end."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from zrpc.agent import Agent
from zrpc.autograd import replicas
from zrpc.autograd.extensions import PASS, PASS_LAYOUT, pass_fields
from zrpc.autograd.ids import creator, first_id
from zrpc.autograd.state import ContextState
from zrpc.errors import RpcError
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind

__all__ = ["Contexts", "current_id"]

# Contexts that have ended, remembered so that a message that comes late does not begin them
# anew. One that comes later than this many ends is taken for one of a new context.
_ENDED_REMEMBERED = 4096

# The id of the context that a thread, or a handler, is in.
current_id: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "zrpc_autograd_context", default=None
)


class Contexts:
    """The contexts that live at one worker.

    Args:
        agent: the worker's; handlers are registered there.

    Attributes:
        ids: of contexts and of passes, that nobody else draws.
        states: the contexts, by id.
        lock: guards them, and what is known of those that have ended.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._rank = agent.worker_info.number
        self.ids = itertools.count(first_id(self._rank))
        self.lock = threading.Lock()
        self.states: dict[int, ContextState] = {}
        self._ended: deque[int] = deque(maxlen=_ENDED_REMEMBERED)
        agent.dispatcher.register(Kind.RELEASE, self._on_release)
        agent.dispatcher.register(Kind.ENLIST, self._on_enlist)

    def __len__(self) -> int:
        with self.lock:
            return len(self.states)

    @contextlib.contextmanager
    def context(self) -> Iterator[int]:
        """A new context, current in this thread; it ends everywhere with the block."""
        if current_id.get() is not None:
            raise RpcError(
                "Already have an autograd context id for this thread: contexts can't be nested"
            )
        context_id = next(self.ids)
        with self.lock:
            self.states[context_id] = ContextState(context_id)
        token = current_id.set(context_id)
        replicas.watch()
        try:
            yield context_id
        finally:
            current_id.reset(token)
            self.release(context_id, but=self._rank)

    def current(self) -> int:
        """The id of the context that this thread is in.

        Raises:
            RpcError: it is in none.
        """
        context_id = current_id.get()
        if context_id is None:
            raise RpcError(
                "Current thread doesn't have a valid autograd context. Please wrap your code "
                "using: `with zrpc.autograd.context() as context_id` to generate a valid context"
            )
        return context_id

    def find(self, context_id: int) -> ContextState:
        """A context that lives at this worker.

        Raises:
            RpcError: there is none of this id.
        """
        with self.lock:
            state = self.states.get(context_id)
        if state is None:
            raise RpcError(f"Could not find autograd context with id: {context_id}")
        return state

    def gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients that a context holds here, by leaf.

        Raises:
            RpcError: there is no such context here.
        """
        state = self.find(context_id)
        with state.lock:
            return dict(state.gradients)

    def gradients_if_any(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """As `gradients`; none where this worker took no part in the context."""
        with self.lock:
            took_part = context_id in self.states
        return self.gradients(context_id) if took_part else {}

    def scale_gradients(
        self, context_id: int, leaves: Sequence[torch.Tensor], factor: torch.Tensor
    ) -> None:
        """Multiplies the gradients of some leaves in a context."""
        with self.lock:
            state = self.states.get(context_id)
        if state is None:
            return
        with state.lock:
            for leaf in leaves:
                if leaf in state.gradients:
                    state.gradients[leaf] = state.gradients[leaf] * factor

    def join(self, context_id: int, peer: int) -> ContextState | None:
        """A context that a message from or to ``peer`` is within; None where it has ended."""
        with self.lock:
            state = self.states.get(context_id)
            if state is None:
                if context_id in self._ended:
                    return None
                state = self.states[context_id] = ContextState(context_id)
        state.peers.add(peer)
        return state

    def release(self, context_id: int, but: int) -> None:
        """Ends a context here and at all workers that took part, but for the one that knows."""
        with self.lock:
            state = self.states.pop(context_id, None)
            self._ended.append(context_id)
        if state is None:
            return
        state.clear()
        for peer in state.peers - {self._rank, but}:
            self._post(peer, Kind.RELEASE, PASS_LAYOUT.pack(context_id, 0, 0, False))

    def _on_release(self, message: Message) -> None:
        context_id = pass_fields(message)[0]
        self.release(context_id, but=message.sender)

    def enlist(self, state: ContextState, lost: int) -> None:
        """A worker is gone by which the word of a context's end might have come here.

        So the one who made the context is told that it is in use here too.
        """
        maker = creator(state.context_id)
        if maker in self._agent.membership.lost:
            self.release(state.context_id, but=lost)  # nobody else would
        elif lost in state.peers and maker != self._rank:
            self._post(maker, Kind.ENLIST, PASS_LAYOUT.pack(state.context_id, 0, 0, False))

    def _on_enlist(self, message: Message) -> None:
        context_id = pass_fields(message)[0]
        with self.lock:
            state = self.states.get(context_id)
            if state is not None:
                state.peers.add(message.sender)  # before its end, or not at all
        if state is None:
            data = PASS_LAYOUT.pack(context_id, 0, 0, False)
            self._post(message.sender, Kind.RELEASE, data)

    def living(self) -> list[ContextState]:
        """All that live at this worker."""
        with self.lock:
            return list(self.states.values())

    def close(self) -> None:
        """Drops all contexts, and ends the waits of passes under way."""
        with self.lock:
            states = list(self.states.values())
            self.states.clear()
        for state in states:
            state.clear()

    def _post(self, peer: int, kind: Kind, data: bytes) -> None:
        self._agent.outbox.post(peer, Message(kind, extensions=[(PASS, data)]))
