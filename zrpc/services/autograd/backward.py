"""Backward passes: one worker's part in them.

The worker that begins a pass *engages*: it asks each worker that it exchanged tensors with to
take part (BACKWARD), and then runs its engine once. A worker that is asked for the first time
engages too, and answers when its own part and the parts that it has asked for are done. If it is
asked again, it answers at once. So the pass is done everywhere when it is done where it began
(E. W. Dijkstra and C. S. Scholten, "Termination detection for diffusing computations",
Information Processing Letters 11, 1980).

A `Receive` node sends the gradients of its tensors back (GRADIENT), and a `Send` node waits for
them. BACKWARD lists what the asking worker has sent and received. So no worker waits because of a
message that only one of the two knows (its call timed out, or it never arrived).
"""

from __future__ import annotations

import contextvars
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler
from zrpc.calls.execution import RequestJob
from zrpc.errors import BackwardError, RpcError
from zrpc.services.autograd import engine
from zrpc.services.autograd.contexts import (
    PASS_LAYOUT,
    Contexts,
    creator_of,
    current_id,
    pass_fields,
    unknown_context,
)
from zrpc.services.autograd.state import ContextState, Pass
from zrpc.wire.exceptions import dump_exception, load_exception
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["Gradients", "Passes"]

Gradients = Sequence[torch.Tensor | None]

_SEND_ID = struct.Struct("<Q")

# Stands for a message, if nobody needs the gradients.
_UNUSED = object()

# The pass whose engine this thread runs.
_current_pass: contextvars.ContextVar[Pass | None] = contextvars.ContextVar(
    "zrpc_autograd_pass", default=None
)


