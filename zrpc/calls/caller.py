"""The caller's side of a worker: a call from its function's arguments to its answer's value.

`Caller.call` reads from top to bottom: pack, submit, wait, decode. To submit a call is to enter it
into the table of calls in flight, to wait there for room, and to send it. All runs in the thread
that calls, also the receiving if no other thread does. From packing to wait, it holds back signals.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import zmq
from torch.autograd import profiler
from typing_extensions import Unpack

from zrpc.calls.answers import Receiver, UnreadAnswers, settle_with_receipt
from zrpc.calls.call_options import CallOptions, Order
from zrpc.calls.callees import Callees
from zrpc.calls.cancel_scope import current_scope
from zrpc.calls.codec import NONE, Codec, error_in
from zrpc.calls.finalizer_calls import call_soon
from zrpc.calls.function_names import name_of
from zrpc.calls.future import Future
from zrpc.calls.last_calls import LastCalls
from zrpc.calls.observation import CallObservation
from zrpc.calls.open_telemetry import API
from zrpc.calls.outbox import Outbox, exhausted
from zrpc.calls.pending_call import DEFAULT_LIMIT, OWN_LIMIT, Follower, Limit, PendingCall, State
from zrpc.calls.pending_calls import PendingCalls
from zrpc.calls.recorder import Recorder
from zrpc.calls.unmapped import name_argument
from zrpc.constants import UNSET_RPC_TIMEOUT, Seconds
from zrpc.errors import (
    RpcError,
    WorkerDied,
    deadline_passed,
    has_shut_down,
    raised_again,
)
from zrpc.membership.view import Membership
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import ZmqRpcBackendOptions, call_timeout
from zrpc.runtime import garbage_collector
from zrpc.runtime.event_loop import running_loop
from zrpc.runtime.interrupts import hold_interrupts, release_interrupts, uninterrupted
from zrpc.runtime.thread_pool import current_pool, pass_gate
from zrpc.wire.devices import DeviceMap
from zrpc.wire.kind import METERED, Kind, Tag
from zrpc.wire.message import Extensions, Message

T = TypeVar("T")

# Looked up once, since each call needs them: an enum takes longer for that than a module.
_QUEUED, _SENDING, _REMOTE, _ERROR = State.QUEUED, State.SENDING, Kind.REMOTE, Kind.ERROR


@dataclass(eq=False)
class Caller:
    """Makes the calls of one worker. Any thread may call its methods.

    Args:
        codec: packs requests, and unpacks answers.
        options: for the timeout, and the limit of bytes in flight.
        submit_job: has a call sent by another thread.

    Attributes:
        calls, unread: those that wait for answers; what fails those whose answers can't be read.
        complete, in_next_turn: see `Receiver`.
        rpc_timeout: the default timeout of a call, in seconds; 0 means none.
        recorder: records the calls while a trace is on; else None.
        last_calls: decides which may begin, once all workers have called ``shutdown``.
    """

    _membership: Membership
    _codec: Codec
    _outbox: Outbox
    _options: ZmqRpcBackendOptions
    _receiver: Receiver
    _submit_job: Callable[[Callable[[], None]], None]
    _callees: Callees

    def __post_init__(self) -> None:
        self._own_id = self._membership.own_id
        self.complete, self.in_next_turn = self._receiver.complete, self._receiver.in_next_turn
        limit = self._options.max_bytes_in_flight
        self.calls = PendingCalls(self._callees, limit, self.in_next_turn)
        self.unread = UnreadAnswers(self.calls)
        self.rpc_timeout = self._options.rpc_timeout
        self.recorder: Recorder | None = None
        self.last_calls: LastCalls | None = None

    def timeout(self, seconds: Seconds) -> float:
        """Returns how long a wait may take, in seconds: 0 for no limit; see `time_limit`.

        Raises:
            RpcTimeoutError: its deadline has passed.
        """
        limit = self.time_limit(seconds)
        if limit < 0:
            raise deadline_passed("the request", limit)
        return limit

    def time_limit(self, seconds: Seconds) -> float:
        """Returns how long a call may take, in seconds: the default for -1, 0 for no limit.

        It is below 0 if the deadline has passed.
        """
        return self.rpc_timeout if seconds == UNSET_RPC_TIMEOUT else call_timeout(seconds)

    # -- a call, from top to bottom --------------------------------------------------------

    def call(
        self, to: WorkerInfo, kind: Kind, obj: Any, timeout: Seconds, **options: Unpack[CallOptions]
    ) -> Any:
        """Sends a request and waits for the answer's value; see `call_async`."""
        if garbage_collector.running and garbage_collector.interrupts_zrpc():
            return self.call_async(to, kind, obj, timeout, **options).wait()
        call, message = self._pack(to, kind, obj, timeout, waits=True, **options)
        taken = held = False
        try:
            try:
                self._submit(call, message)
                self.wait(call)
            except BaseException:
                self._give_up(call)
                raise
            finally:
                release_interrupts()
            value = self.decode(call.outcome.pop())
            taken = True
            return value
        except RpcError:  # a value that can't be unpickled here is taken nevertheless
            taken = True
            raise
        finally:
            try:
                if call.taking is not None:
                    hold_interrupts()
                    held = True
            finally:
                if call.taking is not None:
                    # Unless a handler has raised just before: then the value is lost with that.
                    call.taking.end(taken and held)
                if held:
                    release_interrupts()
            if call.observation is not None:
                call.observation.end()

    def call_async(
        self, to: WorkerInfo, kind: Kind, obj: Any, timeout: Seconds, **options: Unpack[CallOptions]
    ) -> Future[Any]:
        """Sends a request and returns a future of the answer's value.

        Args:
            to: a member.
            kind: what kind of request.
            obj: the body, to be pickled.
            timeout: seconds; 0 for no limit, -1 for the default. Any other negative number is a
                deadline that has passed: the call fails at once, and nothing is sent.
            **options: see `CallOptions`.

        Raises:
            SerializationError: ``obj`` can't be pickled.
            NotInitializedError: the agent is closed.
        """
        if garbage_collector.running and garbage_collector.interrupts_zrpc():
            go = partial(self.call_async, to, kind, obj, timeout, **options)
            return call_soon(go, self.in_next_turn, self._submit_job)
        call, message = self._pack(to, kind, obj, timeout, **options)
        return self._begin(call, message, partial(Future.of_call, call, self))

    def call_notify(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: Seconds,
        follower: Follower,
        undo: Callable[[], None] | None = None,
        **options: Unpack[CallOptions],
    ) -> None:
        """Sends a request; ``follower`` is told of the outcome, in the I/O thread or this one.

        ``undo`` is called if the request is not sent after all, or the callee has read nothing of
        it; maybe after that. The other arguments are those of `call_async`.
        """
        call, message = self._pack(to, kind, obj, timeout, **options)

        def follow() -> None:
            call.follower = follower
            if undo is not None:
                call.undo = undo if call.undo is None else partial(_call_both, call.undo, undo)

        self._begin(call, message, follow)

    def call_in_parts(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: Seconds,
        follow: Callable[[PendingCall, Message], T],
        **options: Unpack[CallOptions],
    ) -> T:
        """Sends a request whose answer is preceded by other messages, and returns what takes them.

        That is made by ``follow(call, message)``, before the message is sent. The other arguments
        are those of `call_async`.

        Raises:
            RpcError: in a finalizer that has interrupted zrpc, see `garbage_collector`.
        """
        if garbage_collector.running:
            garbage_collector.check("open a stream")
        call, message = self._pack(to, kind, obj, timeout, **options)
        return self._begin(call, message, partial(follow, call, message))

    def _begin(self, call: PendingCall, message: Message, follow: Callable[[], T]) -> T:
        """Submits a call that no thread waits for yet; returns what ``follow()`` does."""
        try:
            try:
                try:
                    result = follow()
                    self._submit(call, message)
                finally:
                    release_interrupts()
            finally:
                if call.observation is not None:
                    call.observation.end()
            return result
        except BaseException:  # Ctrl-C: nobody will ask for the outcome
            self._give_up(call)
            raise

    def _give_up(self, call: PendingCall) -> None:
        """Cancels a call; undoes what was done for its message, if no thread sends it."""
        call.cancel()
        if not call.left and (call.room is None or call.room.thread):
            self._undo(call)

    def _pack(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: Seconds,
        *,
        waits: bool = False,
        extension: tuple[int, bytes] | None = None,
        holds: Any = None,
        died: type[WorkerDied] = WorkerDied,
        order: Order | None = None,
        more: Extensions = (),
        devices: DeviceMap | None = None,
    ) -> tuple[PendingCall, Message]:
        """Makes a call, and the message of its request; then holds back signal handlers."""
        if self._outbox.closed:
            raise has_shut_down()
        limit: Limit = OWN_LIMIT
        if timeout == UNSET_RPC_TIMEOUT:
            limit, timeout = DEFAULT_LIMIT, self.rpc_timeout
        else:
            timeout = call_timeout(timeout)
        message = Message(kind)
        hops = () if self.last_calls is None else self.last_calls.admit(message)
        observation = None
        if self.recorder is not None or profiler._is_profiler_enabled or API in sys.modules:
            ends = self._membership.info.name, to.name
            observation = CallObservation(self.recorder, kind, obj, ends, waits, self.complete)
        encoder = self._codec.encoder(to.member_id, devices)
        try:
            encoder.pack(obj, message)
            if extension is not None or hops:
                first = () if extension is None else (extension,)
                message.extensions = [*message.extensions, *first, *more, *hops]
            scope = current_scope()
            if scope is not None and (bounded := scope.bounded(timeout)) != timeout:
                timeout, limit = bounded, scope
            call = PendingCall(self.calls, to.member_id, timeout)
            message.call_id, message.deadline = call.call_id, timeout
            call.kind, call.what, call.limit = kind, name_of(obj), limit
            call.holds, call.died, call.order = holds, died, order
            if encoder.holds:
                call.holds, encoder.holds = (holds, encoder.holds), ()
            # The value of an RRef may be waited for by others than this handler.
            if scope is not None and kind != _REMOTE:
                call.parent = scope
            call.undo = encoder.abort if encoder.to_undo else None
            if observation is not None:
                call.observation = observation
                observation.packed(call, message)
            # From here on this thread takes locks that a call in a handler would need too.
            hold_interrupts()
        except BaseException as error:  # of a signal handler, for example
            encoder.abort()
            if observation is not None:
                observation.end()
            name_argument(error, obj, partial(self._codec.encoder, to.member_id))
            raise
        return call, message

    def _submit(self, call: PendingCall, message: Message) -> None:
        """Enters a call into the table, and sends it as soon as there is room for it.

        Signal handlers are held back, except while it waits for room.
        """
        try:
            if call.order is not None:
                state = call.order.enter(self.calls, call, message)
            elif message.kind not in METERED:
                state = self.calls.enter(call)
            elif running_loop() is None:
                handler = threading.get_ident() if current_pool() is not None else None
                state = self.calls.enter(call, message.nbytes, handler)
                if state is _QUEUED:
                    state = self.calls.await_room(call)
            else:
                state = self._enter_in_loop(call, message)
        except BaseException:
            call.cancel()
            call.follower = call.holds = None  # if it is not in the table
            raise
        if state is _SENDING:
            try:
                self._send(call, message)
            except Exception:  # not the outcome: the frames of this error hold the future
                call.withdraw()
                raise
        elif state is not _QUEUED:
            self._undo(call)

    def _enter_in_loop(self, call: PendingCall, message: Message) -> State:
        """Enters a call; if there is no room, another thread sends it when there is.

        This thread must not wait: it would hold up all coroutines.
        """
        task = id(asyncio.current_task()) if current_scope() is not None else None
        state = self.calls.enter(call, message.nbytes, task)
        if state is _QUEUED:
            message.copy_buffers()  # the caller may change its tensors meanwhile
            send = partial(self._submit_job, partial(self._send_later, call, message))
            self.calls.when_room(call, send)
        return state

    def _send_later(self, call: PendingCall, message: Message) -> None:
        """Sends a call of an event loop, which has waited for room unless it was settled."""
        try:
            with uninterrupted:
                self._send(call, message)
        except Exception as error:
            call.fail(error)

    def _send(self, call: PendingCall, message: Message) -> None:
        """Sends a call for which there is room, unless it was settled meanwhile."""
        if call.room is not None and call.timeout:
            message.deadline = call.remaining()
            if not message.deadline:  # which would mean that there is none
                self.calls.expire_unsent(call)
        if call.state is not _SENDING:
            self._undo(call)
            return
        observation = call.observation
        if observation is not None:
            observation.sending()
        try:
            self._outbox.put(call.peer, message)
        except (zmq.ZMQError, MemoryError) as error:
            self._outbox.undo(call.peer, message)
            if (lack := exhausted(error)) is not None:
                self._undo(call)
                try:
                    raise lack from error
                finally:
                    del lack  # or its frames and it would keep the arguments
            # The peer's mailbox is closed when it is lost, and all are at the end.
            if call.peer not in self._membership.lost:
                self.calls.fail(lambda _: has_shut_down())
        except BaseException as error:
            self._outbox.undo(call.peer, message)
            self._undo(call)
            if not isinstance(error, Exception):  # for others, the caller of this settles the call
                call.cancel()
            raise
        call.left = True
        if observation is not None:
            observation.sent(message)

    def wait(self, call: PendingCall) -> None:
        """Waits until a call is settled; at its deadline this thread settles it.

        This thread receives the answer itself if no other thread receives. A handler does not: it
        may be called back meanwhile, and the thread that receives instead, woken while the call is
        on its way, runs such a call itself.

        If an exception (Ctrl-C) interrupts the wait, this thread is no longer one of the `waiters`.

        Raises:
            RpcError: the answer might wait for this thread.
        """
        if garbage_collector.running:
            garbage_collector.check()
        ident, gate = threading.get_ident(), call.gate
        call.waiters = (*call.waiters, ident)
        try:
            if gate.locked():
                if current_pool() is None and call.peer != self._own_id:
                    self._receiver.receive(gate, max(0.0, call.deadline - monotonic()))
                else:
                    self._receiver.hurry()
            while gate.locked() and not pass_gate(gate, call.remaining()):
                if not call.remaining():  # or its deadline was postponed meanwhile
                    call.expire()
                    # If another thread has taken the call from the table, it settles it at once.
                    pass_gate(gate)
        except BaseException:
            call.waiters = tuple(each for each in call.waiters if each != ident)
            raise

    def decode(self, outcome: Any) -> Any:
        """Returns the value of a call's outcome, or raises its error; the same each time."""
        if isinstance(outcome, Exception):
            raise raised_again(outcome)
        if outcome.kind == _ERROR:
            raise error_in(outcome)
        return None if outcome.body == NONE else self._codec.unpack(outcome)

    # -- the answer ------------------------------------------------------------------------

    def on_answer(self, answer: Message) -> None:
        """Gives an answer to the call that waits for it, if there is one. In the I/O thread."""
        if answer.attachments and (receipt := answer.attachments.get(Tag.RECEIPT)):
            settle_with_receipt(self.calls, answer, receipt)
        else:
            self.calls.settle(answer.call_id, answer)

    def describe(self, call: PendingCall) -> str:
        """Returns what a call that a future stands for is of, and to which worker."""
        verb = "rpc_async()." if call.kind == Kind.METHOD else "rpc_async "
        return f"{verb}{call.title} → {self._membership.infos[call.peer].name}"

    def _undo(self, call: PendingCall) -> None:
        # What went to a member that is lost is undone by the services.
        if call.peer not in self._membership.lost:
            call.take_back()


def _call_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()
