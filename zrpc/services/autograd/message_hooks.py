"""How tensors cross from one worker to another within a context, and stay part of the graph."""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import RpcError, WorkerDied
from zrpc.services.autograd import ddp
from zrpc.services.autograd.contexts import Contexts, current_id, in_context
from zrpc.services.autograd.dependencies import OF_ENDED_CONTEXT, Origin, Sources
from zrpc.services.autograd.nodes import Receive, new_exit, recorded
from zrpc.services.autograd.state import ContextState, ReceivedMessage, SentTensor
from zrpc.torch_internals import is_view
from zrpc.wire.cut import cut_off
from zrpc.wire.kind import Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder
from zrpc.wire.unpickling import Decoder

# Context, and id of the send; 0 if there are no tensors.
_GRAPH_LAYOUT = struct.Struct("<qQ")
# In place of the id of a send: the sender's context has ended. The reason is in place of the
# sources of the tensors, if it is that the context's creator is lost to the sender.
_ENDED = (1 << 64) - 1
# A tensor with more sources than this has none in its message: a chain of calls would otherwise
# send as many bytes as the square of its length. The worker that begins a pass asks then.
_MOST_SOURCES = 64


class Graph(NamedTuple):
    """The context of a message, and which of its tensors are part of the graph.

    Attributes:
        context_id: the context.
        state: its state here; None if it has ended, here or for the sender.
        origin: the message.
        tensors: pickled, the places of those tensors among all tensors of the message, and what
            they were computed from; empty if there are none.
    """

    context_id: int
    state: ContextState | None
    origin: Origin
    tensors: bytes


def _alias_for_function(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor to give to a Function in place of one that other threads may use.

    A Function looks up the node of its input under a lock of that tensor, and keeps the
    interpreter's lock meanwhile. An operator of torch in another thread may hold the first lock,
    without the second, and need the second to make the node. So if both have the same leaf or
    view, the process stops. An operator that gives up the interpreter's lock avoids that.
    """
    if not (tensor.is_leaf or is_view(tensor)):
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
    """Adds nodes to the graph for each message with tensors, outgoing or incoming."""

    tag = Tag.GRAPH
    context = current_id

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        # The numbers of messages sent and received; see `ReceivedMessage`.
        self._numbers = itertools.count(1)

    @override
    def request_scope(self, request: Message) -> AbstractContextManager[None]:
        ddp.watch()
        return in_context(self._context_of(request))  # also if it has ended

    def _context_of(self, request: Message | None) -> int | None:
        """Returns the context of this thread, or of a request that is given."""
        if request is None:
            return current_id.get()
        graph = _graph_of(request)
        return None if graph is None else graph.context_id

    @override
    def finish(self, encoder: Encoder) -> None:
        context_id = self._context_of(encoder.request)
        if context_id is None:
            return
        state = self._contexts.join(context_id, encoder.destination)
        tensors = encoder.tensors.requiring_grad if torch.is_grad_enabled() else {}
        extension = encoder.extension(Tag.GRAPH)
        send_id = 0
        sources: tuple[Any, ...] | str | None = None  # of an ended context, why it is over
        if state is None:
            send_id, sources = _ENDED, self._contexts.why_over(context_id)
        elif tensors:
            send_id = next(self._numbers)
            sources = _note_sent(state, encoder.destination, send_id, tensors.values())
        extension.extend(_GRAPH_LAYOUT.pack(context_id, send_id))
        if tensors:
            extension.extend(pickle.dumps((list(tensors), sources)))

    def read_graph(self, message: Message, data: bytes) -> Graph:
        """Reads which context a message is in; in the I/O thread."""
        context_id, send_id = _GRAPH_LAYOUT.unpack_from(data)
        self._contexts.check(context_id)
        state = None
        if send_id == _ENDED:
            self._contexts.note_end(context_id)
        else:
            state = self._contexts.join(context_id, message.sender)
        return Graph(context_id, state, (message.sender, send_id), data[_GRAPH_LAYOUT.size :])

    @override
    def open(self, decoder: Decoder) -> None:
        graph = _graph_of(decoder.message)
        if graph is None or not graph.tensors:
            return
        state, origin = graph.state, graph.origin
        places, sources = pickle.loads(graph.tensors)
        tensors: Sequence[torch.Tensor] = [decoder.tensors[i].detach() for i in places]
        if state is None:
            why = sources if isinstance(sources, str) else self._contexts.why_over(graph.context_id)
            error = WorkerDied(f"a gradient can't be sent: {why}") if why else None
            tensors = cut_off(tensors, error or RpcError(OF_ENDED_CONTEXT))
        else:
            message = ReceivedMessage(next(self._numbers), Sources(*sources))
            if state.receives.setdefault(origin, message) is not message:
                return  # the message is unpacked again, to raise its error again
            tensors = recorded(Receive.apply, state.start, graph.context_id, *origin, tensors)
        for i, tensor in zip(places, tensors, strict=True):
            decoder.tensors[i] = tensor


def _note_sent(
    state: ContextState, to: MemberId, send_id: int, tensors: Iterable[torch.Tensor]
) -> tuple[Any, ...]:
    """Adds the nodes of an outgoing message; returns what its tensors were computed from."""
    exit_ = new_exit(send_id, [_alias_for_function(tensor) for tensor in tensors])
    node: Any = exit_.grad_fn
    found = state.tracer.reach_of(node.next_functions)
    reach = {(send_id, index): each for index, each in enumerate(found)}
    state.sends.update({place: SentTensor(to, exit_, each) for place, each in reach.items()})
    return tuple(state.tracer.sources(reach, _MOST_SOURCES))