class Passes:
    """The backward passes that one worker begins or takes part in."""

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        self._agent = agent
        self._contexts = contexts
        self._own_id = agent.worker_info.member_id

    def handlers(self) -> Mapping[Kind, Handler]:
        """Returns the handlers of messages about passes, in the I/O thread."""
        return {
            Kind.BACKWARD: self._on_backward,
            Kind.GRADIENT: self._on_gradient,
            Kind.ABORT: self._on_abort,
        }

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a backward pass through all workers; see `zrpc.autograd.backward`."""
        engine.check_roots(roots)
        state = self._contexts.find(context_id)
        pass_ = state.find_pass(self._contexts.draw_id())
        state.engage(pass_, retain_graph)
        self._run(state, pass_, roots, retain_graph, parent=self._own_id)

    def _run(
        self,
        state: ContextState,
        pass_: Pass,
        roots: Sequence[torch.Tensor],
        retain_graph: bool,
        parent: MemberId,
    ) -> None:
        """Runs this worker's part of a pass: asks the others, runs the engine, waits for them.

        The caller has engaged the pass.
        """
        events = pass_.events
        assert events is not None
        asked: list[Any] = []
        token = _current_pass.set(pass_)
        try:
            for peer in events.linked - {parent, self._own_id}:
                future = self._ask(state, pass_, peer, retain_graph)
                # While the engine runs, nobody looks at the future.
                future.add_done_callback(partial(self._on_part_done, state, pass_))
                asked.append(future)
            self._settle_unknown(state, pass_, self._own_id, *events.with_peer(self._own_id))
            engine.run(roots, events.start, events.token, retain_graph, state)
            for future in asked:
                future.wait()
            pass_.check()
        except Exception as error:
            self._fail(state, pass_, error)
            pass_.check()
        finally:
            _current_pass.reset(token)
            pass_.finish()

    def _on_part_done(self, state: ContextState, pass_: Pass, future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            self._fail(state, pass_, error)

    def _ask(self, state: ContextState, pass_: Pass, peer: MemberId, retain_graph: bool) -> Any:
        """Asks a worker to take part; returns a future that completes when its part is done."""
        assert pass_.events is not None
        sends, receives = pass_.events.with_peer(peer)
        data = PASS_LAYOUT.pack(state.context_id, pass_.pass_id, len(sends), retain_graph)
        send_ids = b"".join(map(_SEND_ID.pack, [*sends, *receives]))
        return self._agent.caller.call_async(
            self._agent.membership.infos[peer],
            Kind.BACKWARD,
            send_ids,
            0,
            extension=(Tag.PASS, data),
        )

    def _on_backward(self, request: Message) -> None:
        self._agent.callee.accept(request)
        self._agent.pool.submit(RequestJob(request, self._take_part))

    def _take_part(self, request: Message) -> None:
        """Runs this worker's part of a pass for a peer that asks; in the pool."""
        try:
            context_id, pass_id, sent, retain_graph = pass_fields(request)
            send_ids = [n for (n,) in _SEND_ID.iter_unpack(self._agent.codec.unpack(request))]
            state = self._contexts.join(context_id, request.sender)
            if state is None:
                raise unknown_context(context_id)
            pass_ = state.find_pass(pass_id)
            first = state.engage(pass_, bool(retain_graph))
            self._settle_unknown(state, pass_, request.sender, send_ids[:sent], send_ids[sent:])
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
        peer: MemberId,
        their_sends: Sequence[int],
        their_receives: Sequence[int],
    ) -> None:
        """Marks messages that only one of two workers knows as unused."""
        assert pass_.events is not None
        our_sends, our_receives = pass_.events.with_peer(peer)
        for send_id in set(their_sends) - set(our_receives):
            self._post_gradients(peer, state.context_id, pass_, send_id, None)
        for send_id in set(our_sends) - set(their_receives):
            pass_.deliver(send_id, _UNUSED)

    def _on_gradient(self, message: Message) -> None:
        context_id, pass_id, send_id, _ = pass_fields(message)
        state = self._contexts.state_of(context_id)
        if state is not None:
            used = bool(message.body)
            state.find_pass(pass_id).deliver(send_id, message if used else _UNUSED)

    # The nodes call the next two. Nodes know the context's id and not its state, which refers to
    # them by way of the graph: the collector can't see a cycle through objects of C++.

    def await_gradients(self, send_id: int, count: int) -> Gradients:
        """Waits for the gradients of tensors that were sent; for a `Send` node."""
        pass_ = _pass_of_thread()
        if pass_.events is None or send_id not in pass_.events.sends:
            raise _graph_freed()
        message = pass_.wait(send_id, self._agent.receiver.receive)
        if not isinstance(message, Message):
            return [None] * count
        gradients: Gradients = self._agent.codec.unpack(message)
        return gradients

    def send_gradients(
        self, context_id: int, sender: MemberId, send_id: int, gradients: Gradients
    ) -> None:
        """Sends the gradients of tensors that were received; for a `Receive` node."""
        pass_ = _pass_of_thread()
        pass_.check()
        if pass_.events is None or (sender, send_id) not in pass_.events.receives:
            raise _graph_freed()
        self._post_gradients(sender, context_id, pass_, send_id, gradients)

    def _post_gradients(
        self,
        peer: MemberId,
        context_id: int,
        pass_: Pass,
        send_id: int,
        gradients: Gradients | None,
    ) -> None:
        message = Message(Kind.GRADIENT)
        if gradients is not None and any(gradient is not None for gradient in gradients):
            token = current_id.set(None)  # outside of contexts
            try:
                self._agent.codec.encoder(peer).pack(list(gradients), message)
            finally:
                current_id.reset(token)
        data = PASS_LAYOUT.pack(context_id, pass_.pass_id, send_id, False)
        message.extensions = [*message.extensions, (Tag.PASS, data)]
        self._agent.outbox.post(peer, message)

    def _fail(self, state: ContextState, pass_: Pass, error: Exception) -> None:
        """Fails the whole pass, because this worker's part has failed."""
        linked = pass_.events.linked - {self._own_id} if pass_.events is not None else set()
        if creator_of(pass_.pass_id) != self._own_id and not isinstance(error, BackwardError):
            error = BackwardError(
                f"Error on Node {self._agent.worker_info.id}: {type(error).__name__}: {error}"
            )
        if not pass_.fail(lambda: error):
            return  # the worker that failed first has told the others
        body = dump_exception(error, repr(self._agent.worker_info), same_main=False)
        data = PASS_LAYOUT.pack(state.context_id, pass_.pass_id, 0, False)
        for peer in linked:
            aborted = Message(Kind.ABORT, body=body, extensions=[(Tag.PASS, data)])
            self._agent.outbox.post(peer, aborted)

    def fail_passes_with(self, member: MemberId, error: Exception) -> None:
        """Fails the passes that a member takes part in."""
        for state, pass_ in self._all():
            if pass_.events is not None and member in pass_.events.linked:
                self._fail(state, pass_, error)

    def on_messages_lost(self, member: MemberId) -> None:
        """Fails the passes that a member takes part in: lost messages may be gradients."""
        info = self._agent.membership.infos[member]
        self.fail_passes_with(
            member,
            RpcError(
                f"during a backward pass, messages from {info} were lost: a connection broke, or "
                "there was no memory or file descriptor for them; run the pass again in a new "
                "context"
            ),
        )

    def linked_members(self) -> set[MemberId]:
        """Returns the members that take part in passes that run here."""
        events = [pass_.events for _, pass_ in self._all()]
        return {member for each in events if each is not None for member in each.linked}

    def _all(self) -> list[tuple[ContextState, Pass]]:
        """Returns all passes; one that is done here has no linked members."""
        states = self._contexts.states()
        return [(state, each) for state in states for each in list(state.passes.values())]

    def _on_abort(self, message: Message) -> None:
        context_id, pass_id, _, _ = pass_fields(message)
        state = self._contexts.state_of(context_id)
        if state is None:
            return
        body = bytes(message.body)
        state.find_pass(pass_id).fail(lambda: load_exception(body))


def _graph_freed() -> RpcError:
    return RpcError(
        "Trying to backward through the graph a second time: an earlier pass has gone through "
        "tensors that came from, or went to, another worker; give it retain_graph=True"
    )


def _pass_of_thread() -> Pass:
    pass_ = _current_pass.get()
    if pass_ is None:
        raise RpcError(
            "expected zrpc.autograd.backward(context_id, roots), found torch's own backward: "
            "tensors that came from another worker within a context have gradients there"
        )
    return pass_
