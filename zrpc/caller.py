"""The caller's side of a worker: what becomes of a call until its answer is there."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from zrpc.calls import Follower, PendingCall, PendingCalls, name_of
from zrpc.cancel_scope import current_scope
from zrpc.codec import NONE, Codec
from zrpc.current import has_shut_down
from zrpc.errors import WorkerDied
from zrpc.event_loop import in_event_loop
from zrpc.exhaustion import advice
from zrpc.futures import Future
from zrpc.interrupts import hold_interrupts, release_interrupts
from zrpc.membership import Membership
from zrpc.options import ZmqRpcBackendOptions, checked_timeout, no_timeout
from zrpc.outbox import Outbox
from zrpc.pool import in_handler
from zrpc.window import Window
from zrpc.wire.exceptions import load_exception
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind
from zrpc.worker_info import WorkerInfo

__all__ = ["UNSET_RPC_TIMEOUT", "Caller"]

UNSET_RPC_TIMEOUT = -1.0

# Calls that wait where too much is under way to the callee.
_METERED = frozenset((Kind.CALL, Kind.REMOTE, Kind.METHOD))


class Caller:
    """Makes the calls of one worker. All methods may be called from any thread.

    Args:
        membership: the worker's.
        codec: packs requests, and unpacks answers.
        outbox: sends requests.
        options: for the time-out, and what may be under way.
        receive: receives until a gate opens, or a deadline passes, where the present thread can.
        complete: has a future completed for which no thread waits.
        submit: has a call sent by another thread.
        why_gone: for error messages, why a peer is gone.

    Attributes:
        calls: those that wait for answers.
        window: what is under way to each callee.
        rpc_timeout: the default timeout of a call, in seconds; 0 means none.
    """

    def __init__(
        self,
        membership: Membership,
        codec: Codec,
        outbox: Outbox,
        options: ZmqRpcBackendOptions,
        *,
        receive: Callable[[threading.Lock, float], None],
        complete: Callable[[Callable[[], None]], None],
        submit: Callable[[Callable[[], None]], None],
        why_gone: Callable[[int], str],
    ) -> None:
        self._membership = membership
        self._codec = codec
        self._outbox = outbox
        self._receive = receive
        self._complete = complete
        self._submit = submit
        self._why_gone = why_gone
        self.window = Window(options.max_bytes_in_flight)
        self.calls = PendingCalls(self._receive_answer, self.window.leave, self._tell_cancelled)
        self.rpc_timeout = options.rpc_timeout
        self._decode = self.decode  # bound once, for all futures

    def timeout(self, seconds: float) -> float:
        """How long a wait may be: so many seconds, 0 for ever; the default where negative."""
        try:
            return self.rpc_timeout if seconds < 0 else checked_timeout("timeout", seconds)
        except TypeError:
            raise no_timeout("timeout", seconds) from None

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
        call, message = self._prepare(to, kind, obj, timeout, extension, holds, died)
        self._send_call(call, message)
        try:
            call.wait()
        except BaseException:
            self._abandon(call)
            raise
        return self.decode(call.claim())

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
            timeout: seconds; 0 for none, negative for the default.
            extension: a tag and bytes that travel outside of the pickle.
            holds: lives until the call is settled.
            died: the error where the peer dies first.

        Raises:
            SerializationError: ``obj`` can't be pickled.
            NotInitializedError: the agent is closed.
        """
        call, message = self._prepare(to, kind, obj, timeout, extension, holds, died)
        future: Future[Any] = Future.of_call(call, self._decode, self._complete)
        self._send_call(call, message)
        return future

    def call_notify(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: float,
        extension: tuple[int, bytes],
        follower: Follower,
    ) -> None:
        """Sends a request; ``follower`` is told when there is an outcome.

        That is in the I/O thread or in the one that calls this.
        """
        call, message = self._prepare(to, kind, obj, timeout, extension)
        call.follower = follower
        self._send_call(call, message)

    def _prepare(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: float,
        extension: tuple[int, bytes] | None,
        holds: Any = None,
        died: type[WorkerDied] = WorkerDied,
    ) -> tuple[PendingCall, Message]:
        if self._outbox.closed:
            raise has_shut_down()
        timeout = self.timeout(timeout)
        message = Message(kind)
        peer = to.number
        encoder = self._codec.encoder(peer)
        encoder.pack(obj, message)
        if extension is not None:
            message.extensions = [*message.extensions, extension]
        scope = current_scope()
        if scope is not None:
            timeout = scope.bounded(timeout)
        message.deadline = timeout
        call = self.calls.new(peer, timeout, holds, died)
        call.kind, call.what = kind, name_of(obj)
        message.call_id = call.call_id
        if encoder.undoable:
            call.undo = encoder.abort
        return call, message

    def _send_call(self, call: PendingCall, message: Message) -> None:
        later = False
        try:
            self.calls.enter(call)
            scope = current_scope()
            # The value of an RRef may be waited for by others than this handler.
            if scope is not None and message.kind != Kind.REMOTE:
                scope.adopt(call)
            later = self._send_entered(call, message)
        except BaseException:  # Ctrl-C: nobody will ask for the outcome
            self._abandon(call)
            raise
        finally:
            if not later:
                self._undo_unsent(call)

    def _abandon(self, call: PendingCall) -> None:
        """The thread that made a call is interrupted, and does not wait for it any more."""
        held = hold_interrupts()  # it may not be taken from the table and then not be settled
        try:
            call.cancel()
        finally:
            if held:
                release_interrupts()

    def _tell_cancelled(self, call: PendingCall) -> None:
        """Tells the callee that nobody waits for its answer any more; in any thread."""
        if not self._outbox.closed:
            self._outbox.post(call.peer, Message(Kind.CANCEL, call.call_id))

    def _send_entered(self, call: PendingCall, message: Message) -> bool:
        """Sends a call of the table; whether that is done later, in another thread."""
        admitted: bool | None = True
        if message.kind in _METERED and call.peer not in self._membership.lost:
            admitted = self._enter_window(call, message)
        if admitted:
            self._send_admitted(call, message)
        return admitted is None

    def _enter_window(self, call: PendingCall, message: Message) -> bool | None:
        """Waits for room; False where the call is settled, None where it is sent later."""
        if not in_event_loop():
            thread = threading.get_ident() if in_handler() else None
            return self.window.enter(call, thread, message.nbytes)
        # This thread must not wait: it would hold up all coroutines.
        caller = id(asyncio.current_task()) if current_scope() is not None else None
        go = partial(self._submit, partial(self._send_later, call, message))
        size = message.nbytes
        if not self.window.enter_now(call, caller, size):
            # The caller may change its tensors meanwhile.
            message.copy_buffers()
            if not self.window.enter_later(call, caller, size, go):
                return None
        return not call.settled

    def _send_later(self, call: PendingCall, message: Message) -> None:
        """A call from an event loop has waited for room, or was settled meanwhile."""
        try:
            if not call.settled:
                self._send_admitted(call, message)
        except Exception as error:
            call.give_up(error)
        finally:
            self._undo_unsent(call)

    def undo_unread(self, call_id: int) -> None:
        """Undoes what was done for the message of a call, of which the callee has read nothing."""
        call = self.calls.get(call_id)
        if call is not None:
            call.take_back()

    def _undo_unsent(self, call: PendingCall) -> None:
        # What went to a worker that is lost is the layers' business.
        if not call.sent and call.peer not in self._membership.lost:
            call.take_back()

    def _send_admitted(self, call: PendingCall, message: Message) -> None:
        lost = self._membership.lost
        if call.peer not in lost:
            if call.delayed and call.timeout:
                message.deadline = call.remaining()
            call.sent = True
            if call.settled:
                call.sent = False  # cancelled, by a thread that looks at `sent` afterwards
                return
            try:
                self._outbox.send(call.peer, message, partial(self._fail_unsent, call))
                call.left = True
            except (zmq.ZMQError, MemoryError) as error:
                exhausted = _exhausted(error)
                if exhausted is not None:
                    call.sent = False
                    raise exhausted from error
                # The peer's mailbox is closed when it is lost, and all are at the end.
                if call.peer not in lost:
                    self.calls.fail(lambda _: has_shut_down())
        if call.peer in lost:
            self.calls.fail(self.died, call.peer)

    def _fail_unsent(self, call: PendingCall, error: Exception) -> None:
        """The I/O thread could not send a call for another thread, which may wait for it."""
        reason = _exhausted(error) or error
        if reason is error and isinstance(error, zmq.ZMQError):
            reason = self.died(call) if call.peer in self._membership.lost else has_shut_down()
        call.sent = False
        call.give_up(reason)
        self._undo_unsent(call)

    def _receive_answer(self, call: PendingCall) -> None:
        """Receives until a call is settled, in the thread that waits for it; see `Agent.receive`.

        A handler does not. It may be called back meanwhile, and another thread that receives, and
        that this one wakes while its call is on its way, runs such a call itself.
        For others the I/O thread rests from now on, see `Agent._on_answer`.
        """
        if not in_handler() and call.peer != self._membership.rank:
            call.received_here = True
            self._receive(call.gate, call.deadline)

    def settle(self, answer: Message) -> PendingCall | None:
        """Gives an answer to the call that waits for it; None where none does any more."""
        call = self.calls.pop(answer.call_id)
        if call is not None:
            call.settle(answer)
        return call

    def decode(self, outcome: Any) -> Any:
        """The value of a call's outcome, or its error, raised; the same each time."""
        if isinstance(outcome, Exception):
            raise type(outcome)(*outcome.args)
        if outcome.kind == Kind.ERROR:
            raise load_exception(outcome.body)
        return None if outcome.body == NONE else self._codec.unpack(outcome)

    def died(self, call: PendingCall) -> WorkerDied:
        """The error of a call whose callee is gone."""
        return call.died(
            f"{self._why_gone(call.peer)}; calls to it fail, unless another one is started under "
            "its name and joins the mesh"
        )


def _exhausted(error: Exception) -> Exception | None:
    """What to tell the caller where there was no descriptor or memory; None for other errors."""
    hint = advice(error)
    if hint is None:
        return None
    number = getattr(error, "errno", errno.ENOMEM)
    if number == errno.ENOMEM:
        return MemoryError(f"the call can't be sent: {hint}")
    return OSError(number, f"the call can't be sent: {hint}")
