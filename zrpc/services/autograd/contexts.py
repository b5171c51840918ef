"""The autograd contexts that one worker takes part in, and how all workers learn of their end."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import operator
import struct
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from zrpc.agent.agent import Agent
from zrpc.errors import RpcError, WorkerDied
from zrpc.runtime.interrupts import UninterruptedLock, uninterrupted
from zrpc.services.autograd import ddp
from zrpc.services.autograd.state import ContextState
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import INCARNATIONS, MemberId, incarnation_of, member_id_of, rank_of
from zrpc.wire.message import Message

# What messages about a context or a pass say: context, pass, id of the send.
PASS_LAYOUT = struct.Struct("<qQQ")

# Ids of contexts and of passes are unique in a mesh. As in torch, the rank is above 48 bits of a
# counter. Here the incarnation has the upper 16 of these, so that the ids of each incarnation
# differ.
_RANK_SHIFT = 48
_COUNTER_BITS = 32

# Contexts that have ended, remembered so that a late message does not begin them again. A message
# that comes more than this many ends later is taken for one of a new context.
_ENDED_REMEMBERED = 4096

# The id of the context that a thread, or a handler, is in.
current_id: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "zrpc_autograd_context", default=None
)


class in_context:
    """Puts this thread into a context within a block, or outside of contexts.

    Not a generator: if Ctrl-C came before the block, its end would come later, with its error's.
    """

    def __init__(self, context_id: int | None) -> None:
        self._context_id = context_id

    def __enter__(self) -> None:
        self._before = current_id.get()
        current_id.set(self._context_id)

    def __exit__(self, *_: object) -> None:
        current_id.set(self._before)


class Contexts:
    """The contexts that one worker takes part in.

    Attributes:
        draw_id: returns an id for a context or a pass, unique in the mesh.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._own_id = agent.worker_info.member_id
        rank, incarnation = rank_of(self._own_id), incarnation_of(self._own_id)
        first = (rank << _RANK_SHIFT) + (incarnation << _COUNTER_BITS)
        self.draw_id = itertools.count(first).__next__
        # Guards changes of the two that follow. Single operations on the dict are atomic.
        self._lock = UninterruptedLock()
        self._states: dict[int, ContextState] = {}
        self._ended: deque[int] = deque(maxlen=_ENDED_REMEMBERED)

    @contextlib.contextmanager
    def context(self) -> Iterator[int]:
        """Begins a context, current in this thread; it ends on all workers with the block."""
        if current_id.get() is not None:
            raise RpcError(
                "Already have an autograd context id for this thread: contexts can't be nested"
            )
        context_id = self.draw_id()
        try:
            current_id.set(context_id)
            with self._lock:
                self._states[context_id] = ContextState(context_id)
            ddp.watch()
            yield context_id
            self._end(context_id)
        except BaseException:
            self._end(context_id)  # does nothing if it has ended, or has not begun
            raise

    def _end(self, context_id: int) -> None:
        with uninterrupted:  # nobody else ends the context
            if current_id.get() == context_id:
                current_id.set(None)
            try:
                self.release(context_id, known_to=self._own_id)
            except BaseException:  # no memory for a frame, for example
                again = partial(self.release, context_id, self._own_id)
                self._agent.receiver.in_next_turn(again)
                raise

    def current(self) -> int:
        """Returns the id of the context that this thread is in.

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

    def state_of(self, context_id: int) -> ContextState | None:
        """Returns the state of a context, or None if it does not exist on this worker."""
        return self._states.get(context_id)

    def find(self, context_id: int) -> ContextState:
        """Returns the state of a context.

        Raises:
            RpcError: it does not exist on this worker.
            TypeError: the id is not an int.
        """
        context_id = checked_id(context_id)
        state = self.state_of(context_id)
        if state is None:
            raise self.unknown(context_id)
        return state

    def unknown(self, context_id: int) -> RpcError:
        """Returns the error for a context that does not exist on this worker."""
        why = self.why_over(context_id)
        if why is not None:
            return WorkerDied(why)
        return RpcError(f"Could not find autograd context with id: {context_id}")

    def why_over(self, context_id: int) -> str | None:
        """Returns why a context is over here if that is so because its creator is lost."""
        if not self._is_orphan(context_id):
            return None
        context, here = pass_name(context_id, 0), self._agent.worker_info.name
        why = self._agent.why_gone(creator_of(context_id))
        return f"{context} is over on {here}, which has lost its creator: {why}"

    def _is_orphan(self, context_id: int) -> bool:
        return creator_of(context_id) in self._agent.membership.lost

    def states(self) -> list[ContextState]:
        """Returns the states of all contexts."""
        with self._lock:  # a thread that is about to add one does so before, or sees what changed
            return list(self._states.values())

    def gradients_if_any(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """Returns the gradients here, by leaf; none if this worker took no part in the context."""
        state = self.state_of(context_id)
        return {} if state is None else state.copy_gradients()

    def join(self, context_id: int, peer: MemberId) -> ContextState | None:
        """Returns the context of a message from or to ``peer``, or None if it has ended."""
        state = self._states.get(context_id)
        if state is not None and peer in state.peers:  # as for most messages; no lock, for speed
            return state
        with self._lock:
            state = self._states.get(context_id)
            if state is None:
                # Others may not have lost its creator yet.
                if context_id in self._ended or self._is_orphan(context_id):
                    return None
                state = self._states[context_id] = ContextState(context_id)
            state.peers.add(peer)  # before the context's end, or not at all
        return state

    def read_pass(self, _: Message, data: bytes) -> tuple[int, int, int]:
        """Reads the fields of `PASS_LAYOUT`; in the I/O thread.

        Raises:
            ProtocolError: as `check`.
        """
        context_id, pass_id, send_id = PASS_LAYOUT.unpack(data)
        self.check(context_id)
        return context_id, pass_id, send_id

    def check(self, context_id: int) -> None:
        """Checks the id of a context in a message; in the I/O thread.

        Raises:
            ProtocolError: no member has drawn that id.
        """
        creator = creator_of(context_id)
        if creator not in self._agent.membership.infos:
            self._agent.peers.recall(creator)

    def note_end(self, context_id: int) -> None:
        """Notes that a context has ended, unless this worker takes part in it: it is told then."""
        with self._lock:
            if context_id not in self._states and context_id not in self._ended:
                self._ended.append(context_id)

    def release(self, context_id: int, known_to: MemberId) -> None:
        """Ends a context here and on all workers that took part, except one that knows it."""
        state = self._forget(context_id)
        if state is None:
            return
        peers = state.peers - {self._own_id, known_to}
        try:
            for peer in peers:
                self._post(peer, Kind.RELEASE, context_id)
        except BaseException:  # no memory for a frame, for example; none minds to hear it twice
            for peer in peers:
                again = partial(self._post, peer, Kind.RELEASE, context_id)
                self._agent.receiver.in_next_turn(again)
            raise
        finally:
            state.clear()

    def _forget(self, context_id: int) -> ContextState | None:
        """Notes that a context has ended; returns its state, to be cleared."""
        with self._lock:
            state = self._states.pop(context_id, None)
            self._ended.append(context_id)
        return state

    def on_release(self, message: Message) -> None:
        """Ends a context that has ended for the sender; in the I/O thread."""
        self.release(pass_fields(message)[0], known_to=message.sender)

    def on_member_lost(self, member: MemberId) -> None:
        """Handles the loss of a member that might have told this worker of a context's end.

        The others learn by themselves that a creator is lost, if it is lost to them, too.
        """
        for state in self.states():
            if self._is_orphan(state.context_id):
                self._forget(state.context_id)
                state.clear()
        self.on_messages_lost(member)

    def on_messages_lost(self, member: MemberId) -> None:
        """Tells creators that their contexts, whose end a member might have told, are in use."""
        for state in self.states():
            creator = creator_of(state.context_id)
            if member in state.peers and creator != self._own_id:
                self._post(creator, Kind.ENLIST, state.context_id)  # answered if it has ended

    def on_enlist(self, message: Message) -> None:
        """Notes that the sender takes part in a context, or answers its end; in the I/O thread."""
        context_id = pass_fields(message)[0]
        with self._lock:
            state = self._states.get(context_id)
            if state is not None:
                state.peers.add(message.sender)  # before the context's end, or not at all
        if state is None:
            self._post(message.sender, Kind.RELEASE, context_id)

    def close(self) -> None:
        """Drops all contexts, and ends the waits of passes in progress."""
        with self._lock:
            states = list(self._states.values())
            self._states.clear()
        for state in states:
            state.clear()

    def _post(self, peer: MemberId, kind: Kind, context_id: int) -> None:
        data = PASS_LAYOUT.pack(context_id, 0, 0)
        self._agent.outbox.post(peer, Message(kind, extensions=[(Tag.PASS, data)]))


def checked_id(context_id: Any) -> int:
    """Returns the id of a context, as a program gives it.

    Raises:
        TypeError: it is not an int.
    """
    try:
        return operator.index(context_id)
    except TypeError:
        raise TypeError(
            f"expected context_id: int, found {type(context_id).__name__}: use the value of "
            "`with zrpc.autograd.context() as context_id`"
        ) from None


def creator_of(drawn_id: int) -> MemberId:
    """Returns the member that has drawn the id of a context or of a pass."""
    incarnation = (drawn_id >> _COUNTER_BITS) & (INCARNATIONS - 1)
    return member_id_of(drawn_id >> _RANK_SHIFT, incarnation)


def pass_name(context_id: int, pass_id: int) -> str:
    """Names a pass, or a context if the pass is 0: by the rank that has begun it, and a number."""
    drawn_id = pass_id or context_id
    number = f"{rank_of(creator_of(drawn_id))}.{drawn_id & ((1 << _COUNTER_BITS) - 1)}"
    return f"{'pass' if pass_id else 'context'} {number}"


def pass_fields(message: Message) -> tuple[int, int, int]:
    """Returns the fields of `PASS_LAYOUT` in a message about a context or a pass."""
    fields: tuple[int, int, int] = message.attachment(Tag.PASS)
    return fields
