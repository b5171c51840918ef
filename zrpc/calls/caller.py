"""The caller's side of a worker: a call from its function's arguments to its answer's value.

`Caller.call` reads from top to bottom: pack, submit, wait, decode. To submit a call is to enter it
into the table of calls in flight, to wait until flow control admits it, and to issue it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import zmq

from zrpc.calls.answer_error import error_in
from zrpc.calls.cancel_scope import current_scope
from zrpc.calls.codec import NONE, Codec
from zrpc.calls.finalizer_calls import NextTurn, call_soon
from zrpc.calls.flow_control import DELAYED, LATER, NOW, SETTLED, Admission, FlowControl, no_room
from zrpc.calls.future import Future
from zrpc.calls.last_calls import LastCalls
from zrpc.calls.open_telemetry import CallSpan, configured
from zrpc.calls.outbox import Outbox, exhausted
from zrpc.calls.pending_calls import (
    DEFAULT_LIMIT,
    OWN_LIMIT,
    Follower,
    Limit,
    PendingCall,
    PendingCalls,
    Stage,
    name_of,
)
from zrpc.calls.profiling import begin_profile, end_profile, profiler
from zrpc.calls.recorder import CallMarks, Recorder
from zrpc.calls.settling import wait_until_settled
from zrpc.errors import ProtocolError, RpcError, WorkerDied, has_shut_down, raised_again
from zrpc.membership.view import Membership
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import ZmqRpcBackendOptions, checked_timeout, is_unset
from zrpc.runtime import garbage_collector
from zrpc.runtime.event_loop import running_loop
from zrpc.runtime.interrupts import hold_interrupts, release_interrupts
from zrpc.runtime.resource_limits import advice
from zrpc.runtime.thread_pool import in_handler
from zrpc.wire.kind import METERED, Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["Caller", "Receiver"]

# Looked up once, since each call needs them: an enum takes longer for that than a module.
_NEW, _SENDING, _LEFT = Stage.NEW, Stage.SENDING, Stage.LEFT
_REMOTE, _ERROR = Kind.REMOTE, Kind.ERROR


class Receiver(NextTurn, Protocol):
    """What receives the answers; see `zrpc.agent.receiver`."""

    def receive(self, gate: threading.Lock, timeout: float) -> None:
        """Receives until a gate opens, in the thread that waits for it, if that is possible."""

    def on_answered(self, call: PendingCall) -> None:
        """Learns that a call got its answer. In the I/O thread."""

    def complete(self, job: Callable[[], None]) -> None:
        """Has a future completed that no thread waits for."""


class Caller:
    """Makes the calls of one worker. Any thread may call its methods.

    Args:
        codec: packs requests, and unpacks answers.
        outbox: sends requests.
        options: for the timeout, and the limit of bytes in flight.
        receiver: receives answers.
        submit: has a call sent by another thread.
        why_gone: for error messages, why a peer is gone.
        explain: for error messages, why a peer may not answer.

    Attributes:
        calls: those that wait for answers.
        complete, in_next_turn: see `Receiver`.
        flow_control: the bytes in flight to each callee.
        rpc_timeout: the default timeout of a call, in seconds; 0 means none.
        recorder: records the calls while a trace is on; else None.
        last_calls: decides which may begin, once all workers have called ``shutdown``.
    """

    def __init__(
        self,
        membership: Membership,
        codec: Codec,
        outbox: Outbox,
        options: ZmqRpcBackendOptions,
        receiver: Receiver,
        *,
        submit: Callable[[Callable[[], None]], None],
        why_gone: Callable[[MemberId], str],
        explain: Callable[[MemberId], str],
    ) -> None:
        self._membership = membership
        self._codec = codec
        self._outbox = outbox
        self._receiver = receiver
        self.complete, self.in_next_turn = receiver.complete, receiver.in_next_turn
        self._submit_job = submit
        self._why_gone = why_gone
        self.flow_control = flow = FlowControl(options.max_bytes_in_flight)
        self.calls = PendingCalls(
            flow.leave, self._post_cancel, explain, self._describe, flow.no_room
        )
        self.rpc_timeout = options.rpc_timeout
        self.recorder: Recorder | None = None
        self.last_calls: LastCalls | None = None

    def timeout(self, seconds: float | timedelta) -> float:
        """How long a call may take, in seconds: 0 for no limit, the default if it is below 0."""
        return self.rpc_timeout if is_unset(seconds) else checked_timeout("timeout", seconds)

    # -- a call, from top to bottom --------------------------------------------------------

    def call(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: float,
        *,
        extension: tuple[int, bytes] | None = None,
        holds: Any = None,
        died: type[WorkerDied] = WorkerDied,
    ) -> Any:
        """Sends a request and waits for the answer's value; see `call_async`."""
        if garbage_collector.ident and garbage_collector.interrupts_zrpc():
            return self.call_async(to, kind, obj, timeout, extension=extension, holds=holds).wait()
        shown = self._show(to, kind, obj, True) if profiler._is_profiler_enabled else None
        marks = None
        try:
            call, message = self._pack(to, kind, obj, timeout, extension, holds, died)
            try:
                marks = call.marks
                if marks is not None:
                    marks.waits = True
                self._submit(call, message)
                try:
                    self.wait(call)
                except BaseException:
                    call.cancel()
                    raise
            finally:
                release_interrupts()
            return self.decode(call.claim())
        finally:
            if marks is not None:
                marks.end(call, time.monotonic())
            if shown is not None:
                end_profile(shown)

    def call_async(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: float,
        *,
        extension: tuple[int, bytes] | None = None,
        holds: Any = None,
        died: type[WorkerDied] = WorkerDied,
    ) -> Future[Any]:
        """Sends a request and returns a future of the answer's value.

        Args:
            to: a member.
            kind: what kind of request.
            obj: the body, to be pickled.
            timeout: seconds; 0 for no limit, negative for the default.
            extension: a tag and bytes that travel outside of the pickle.
            holds: lives until the call is settled.
            died: the error if the peer is lost first.

        Raises:
            SerializationError: ``obj`` can't be pickled.
            NotInitializedError: the agent is closed.
        """
        if garbage_collector.ident and garbage_collector.interrupts_zrpc():
            go = partial(self.call_async, to, kind, obj, timeout, extension=extension)
            return call_soon(partial(go, holds=holds, died=died), self._receiver, self._submit_job)
        shown = self._show(to, kind, obj, False) if profiler._is_profiler_enabled else None
        try:
            call, message = self._pack(to, kind, obj, timeout, extension, holds, died)
            try:
                future: Future[Any] = Future.of_call(call, self)
                self._submit(call, message)
            finally:
                release_interrupts()
        finally:
            if shown is not None:
                end_profile(shown)
        return future

    def call_notify(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: float,
        extension: tuple[int, bytes],
        follower: Follower,
        *,
        holds: Any = None,
        undo: Callable[[], None] | None = None,
    ) -> None:
        """Sends a request; ``follower`` is told of the outcome, in the I/O thread or this one.

        ``holds`` lives until the call is settled, and ``undo`` is called if the request is not sent
        after all, or the callee has read nothing of it; maybe after that.
        """
        shown = self._show(to, kind, obj, False) if profiler._is_profiler_enabled else None
        try:
            call, message = self._pack(to, kind, obj, timeout, extension, holds)
            try:
                call.follower = follower
                if undo is not None:
                    call.undo_too(undo)
                self._submit(call, message)
            finally:
                release_interrupts()
        finally:
            if shown is not None:
                end_profile(shown)

    def _show(self, to: WorkerInfo, kind: Kind, obj: Any, waits: bool) -> Any:
        return begin_profile(kind, obj, waits, self._membership.info.name, to.name)

    def _pack(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: float,
        extension: tuple[int, bytes] | None,
        holds: Any = None,
        died: type[WorkerDied] = WorkerDied,
    ) -> tuple[PendingCall, Message]:
        """Makes a call, and the message of its request; then holds back signal handlers."""
        if self._outbox.closed:
            raise has_shut_down()
        recorder = self.recorder
        packing = 0.0 if recorder is None else time.monotonic()
        limit: Limit = OWN_LIMIT
        if is_unset(timeout):
            limit, timeout = DEFAULT_LIMIT, self.rpc_timeout
        else:
            timeout = checked_timeout("timeout", timeout)
        message = Message(kind)
        hops = () if self.last_calls is None else self.last_calls.admit(message)
        peer = to.member_id
        encoder = self._codec.encoder(peer)
        try:
            encoder.pack(obj, message)
            if extension is not None or hops:
                more = () if extension is None else (extension,)
                message.extensions = [*message.extensions, *more, *hops]
            scope = current_scope()
            if scope is not None and (bounded := scope.bounded(timeout)) != timeout:
                timeout, limit = bounded, scope
            message.deadline = timeout
            call = self.calls.new(peer, timeout, holds, died)
            call.limit, call.kind, call.what = limit, kind, name_of(obj)
            message.call_id = call.call_id
            if encoder.undoable:
                call.undo = encoder.abort
            if recorder is not None:
                call.marks = CallMarks(recorder, packing, message.nbytes)
            # From here on this thread takes locks that a call in a handler would need too.
            hold_interrupts()
        except BaseException:  # of a signal handler, for example
            encoder.abort()
            raise
        return call, message

    def _submit(self, call: PendingCall, message: Message) -> None:
        """Enters a call into the table, and sends it as soon as there is room for it.

        Signal handlers are held back, except while it waits for room.
        """
        admission = SETTLED
        try:
            if configured() and message.kind in METERED:
                to = self._membership.infos[call.peer].name
                call.span = CallSpan(call, message, to, self.complete)
            self.calls.enter(call)
            # After that: an agent that closes does this the other way round.
            if self._outbox.closed:
                raise has_shut_down()
            scope = current_scope()
            # The value of an RRef may be waited for by others than this handler.
            if scope is not None and message.kind != _REMOTE:
                scope.adopt(call)
            admission = self._admit(call, message)
            if admission is NOW or admission is DELAYED:
                self._issue(call, message, admission is DELAYED)
        except BaseException:  # Ctrl-C: nobody will ask for the outcome
            call.cancel()
            raise
        finally:
            if call.stage is _NEW and admission is not LATER:
                self._undo(call)

    def _admit(self, call: PendingCall, message: Message) -> Admission:
        """Waits until flow control has room for a call, or has it sent when there is."""
        if message.kind not in METERED or call.peer in self._membership.lost:
            return NOW
        if running_loop() is None:
            thread = threading.get_ident() if in_handler() else None
            return self.flow_control.enter(call, thread, message.nbytes)
        # This thread must not wait: it would hold up all coroutines.
        task = id(asyncio.current_task()) if current_scope() is not None else None
        if self.flow_control.enter_now(call, task, message.nbytes):
            return SETTLED if call.settled else NOW
        message.copy_buffers()  # the caller may change its tensors meanwhile
        go = partial(self._submit_job, partial(self._issue_later, call, message))
        return self.flow_control.enter_later(call, task, message.nbytes, go)

    def _issue_later(self, call: PendingCall, message: Message) -> None:
        """Sends a call from an event loop, which has waited for room unless it was settled."""
        try:
            if not call.settled:
                self._issue(call, message, delayed=True)
        except Exception as error:
            call.fail(error)
        finally:
            if call.stage is _NEW:
                self._undo(call)

    def _issue(self, call: PendingCall, message: Message, delayed: bool) -> None:
        """Sends a call for which there is room; ``delayed`` if it has waited for that."""
        if delayed and call.timeout:
            message.deadline = call.remaining()
            if not message.deadline:  # which would mean that there is none
                call.fail(no_room(call, self.flow_control.limit))
                return
        lost = self._membership.lost
        if call.peer not in lost:
            call.stage = _SENDING
            marks = call.marks
            if marks is not None:
                marks.sending = time.monotonic()
            if call.settled:
                call.stage = _NEW  # cancelled, by a thread that looks at the stage afterwards
                return
            try:
                self._outbox.request(call.peer, message)
                call.stage = _LEFT
                if marks is not None:
                    marks.on_sent(message)
            except (zmq.ZMQError, MemoryError) as error:
                lack = exhausted(error)
                if lack is not None:
                    call.stage = _NEW
                    raise lack from error
                # The peer's mailbox is closed when it is lost, and all are at the end.
                if call.peer not in lost:
                    self.calls.fail(lambda _: has_shut_down())
        if call.peer in lost:
            self.calls.fail(self.died, call.peer)

    def wait(self, call: PendingCall) -> None:
        """Waits until a call is settled; at its deadline this thread settles it.

        This thread receives the answer itself if no other thread receives just now. A handler does
        not: it may be called back meanwhile, and the thread that receives instead, woken while the
        call is on its way, runs such a call itself.
        """
        here = not in_handler() and call.peer != self._membership.own_id
        wait_until_settled(call, self._receiver.receive if here else None)

    def decode(self, outcome: Any) -> Any:
        """Returns the value of a call's outcome, or raises its error; the same each time."""
        if isinstance(outcome, Exception):
            raise raised_again(outcome)
        if outcome.kind == _ERROR:
            raise error_in(outcome)
        return None if outcome.body == NONE else self._codec.unpack(outcome)

    # -- what comes instead of the answer, or on the way -----------------------------------

    def on_answer(self, answer: Message) -> None:
        """Gives an answer to the call that waits for it, if there is one. In the I/O thread."""
        if (call := self.calls.pop(answer.call_id)) is not None:
            call.settle(answer)
            self._receiver.on_answered(call)

    def on_unreadable(self, answer: Message, error: Exception) -> bool:
        """Fails the call of an answer that can't be read; True if the error needs no report.

        In the I/O thread.
        """
        call = self.calls.pop(answer.call_id)
        if call is None:
            return False
        # A segment of shared memory that no longer exists has gone with its owner.
        gone = isinstance(error, FileNotFoundError)
        hint = advice(error)
        why = f"{error}; {hint}" if hint else error
        unread = ProtocolError(f"the answer can't be read: {why}")
        outcome: RpcError = self.died(call) if gone else unread
        outcome.executed = True
        call.settle(outcome)
        return gone

    def on_lost(self, answer: Message, error: Exception) -> None:
        """Fails the call of an answer of which only the header has come. In the I/O thread."""
        if (call := self.calls.pop(answer.call_id)) is not None:
            call.settle(error)

    def on_unread(self, answer: Message, _data: bytes) -> None:
        """Undoes what was done for the message of a call: the callee has read nothing of it."""
        call = self.calls.get(answer.call_id)
        if call is not None:
            call.take_back()

    def died(self, call: PendingCall) -> WorkerDied:
        """Makes the error of a call whose callee is gone."""
        return call.died(
            f"{self._why_gone(call.peer)}; calls to it fail, unless another one is started under "
            "its name and joins the mesh"
        )

    def _describe(self, peer: MemberId) -> str:
        info = self._membership.infos[peer]
        return f"{info.name} (rank {info.rank})"

    def _undo(self, call: PendingCall) -> None:
        # What went to a member that is lost is undone by the services.
        if call.peer not in self._membership.lost:
            call.take_back()

    def _post_cancel(self, call: PendingCall) -> None:
        """Tells the callee that the caller no longer waits for its answer; in any thread."""
        if not self._outbox.closed:
            self._outbox.post(call.peer, Message(Kind.CANCEL, call.call_id))
