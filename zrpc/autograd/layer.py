"""Distributed autograd of one agent: what contexts say to each other, and backward passes.

Every message within a context says so in an extension, and which of its tensors belong to the
graph. Where tensors do, the sender appends a `Send` node to its chain and the receiver a
`Receive` node.

A backward pass. The worker that asks for it *engages*: it asks each worker that it exchanged
tensors with to take part (BACKWARD), and then runs its engine once. A worker that is asked
for the first time engages likewise, and answers when its own part and those that it has asked
for are done; asked again, it answers at once. So the pass is done everywhere when it is done
where it began (E. W. Dijkstra and C. S. Scholten, "Termination detection for diffusing
computations", Information Processing Letters 11, 1980).

A `Receive` node sends the gradients of its tensors back (GRADIENT), a `Send` node waits for
them. BACKWARD lists what the asking worker has sent and received, so that a message that only
one of the two knows of (its call timed out, or never arrived) holds nobody up.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from zrpc.agent import Agent
from zrpc.autograd import engine, replicas
from zrpc.autograd.nodes import Gradients, receive, send
from zrpc.autograd.state import ContextState, Pass
from zrpc.current import current_agent
from zrpc.errors import BackwardError, ProtocolError, RpcError, WorkerDied
from zrpc.rref.layer import RRefLayer
from zrpc.wire.exceptions import dump_exception, load_exception
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind
from zrpc.wire.pickling import Decoder, Encoder
from zrpc.worker_info import INCARNATIONS, WorkerInfo, incarnation_of, number_of, rank_of

__all__ = ["AutogradLayer", "plug_in"]

# The tags of extensions: of any message within a context, and of messages about a pass.
GRAPH = 3
PASS = 4

_GRAPH = struct.Struct("<qQ")  # context, number of the send (0: no tensors); then indices
_PASS = struct.Struct("<qQQB")  # context, pass, number of the send, retain_graph
_INDEX = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")

# Contexts that have ended, remembered so that a message that comes late does not begin them
# anew. One that comes later than this many ends is taken for one of a new context.
_ENDED_REMEMBERED = 4096

# Of an id of a context or a pass: what is left of 48 bits by the incarnation.
_COUNT_BITS = 32

_context_id: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "zrpc_autograd_context", default=None
)
_pass: contextvars.ContextVar[Pass | None] = contextvars.ContextVar(
    "zrpc_autograd_pass", default=None
)


class AutogradLayer:
    """Plugs distributed autograd into an agent.

    Args:
        agent: the agent; this layer registers its handlers there.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.rank = agent.worker_info.number
        self._base = _first_id(self.rank)
        self._numbers = itertools.count()
        self._sends = itertools.count(1)
        # Guards the contexts that live and the ids of those that have ended.
        self._lock = threading.Lock()
        self._contexts: dict[int, ContextState] = {}
        self._ended: deque[int] = deque(maxlen=_ENDED_REMEMBERED)
        agent.register(Kind.BACKWARD, self._on_backward)
        agent.register(Kind.GRADIENT, self._on_gradient)
        agent.register(Kind.ABORT, self._on_abort)
        agent.register(Kind.RELEASE, self._on_release)
        agent.register(Kind.ENLIST, self._on_enlist)
        agent.register_extension(GRAPH, self._read_graph)
        agent.register_extension(PASS, lambda _, data: _PASS.unpack(data))
        agent.codec.finishers.append(self._append_send)
        agent.codec.openers[GRAPH] = self._append_receive
        agent.callee.scopes[GRAPH] = self._scope
        agent.codec.in_context = self._in_context

    # -- contexts ------------------------------------------------------------------------

    @contextlib.contextmanager
    def context(self) -> Iterator[int]:
        """A new context, current in this thread; it ends everywhere with the block."""
        if _context_id.get() is not None:
            raise RpcError(
                "Already have an autograd context id for this thread: contexts can't be nested"
            )
        context_id = self._base + next(self._numbers)
        with self._lock:
            self._contexts[context_id] = ContextState(context_id)
        token = _context_id.set(context_id)
        replicas.watch()
        try:
            yield context_id
        finally:
            _context_id.reset(token)
            self._release(context_id, but=self.rank)

    def current_context(self) -> int:
        """The id of the context that this thread is in.

        Raises:
            RpcError: it is in none.
        """
        context_id = _context_id.get()
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
        with self._lock:
            state = self._contexts.get(context_id)
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
        with self._lock:
            took_part = context_id in self._contexts
        return self.gradients(context_id) if took_part else {}

    def scale_gradients(
        self, context_id: int, leaves: Sequence[torch.Tensor], factor: torch.Tensor
    ) -> None:
        """Multiplies the gradients of some leaves in a context."""
        with self._lock:
            state = self._contexts.get(context_id)
        if state is None:
            return
        with state.lock:
            for leaf in leaves:
                if leaf in state.gradients:
                    state.gradients[leaf] = state.gradients[leaf] * factor

    def __len__(self) -> int:
        """How many contexts live at this worker."""
        with self._lock:
            return len(self._contexts)

    def _join(self, context_id: int, peer: int) -> ContextState | None:
        """A context that a message from or to ``peer`` is within; None where it has ended."""
        with self._lock:
            state = self._contexts.get(context_id)
            if state is None:
                if context_id in self._ended:
                    return None
                state = self._contexts[context_id] = ContextState(context_id)
        state.peers.add(peer)
        return state

    def _release(self, context_id: int, but: int) -> None:
        """Ends a context here and at all workers that took part, but for the one that knows."""
        with self._lock:
            state = self._contexts.pop(context_id, None)
            self._ended.append(context_id)
        if state is None:
            return
        state.clear()
        for peer in state.peers - {self.rank, but}:
            self._post(peer, Kind.RELEASE, _PASS.pack(context_id, 0, 0, False))

    def _on_release(self, message: Message) -> None:
        context_id = self._pass_fields(message)[0]
        self._release(context_id, but=message.sender)

    def _enlist(self, state: ContextState, lost: int) -> None:
        """A worker is gone by which the word of a context's end might have come here.

        So the one who made the context is told that it is in use here too.
        """
        creator = _creator(state.context_id)
        if creator in self.agent.membership.lost:
            self._release(state.context_id, but=lost)  # nobody else would
        elif lost in state.peers and creator != self.rank:
            self._post(creator, Kind.ENLIST, _PASS.pack(state.context_id, 0, 0, False))

    def _on_enlist(self, message: Message) -> None:
        context_id = self._pass_fields(message)[0]
        with self._lock:
            state = self._contexts.get(context_id)
            if state is not None:
                state.peers.add(message.sender)  # before its end, or not at all
        if state is None:
            data = _PASS.pack(context_id, 0, 0, False)
            self._post(message.sender, Kind.RELEASE, data)

    # -- messages within a context -------------------------------------------------------

    @contextlib.contextmanager
    def _scope(self, request: Message) -> Iterator[None]:
        """A handler works in the context of its caller."""
        graph = _graph_of(request)
        if graph is None:
            yield
            return
        token = _context_id.set(graph.state.context_id)
        replicas.watch()
        try:
            yield
        finally:
            _context_id.reset(token)

    def _in_context(self, request: Message | None) -> bool:
        """Whether a message that is packed now is within a context."""
        if request is None:
            return _context_id.get() is not None
        return _graph_of(request) is not None

    def _context_of(self, request: Message | None) -> int | None:
        """The context of a message that is packed: of the present one, or of its request."""
        if request is None:
            return _context_id.get()
        graph = _graph_of(request)
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
        extension.extend(_GRAPH.pack(context_id, send_id))
        if send_id:
            extension.extend(b"".join(map(_INDEX.pack, tensors)))

    def _read_graph(self, message: Message, data: bytes) -> _Graph | None:
        """In the I/O thread: which context a message is within, and which tensors are."""
        if len(data) < _GRAPH.size:
            raise ProtocolError(f"expected a context id, found {len(data)} bytes")
        context_id, send_id = _GRAPH.unpack_from(data)
        state = self._join(context_id, message.sender)
        if state is None:
            return None
        indices = [i for (i,) in _INDEX.iter_unpack(data[_GRAPH.size :])]
        return _Graph(state, message.sender, send_id, indices)

    def _append_receive(self, decoder: Decoder) -> None:
        """The tensors of an incoming message are made: those of the graph arrive."""
        graph = _graph_of(decoder.message)
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

    # -- backward ------------------------------------------------------------------------

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a backward pass through all workers; see `zrpc.autograd.backward`."""
        engine.check_roots(roots)
        state = self.find(context_id)
        pass_ = state.find_pass(self._base + next(self._numbers))
        state.engage(pass_, retain_graph)
        self._run(state, pass_, roots, retain_graph, parent=self.rank)

    def backward_of_value(
        self, owner: WorkerInfo, rref: Any, context_id: int, retain_graph: bool
    ) -> None:
        """Runs a backward pass from the value of an RRef; see `RRef.backward`."""
        if owner.number == self.rank:
            _backward_at_owner(rref, context_id, retain_graph)
            return
        if context_id < 0:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        body: Any = (_backward_at_owner, (rref, context_id, retain_graph), {})
        self.agent.caller.call(owner, Kind.CALL, body, -1)

    def _run(
        self,
        state: ContextState,
        pass_: Pass,
        roots: Sequence[torch.Tensor],
        retain_graph: bool,
        parent: int,
    ) -> None:
        """This worker's part of a pass: asks the others, runs the engine, waits for them.

        The pass is engaged by the caller.
        """
        events = pass_.events
        assert events is not None
        asked: list[Any] = []
        running = _pass.set(pass_)
        try:
            for peer in events.linked - {parent, self.rank}:
                future = self._ask(state, pass_, peer, retain_graph)
                # In the midst of the engine's run nobody looks at the future.
                future.add_done_callback(partial(self._on_part_done, state, pass_))
                asked.append(future)
            self._settle_unknown(state, pass_, self.rank, *events.with_peer(self.rank))
            engine.run(roots, events.start, events.token, retain_graph, state.add_gradient)
            for future in asked:
                future.wait()
            pass_.check()
        except Exception as error:
            self._fail(state, pass_, error)
            pass_.check()
        finally:
            _pass.reset(running)
            pass_.finish()

    def _on_part_done(self, state: ContextState, pass_: Pass, future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            self._fail(state, pass_, error)

    def _ask(self, state: ContextState, pass_: Pass, peer: int, retain_graph: bool) -> Any:
        """Asks a worker to take part; returns a future of the end of its part."""
        assert pass_.events is not None
        sends, receives = pass_.events.with_peer(peer)
        data = _PASS.pack(state.context_id, pass_.pass_id, len(sends), retain_graph)
        numbers = b"".join(map(_NUMBER.pack, [*sends, *receives]))
        return self.agent.caller.call_async(
            self.agent.membership.infos[peer],
            Kind.BACKWARD,
            numbers,
            0,
            extension=(PASS, data),
        )

    def _on_backward(self, request: Message) -> None:
        self.agent.callee.accept(request)
        self.agent.pool.submit(partial(self._take_part, request))

    def _take_part(self, request: Message) -> None:
        """In the pool: a peer asks to take part in a pass."""
        try:
            context_id, pass_id, sent, retain_graph = self._pass_fields(request)
            numbers = [n for (n,) in _NUMBER.iter_unpack(self.agent.codec.unpack(request))]
            state = self._join(context_id, request.sender)
            if state is None:
                raise RpcError(f"Could not find autograd context with id: {context_id}")
            pass_ = state.find_pass(pass_id)
            first = state.engage(pass_, bool(retain_graph))
            self._settle_unknown(state, pass_, request.sender, numbers[:sent], numbers[sent:])
            pass_.check()
            if first:
                self._run(state, pass_, [], bool(retain_graph), parent=request.sender)
        except Exception as error:
            self.agent.callee.answer_error(request, error)
        else:
            self.agent.callee.answer(request, None)

    def _settle_unknown(
        self,
        state: ContextState,
        pass_: Pass,
        peer: int,
        their_sends: Sequence[int],
        their_receives: Sequence[int],
    ) -> None:
        """Takes what only one of two workers knows of for unused."""
        assert pass_.events is not None
        ours, came = pass_.events.with_peer(peer)
        for number in set(their_sends) - set(came):
            self._post_gradients(peer, state.context_id, pass_, number, None)
        for number in set(ours) - set(their_receives):
            pass_.deliver(number, _UNUSED)

    def _on_gradient(self, message: Message) -> None:
        context_id, pass_id, send_id, _ = self._pass_fields(message)
        with self._lock:
            state = self._contexts.get(context_id)
        if state is not None:
            used = bool(message.body)
            state.find_pass(pass_id).deliver(send_id, message if used else _UNUSED)

    # The two that the nodes call. They know the context's id and not its state, which refers to
    # them by way of the graph: a cycle through objects of C++ is hidden from the collector.

    def _await_gradients(self, send_id: int, count: int) -> Gradients:
        """For a `Send` node: waits for the gradients of the tensors that were sent."""
        pass_ = _running_pass()
        if pass_.events is None or send_id not in pass_.events.sends:
            raise _graph_is_gone()
        message = pass_.wait(send_id, self.agent.receive)
        if not isinstance(message, Message):
            return [None] * count
        gradients: Gradients = self.agent.codec.unpack(message)
        return gradients

    def _send_gradients(
        self, context_id: int, sender: int, send_id: int, gradients: Gradients
    ) -> None:
        """For a `Receive` node: sends the gradients of the tensors that were received."""
        pass_ = _running_pass()
        pass_.check()
        if pass_.events is None or (sender, send_id) not in pass_.events.receives:
            raise _graph_is_gone()
        self._post_gradients(sender, context_id, pass_, send_id, gradients)

    def _post_gradients(
        self,
        peer: int,
        context_id: int,
        pass_: Pass,
        send_id: int,
        gradients: Gradients | None,
    ) -> None:
        message = Message(Kind.GRADIENT)
        if gradients is not None and any(gradient is not None for gradient in gradients):
            with _outside_of_contexts():
                self.agent.codec.encoder(peer).pack(list(gradients), message)
        data = _PASS.pack(context_id, pass_.pass_id, send_id, False)
        message.extensions = [*message.extensions, (PASS, data)]
        self.agent.outbox.post(peer, message)

    # -- failure -------------------------------------------------------------------------

    def _fail(self, state: ContextState, pass_: Pass, error: Exception) -> None:
        """This worker's part has failed: so does the whole pass."""
        linked = pass_.events.linked - {self.rank} if pass_.events is not None else set()
        if _creator(pass_.pass_id) != self.rank and not isinstance(error, BackwardError):
            error = BackwardError(
                f"Error on Node {self.agent.worker_info.id}: {type(error).__name__}: {error}"
            )
        if not pass_.fail(lambda: error):
            return  # told by the one who failed first
        body = dump_exception(error, repr(self.agent.worker_info), same_main=False)
        data = _PASS.pack(state.context_id, pass_.pass_id, 0, False)
        for peer in linked:
            self._post(peer, Kind.ABORT, data, body)

    def _on_abort(self, message: Message) -> None:
        context_id, pass_id, _, _ = self._pass_fields(message)
        with self._lock:
            state = self._contexts.get(context_id)
        if state is None:
            return
        body = bytes(message.body)
        state.find_pass(pass_id).fail(lambda: load_exception(body))

    def lose(self, rank: int) -> None:
        """A peer is gone: so are its contexts, and passes that it took part in fail."""
        with self._lock:
            states = list(self._contexts.values())
        why = self.agent.why_gone(rank)
        error = WorkerDied(f"Error on Node {rank_of(rank)}: during a backward pass, {why}")
        for state in states:
            self._enlist(state, rank)
            with state.lock:
                passes = list(state.passes.values())
            for pass_ in passes:
                if pass_.events is not None and rank in pass_.events.linked:
                    self._fail(state, pass_, error)

    # -- the layer -----------------------------------------------------------------------

    def quiet(self) -> bool:
        """Passes are requests, which the agent counts itself."""
        return True

    def close(self) -> None:
        """Drops all contexts, and ends the waits of passes under way."""
        with self._lock:
            states, self._contexts = list(self._contexts.values()), {}
        for state in states:
            state.clear()

    def _post(self, peer: int, kind: Kind, data: bytes, body: bytes = b"") -> None:
        self.agent.outbox.post(peer, Message(kind, body=body, extensions=[(PASS, data)]))

    @staticmethod
    def _pass_fields(message: Message) -> tuple[int, int, int, int]:
        fields: tuple[int, int, int, int] = message.attachment(PASS)
        return fields


