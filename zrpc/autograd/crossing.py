"""How tensors cross from one worker to another within a context, and stay part of the graph."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial

import torch

from zrpc.agent import Agent
from zrpc.autograd import engine, replicas
from zrpc.autograd.contexts import Contexts, current_id
from zrpc.autograd.extensions import GRAPH, GRAPH_LAYOUT, INDEX_LAYOUT, Graph, graph_of
from zrpc.autograd.nodes import receive, send
from zrpc.autograd.passes import Passes
from zrpc.errors import ProtocolError
from zrpc.wire.header import Message
from zrpc.wire.pickling import Decoder, Encoder

__all__ = ["Crossing"]


class Crossing:
    """Appends a node to a context's chain for each message with tensors that comes or goes.

    Args:
        agent: the worker's, which is told what to do with messages.
        contexts: those that live at this worker.
        passes: what the nodes call when a pass comes to them.
    """

    def __init__(self, agent: Agent, contexts: Contexts, passes: Passes) -> None:
        self._join = contexts.join
        self._await_gradients = passes.await_gradients
        self._send_gradients = passes.send_gradients
        self._sends = itertools.count(1)
        agent.dispatcher.register_extension(GRAPH, self._read_graph)
        agent.codec.finishers.append(self._append_send)
        agent.codec.openers[GRAPH] = self._append_receive
        agent.callee.scopes[GRAPH] = self._scope
        agent.codec.in_context = self._in_context

    @contextlib.contextmanager
    def _scope(self, request: Message) -> Iterator[None]:
        """A handler works in the context of its caller."""
        graph = graph_of(request)
        if graph is None:
            yield
            return
        token = current_id.set(graph.state.context_id)
        replicas.watch()
        try:
            yield
        finally:
            current_id.reset(token)

    def _in_context(self, request: Message | None) -> bool:
        """Whether a message that is packed now is within a context."""
        if request is None:
            return current_id.get() is not None
        return graph_of(request) is not None

    def _context_of(self, request: Message | None) -> int | None:
        """The context of a message that is packed: of the present one, or of its request."""
        if request is None:
            return current_id.get()
        graph = graph_of(request)
        return None if graph is None else graph.state.context_id

    def _append_send(self, encoder: Encoder) -> None:
        """All tensors of an outgoing message are known: those that require grad leave."""
        context_id = self._context_of(encoder.request)
        if context_id is None:
            return
        state = self._join(context_id, encoder.destination)
        if state is None:
            return
        tensors = encoder.tensors.requiring_grad
        send_id = 0
        if tensors and torch.is_grad_enabled():
            send_id = next(self._sends)
            wait = partial(self._await_gradients, send_id, len(tensors))
            for tensor in tensors.values():
                engine.guard_hooks(tensor)
            with state.lock:
                state.token = send(state.token, wait, *tensors.values())
                state.sends[send_id] = encoder.destination
        extension = encoder.extension(GRAPH)
        extension.extend(GRAPH_LAYOUT.pack(context_id, send_id))
        if send_id:
            extension.extend(b"".join(map(INDEX_LAYOUT.pack, tensors)))

    def _read_graph(self, message: Message, data: bytes) -> Graph | None:
        """In the I/O thread: which context a message is within, and which tensors are."""
        if len(data) < GRAPH_LAYOUT.size:
            raise ProtocolError(f"expected a context id, found {len(data)} bytes")
        context_id, send_id = GRAPH_LAYOUT.unpack_from(data)
        state = self._join(context_id, message.sender)
        if state is None:
            return None
        indices = [i for (i,) in INDEX_LAYOUT.iter_unpack(data[GRAPH_LAYOUT.size :])]
        return Graph(state, message.sender, send_id, indices)

    def _append_receive(self, decoder: Decoder) -> None:
        """The tensors of an incoming message are made: those of the graph arrive."""
        graph = graph_of(decoder.message)
        if graph is None or not graph.send_id:
            return
        state, key = graph.state, (graph.sender, graph.send_id)
        with state.lock:
            if key in state.receives or key in state.taken:
                return  # unpacked once more, to raise its error again
            state.receives.add(key)
            tensors = [decoder.tensors[i].detach() for i in graph.indices]
            back = partial(self._send_gradients, state.context_id, graph.sender, graph.send_id)
            with torch.enable_grad():
                state.token, *received = receive(state.token, back, tensors)
        for i, tensor in zip(graph.indices, received, strict=True):
            decoder.tensors[i] = tensor
