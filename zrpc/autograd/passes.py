"""Backward passes: one worker's part in them.

The worker that asks for a pass *engages*: it asks each worker that it exchanged
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
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from zrpc.agent import Agent
from zrpc.autograd import engine
from zrpc.autograd.contexts import Contexts, current_id
from zrpc.autograd.extensions import PASS, PASS_LAYOUT, pass_fields
from zrpc.autograd.ids import creator
from zrpc.autograd.nodes import Gradients
from zrpc.autograd.state import ContextState, Pass
from zrpc.errors import BackwardError, RpcError
from zrpc.wire.exceptions import dump_exception, load_exception
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind

__all__ = ["Passes"]

_NUMBER = struct.Struct("<Q")

# In place of a message, for gradients that nobody needs.
_UNUSED = object()

# That of which this thread runs the engine.
_pass: contextvars.ContextVar[Pass | None] = contextvars.ContextVar(
    "zrpc_autograd_pass", default=None
)


class Passes:
    """The backward passes that one worker begins or takes part in.

    Args:
        agent: the worker's; handlers are registered there.
        contexts: those that live at this worker.
    """

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        self._agent = agent
        self._rank = agent.worker_info.number
        self._ids = contexts.ids
        self._find = contexts.find
        self._join = contexts.join
        self._lock = contexts.lock
        self._states = contexts.states  # under that lock
        self._living = contexts.living
        agent.dispatcher.register(Kind.BACKWARD, self._on_backward)
        agent.dispatcher.register(Kind.GRADIENT, self._on_gradient)
        agent.dispatcher.register(Kind.ABORT, self._on_abort)
        agent.awaited.append(self._linked)
        agent.dispatcher.missed.append(self._miss)
        agent.dispatcher.register_extension(PASS, lambda _, data: PASS_LAYOUT.unpack(data))

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a backward pass through all workers; see `zrpc.autograd.backward`."""
        engine.check_roots(roots)
        state = self._find(context_id)
        pass_ = state.find_pass(next(self._ids))
        state.engage(pass_, retain_graph)
        self._run(state, pass_, roots, retain_graph, parent=self._rank)

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
            for peer in events.linked - {parent, self._rank}:
                future = self._ask(state, pass_, peer, retain_graph)
                # In the midst of the engine's run nobody looks at the future.
                future.add_done_callback(partial(self._on_part_done, state, pass_))
                asked.append(future)
            self._settle_unknown(state, pass_, self._rank, *events.with_peer(self._rank))
            engine.run(roots, events.start, events.token, retain_graph, state.add_gradient)
            for future in asked:
                future.wait()
            pass_.check()
        except Exception as error:
            self.fail(state, pass_, error)
            pass_.check()
        finally:
            _pass.reset(running)
            pass_.finish()

    def _on_part_done(self, state: ContextState, pass_: Pass, future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            self.fail(state, pass_, error)

    def _ask(self, state: ContextState, pass_: Pass, peer: int, retain_graph: bool) -> Any:
        """Asks a worker to take part; returns a future of the end of its part."""
        assert pass_.events is not None
        sends, receives = pass_.events.with_peer(peer)
        data = PASS_LAYOUT.pack(state.context_id, pass_.pass_id, len(sends), retain_graph)
        numbers = b"".join(map(_NUMBER.pack, [*sends, *receives]))
        return self._agent.caller.call_async(
            self._agent.membership.infos[peer],
            Kind.BACKWARD,
            numbers,
            0,
            extension=(PASS, data),
        )

    def _on_backward(self, request: Message) -> None:
        self._agent.callee.accept(request)
        self._agent.pool.submit(partial(self._take_part, request))

    def _take_part(self, request: Message) -> None:
        """In the pool: a peer asks to take part in a pass."""
        try:
            context_id, pass_id, sent, retain_graph = pass_fields(request)
            numbers = [n for (n,) in _NUMBER.iter_unpack(self._agent.codec.unpack(request))]
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
            self._agent.callee.answer_error(request, error)
        else:
            self._agent.callee.answer(request, None)

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
        context_id, pass_id, send_id, _ = pass_fields(message)
        with self._lock:
            state = self._states.get(context_id)
        if state is not None:
            used = bool(message.body)
            state.find_pass(pass_id).deliver(send_id, message if used else _UNUSED)

    # The two that the nodes call. They know the context's id and not its state, which refers to
    # them by way of the graph: a cycle through objects of C++ is hidden from the collector.

    def await_gradients(self, send_id: int, count: int) -> Gradients:
        """For a `Send` node: waits for the gradients of the tensors that were sent."""
        pass_ = _running_pass()
        if pass_.events is None or send_id not in pass_.events.sends:
            raise _graph_is_gone()
        message = pass_.wait(send_id, self._agent.receive)
        if not isinstance(message, Message):
            return [None] * count
        gradients: Gradients = self._agent.codec.unpack(message)
        return gradients

    def send_gradients(
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
                self._agent.codec.encoder(peer).pack(list(gradients), message)
        data = PASS_LAYOUT.pack(context_id, pass_.pass_id, send_id, False)
        message.extensions = [*message.extensions, (PASS, data)]
        self._agent.outbox.post(peer, message)

    def fail(self, state: ContextState, pass_: Pass, error: Exception) -> None:
        """This worker's part has failed: so does the whole pass."""
        linked = pass_.events.linked - {self._rank} if pass_.events is not None else set()
        if creator(pass_.pass_id) != self._rank and not isinstance(error, BackwardError):
            error = BackwardError(
                f"Error on Node {self._agent.worker_info.id}: {type(error).__name__}: {error}"
            )
        if not pass_.fail(lambda: error):
            return  # told by the one who failed first
        body = dump_exception(error, repr(self._agent.worker_info), same_main=False)
        data = PASS_LAYOUT.pack(state.context_id, pass_.pass_id, 0, False)
        for peer in linked:
            aborted = Message(Kind.ABORT, body=body, extensions=[(PASS, data)])
            self._agent.outbox.post(peer, aborted)

    def fail_with(self, rank: int, error: Exception) -> None:
        """The passes fail that a peer takes part in."""
        for state, pass_ in self._under_way():
            if pass_.events is not None and rank in pass_.events.linked:
                self.fail(state, pass_, error)

    def _miss(self, rank: int) -> None:
        """Messages of a peer are lost, perhaps gradients."""
        info = self._agent.membership.infos[rank]
        self.fail_with(
            rank,
            RpcError(
                f"during a backward pass, messages from {info} were lost: a connection broke, or "
                "there was no memory or file descriptor for them; run the pass again in a new "
                "context"
            ),
        )

    def _linked(self) -> set[int]:
        """The workers that take part in passes that run here."""
        running = [pass_.events for _, pass_ in self._under_way()]
        return {rank for events in running if events is not None for rank in events.linked}

    def _under_way(self) -> list[tuple[ContextState, Pass]]:
        return [(state, each) for state in self._living() for each in list(state.passes.values())]

    def _on_abort(self, message: Message) -> None:
        context_id, pass_id, _, _ = pass_fields(message)
        with self._lock:
            state = self._states.get(context_id)
        if state is None:
            return
        body = bytes(message.body)
        state.find_pass(pass_id).fail(lambda: load_exception(body))


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
    token = current_id.set(None)
    try:
        yield
    finally:
        current_id.reset(token)