# In place of a message, for gradients that nobody needs.
_UNUSED = object()


class _Graph:
    """What the extension of a message says of its context."""

    __slots__ = ("indices", "send_id", "sender", "state")

    def __init__(self, state: ContextState, sender: int, send_id: int, indices: list[int]) -> None:
        self.state = state
        self.sender = sender
        self.send_id = send_id
        self.indices = indices


def plug_in(agent: Agent) -> AutogradLayer:
    """Plugs distributed autograd into an agent that has RRefs, see `join_mesh`."""
    layer = AutogradLayer(agent)
    agent.layer(RRefLayer).backward = layer.backward_of_value
    return layer


def _backward_at_owner(rref: Any, context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    if context_id < 0:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        current_agent().layer(AutogradLayer).backward(context_id, [value], retain_graph)


def _first_id(number: int) -> int:
    """The first id of a context or a pass that a member draws: as torch's, the rank above 48 bits
    of a count, which begins anew with each incarnation, and elsewhere.
    """
    return (rank_of(number) << 48) + (incarnation_of(number) << _COUNT_BITS)


def _creator(drawn: int) -> int:
    """The number of the member that has drawn an id."""
    return number_of(drawn >> 48, (drawn >> _COUNT_BITS) & (INCARNATIONS - 1))


def _graph_of(message: Message) -> _Graph | None:
    return message.attachments.get(GRAPH) if message.attachments else None


def _graph_is_gone() -> RpcError:
    return RpcError(
        "Trying to backward through the graph a second time: an earlier pass has gone through "
        "tensors that came from, or went to, another worker; give it retain_graph=True"
    )


def _running_pass() -> Pass:
    pass_ = _pass.get()
    if pass_ is None:
        raise RpcError(
            "expected zrpc.autograd.backward(context_id, roots), found torch's own backward: "
            "tensors that came from another worker within a context have gradients there"
        )
    return pass_


@contextlib.contextmanager
def _outside_of_contexts() -> Iterator[None]:
    token = _context_id.set(None)
    try:
        yield
    finally:
        _context_id.reset(token)
