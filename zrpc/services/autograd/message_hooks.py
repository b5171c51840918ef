"""How tensors cross from one worker to another within a context, and stay part of the graph."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import ProtocolError
from zrpc.services.autograd import ddp
from zrpc.services.autograd.backward import Passes
from zrpc.services.autograd.contexts import Contexts, current_id
from zrpc.services.autograd.dependencies import OF_ENDED_CONTEXT, pack_sources
from zrpc.services.autograd.nodes import Receive, Send, recorded
from zrpc.services.autograd.state import ContextState, SentMessage
from zrpc.wire.cut import cut_off
from zrpc.wire.kind import Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder
from zrpc.wire.unpickling import Decoder

__all__ = ["Crossing"]

# Context, id of the send (0: no tensors), number of tensors. Their indices follow, and what they
# were computed from.
_GRAPH_LAYOUT = struct.Struct("<qQI")
# In place of the id of a send: the sender's context has ended. Only the indices follow.
_ENDED = (1 << 64) - 1


class Graph(NamedTuple):
    """The context of a message, and which of its tensors are part of the graph.

    Attributes:
        context_id: the context.
        state: its state here; None if it has ended, here or for the sender.
        indices: those tensors, by their places among all tensors of the message.
        sources: what they were computed from, see `pack_sources`.
    """

    context_id: int
    state: ContextState | None
    sender: MemberId
    send_id: int
    indices: Sequence[int]
    sources: bytes


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor to give to a Function instead of one that other threads may use.

    A Function looks up the node of its input under a lock of that tensor, and keeps the
    interpreter's lock meanwhile. An operator of torch in another thread may hold the first lock,
    without the second, and need the second to make the node. So if both have the same leaf or
    view, the process stops. An operator that gives up the interpreter's lock avoids that.
    """
    if not (tensor.is_leaf or tensor._is_view()):
        return tensor
    if tensor.layout is torch.strided:
        # Not `view_as`, whose backward refuses a sparse gradient.
        own: torch.Tensor = torch.ops.aten.alias.default(tensor)
        return own
    return tensor.clone()  # other layouts have no views


def _graph_of(message: Message) -> Graph | None:
    """Returns the context of a message, which may have ended; None if it is in none."""
    return message.attachments.get(Tag.GRAPH) if message.attachments else None


class Crossing(MessageHooks):
    """Adds nodes to the graph for each message with tensors, outgoing or incoming.

    The nodes call the passes when a backward pass reaches them.
    """

    tag = Tag.GRAPH
    context = current_id

    def __init__(self, contexts: Contexts, passes: Passes) -> None:
        self._join = contexts.join
        self._note_end = contexts.note_end
        self._take_gradient = passes.take_gradient
        self._send_gradients = passes.send_gradients
        self._send_ids = itertools.count(1)

    @contextlib.contextmanager
    def request_scope(self, request: Message) -> Iterator[None]:
        """Runs a handler in the context of its caller, also if it has ended."""
        graph = _graph_of(request)
        if graph is None:
            yield
            return
        token = current_id.set(graph.context_id)
        ddp.watch()
        try:
            yield
        finally:
            current_id.reset(token)

    def _context_of(self, request: Message | None) -> int | None:
        """Returns the context of an outgoing message: this thread's, or that of its request."""
        if request is None:
            return current_id.get()
        graph = _graph_of(request)
        return None if graph is None else graph.context_id

    def finish(self, encoder: Encoder) -> None:
        """Notes the tensors of an outgoing message that require grad."""
        context_id = self._context_of(encoder.request)
        if context_id is None:
            return
        state = self._join(context_id, encoder.destination)
        tensors = encoder.tensors.requiring_grad if torch.is_grad_enabled() else {}
        extension = encoder.extension(Tag.GRAPH)
        send_id, sources = 0, b""
        if state is None:
            send_id = _ENDED
        elif tensors:
            sent = self._note_sent(state, encoder.destination, tensors.values())
            send_id = sent.send_id
            sets = [reach.arrived for reach in sent.reach.values()]
            sources = pack_sources(sets, state.tracer.arrived)
        extension.extend(_GRAPH_LAYOUT.pack(context_id, send_id, len(tensors)))
        if tensors:
            extension.extend(struct.pack(f"<{len(tensors)}I", *tensors) + sources)

    def _note_sent(
        self, state: ContextState, to: MemberId, tensors: Iterable[torch.Tensor]
    ) -> SentMessage:
        """Adds the nodes of an outgoing message."""
        with state.lock:  # both in the same order
            send_id, position = next(self._send_ids), next(state.positions)
        exits, reach = {}, {}
        for index, tensor in enumerate(tensors):
            own = _alone(tensor)
            exits[index] = Send.apply(own, self._take_gradient, send_id, index)
            reach[index] = state.tracer.reach(exits[index])
        message = SentMessage(send_id, to, position, exits, reach)
        with state.lock:
            state.sends[send_id] = message
        return message

    def read_graph(self, message: Message, data: bytes) -> Graph:
        """Reads which context a message is in, and which of its tensors; in the I/O thread."""
        if len(data) < _GRAPH_LAYOUT.size:
            raise ProtocolError(f"expected a context id, found {len(data)} bytes")
        context_id, send_id, count = _GRAPH_LAYOUT.unpack_from(data)
        if send_id == _ENDED:
            self._note_end(context_id)
            state = None
        else:
            state = self._join(context_id, message.sender)
        if not count:
            return Graph(context_id, state, message.sender, send_id, (), b"")
        indices = struct.unpack_from(f"<{count}I", data, _GRAPH_LAYOUT.size)
        sources = data[_GRAPH_LAYOUT.size + 4 * count :]
        return Graph(context_id, state, message.sender, send_id, indices, sources)

    def open(self, decoder: Decoder) -> None:
        """Makes the graph's tensors in an incoming message part of this worker's graph."""
        graph = _graph_of(decoder.message)
        if graph is None or not graph.indices:
            return
        state, key = graph.state, (graph.sender, graph.send_id)
        tensors = [decoder.tensors[i].detach() for i in graph.indices]
        if state is None:
            for i, tensor in zip(graph.indices, cut_off(tensors, OF_ENDED_CONTEXT), strict=True):
                decoder.tensors[i] = tensor
            return
        with state.lock:
            if key in state.receives:
                return  # the message is unpacked again, to raise its error again
            state.receives[key] = next(state.positions)
            state.sources[key] = graph.sources
        origin = graph.context_id, *key
        received = recorded(Receive.apply, state.start, self._send_gradients, *origin, tensors)
        for i, tensor in zip(graph.indices, received, strict=True):
            decoder.tensors[i] = tensor
