"""One member of a mesh: it sends calls, receives them, and has them run.

Threads. Any thread sends, directly, through the mailbox of the peer. One of the two I/O
threads receives: it reads headers, settles calls, and hands requests to the pool; meanwhile it
neither unpickles, nor runs what a user wrote, nor waits for a peer. Handlers run in the pool, or
where they are quick in the I/O thread between two messages, watched by the other (see
`zrpc.io_threads`). A future for which no thread waits is completed likewise, by a second pool of
one thread. A thread that makes one call after the other receives the answers itself.

"The I/O thread" is, here and in the layers, the one that receives, whichever that is.

Upper layers (RRef) plug in from above, as `Layer` objects: they register handlers for
messages of their own kinds, and are told when a peer is lost and when the agent closes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import pickle
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import zmq
from torch.distributed import Store

from zrpc.calls import NEVER, PendingCall, PendingCalls, name_of
from zrpc.cancel_scope import CancelScope, current_scope
from zrpc.card import Card
from zrpc.current import as_current, context_of, has_shut_down
from zrpc.errors import (
    ProtocolError,
    RpcCancelledError,
    RpcError,
    RpcTimeoutError,
    WorkerDied,
)
from zrpc.event_loop import EventLoop, in_event_loop
from zrpc.execution import Execution, ExecutionWithin, Outlet
from zrpc.exhaustion import advice, out_of_descriptors
from zrpc.failure_detector import Loss, Reason
from zrpc.futures import Future
from zrpc.graceful_shutdown import GracefulShutdown
from zrpc.hooks import Hooks
from zrpc.interrupts import hold_interrupts, release_interrupts
from zrpc.io_threads import LONGEST_SITTING, IoThreads
from zrpc.leaving import LeavingAlone
from zrpc.malloc import keep_freed_memory
from zrpc.membership import Membership
from zrpc.options import ZmqRpcBackendOptions, checked_timeout
from zrpc.outbox import Outbox
from zrpc.pool import WorkerPool, in_handler, in_pool
from zrpc.requests import Requests
from zrpc.spin import Spin
from zrpc.switch_interval import SwitchInterval
from zrpc.termination import TerminationMessage
from zrpc.transport.chunks import Assembler, is_chunk
from zrpc.transport.inbox import OutOfMemory
from zrpc.transport.network import Network
from zrpc.watch import Watch
from zrpc.window import Window
from zrpc.wire.exceptions import dump_exception, load_exception
from zrpc.wire.header import Message, parse
from zrpc.wire.kind import REQUESTS, Kind
from zrpc.wire.pickling import Decoder, Encoder
from zrpc.worker_info import WorkerInfo, rank_of

__all__ = ["UNSET_RPC_TIMEOUT", "Agent", "Layer"]

logger = logging.getLogger(__name__)

UNSET_RPC_TIMEOUT = -1.0

# How often the I/O thread looks after deadlines, peers and threads while nothing arrives, in
# seconds; the second number is for an agent that is shutting down.
_TICK = 0.1
_TICK_AT_SHUTDOWN = 0.005
# How long a shutdown waits for its own threads, and for queued messages to leave, in seconds.
_JOIN_TIMEOUT = 5.0
# How long a second shutdown waits for the first one to end.
_END_TIMEOUT = 10.0
# How long one that isn't graceful waits for handlers that still run.
_HANDLER_TIMEOUT = 1.0
_LINGER = 2.0
_LINGER_NOT_GRACEFUL = 0.1

# Calls that wait where too much is under way to the callee.
_METERED = frozenset((Kind.CALL, Kind.REMOTE, Kind.METHOD))

# Messages that a shutdown does not count; they are sent with counted=False.
_UNCOUNTED = frozenset(
    (Kind.TERMINATION, Kind.SEGMENT, Kind.LEAVE, Kind.BUSY, Kind.INSPECT, Kind.SNAPSHOT)
)
# The body of LEAVE to a worker that was given up, and is heard again; how often to send it, in
# seconds.
_GAVE_UP = b"gave up"
# That of a worker with nothing left to do: how many messages it has sent.
_SENT = struct.Struct("<Q")
_TELL_EVERY = 1.0

# So many messages that are there already are dealt with in one turn.
_MOST_AT_ONCE = 64
# The body of an answer without a value, the most common one.
_NONE = pickle.dumps(None, pickle.HIGHEST_PROTOCOL)

Handler = Callable[[Message], None]
Scope = Callable[[Message], AbstractContextManager[Any]]


class Layer(Protocol):
    """Something that plugs into an agent from above."""

    def lose(self, rank: int) -> None:
        """A peer is gone. Called in the I/O thread."""

    def quiet(self) -> bool:
        """Whether the layer has nothing under way. Called in the I/O thread."""

    def close(self) -> None:
        """The agent closes; nothing can be sent any more."""


L = TypeVar("L")


class Agent:
    """One member of a mesh. `join_mesh` makes one; several may live in one process.

    All methods may be called from any thread unless they say otherwise.

    Attributes:
        worker_info: this worker's name and rank.
        membership: all workers.
        rpc_timeout: the default timeout of a call, in seconds; 0 means none.
        shared_memory: the most bytes of shared memory for what this worker sends.
        warn_after: after how many seconds a call that waits is named in a warning; 0 for never.
        lost: called for each worker that is gone.
        joined: called for each other worker of the mesh.
        context: of the threads that run handlers; `current_agent` is this one there.
        pool: runs handlers.
        outbox: sends messages.
        closed: whether this agent has shut down, or is about to.
    """

    def __init__(
        self,
        network: Network,
        membership: Membership,
        options: ZmqRpcBackendOptions,
        store: Store,
        elastic: bool = False,
    ) -> None:
        self.membership = membership
        self.worker_info = membership.info
        self.rpc_timeout = options.rpc_timeout
        self.layers: list[Layer] = []
        # Whether a message that is packed now, which may answer a request, is within a context
        # of autograd; if so, what layers do to it, see Encoder.
        self.in_context: Callable[[Message | None], bool] = lambda _: False
        self.finishers: list[Callable[[Encoder], None]] = []
        # By the tag of an attachment: what a layer does to a message with one that has come,
        # see Decoder, and the scope that it gives to the handler of such a request.
        self.openers: dict[int, Callable[[Decoder], None]] = {}
        self.scopes: dict[int, Scope] = {}
        # Layers that have something to do after every turn of the I/O thread, or now and then.
        self.flushers: list[Callable[[], None]] = []
        self.tickers: list[Callable[[], None]] = [self._drop_abandoned]
        self.shared_memory = options.shared_memory
        self.warn_after = options.warn_after
        self._network = network
        # Rank 0 may host the store, and the others must be able to finish their start.
        self._store: Store | None = store
        self._window = Window(options.max_bytes_in_flight)
        self._assembler = Assembler()  # of the I/O thread
        self._calls = PendingCalls(self._receive_answer, self._window.leave, self._tell_cancelled)
        self._received = dict.fromkeys(membership.infos, 0)
        self._watch = Watch(network, membership, options.heartbeat_timeout, self._received)
        self._told_to_leave: dict[int, float] = {}
        self._executing = Requests()
        self.outbox = Outbox(network, membership, self.in_io_thread)
        self.tickers.append(self.outbox.send_again)
        self._handlers: dict[int, Handler] = {
            Kind.CALL: self._on_call,
            Kind.RESULT: self._on_answer,
            Kind.ERROR: self._on_answer,
            Kind.CANCEL: self._on_cancel,
            Kind.TERMINATION: self._on_termination,
            Kind.LEAVE: self._on_leave,
        }
        self._extension_handlers: dict[int, Callable[[Message, bytes], Any]] = {}
        self.context = context_of(self)
        name = f"zrpc-{self.worker_info.name}"
        self.pool = WorkerPool(options.num_worker_threads, f"{name}-worker", self.context)
        self._completions = WorkerPool(1, f"{name}-completion", self.context)
        self.lost = Hooks(self._completions.submit)
        self.joined = Hooks(self._completions.submit)
        for info in membership.infos.values():
            if info != self.worker_info:
                self.joined.tell(info)
        self._loop = EventLoop(f"{name}-asyncio", self.context)
        self._io = IoThreads(self.context, f"{name}-io", self._lead, network.wake)
        self._switch_interval = SwitchInterval(options.switch_interval)
        self._next_tick = 0.0
        # Of the thread that leads, by all messages; of one that sits for it, by its answers.
        self._spin_of_leader = Spin()
        self._spin_of_sitter = Spin()
        # Whether a handler is to run after the present turn, in its thread.
        self._handler_taken = False
        # What other threads want done in the I/O thread.
        self._errands: deque[Callable[[], None]] = deque()
        self._shutdown: GracefulShutdown | LeavingAlone = LeavingAlone(self._under_way)
        if not elastic:
            self._shutdown = GracefulShutdown(membership, self._post_termination)
        # Guards the change to closed.
        self._closing_lock = threading.Lock()
        self.closed = False
        self._closer = 0  # the ident of the thread that closes
        self._ended = threading.Event()  # and has

    def serve(self, layers: Sequence[Callable[[Agent], Layer]]) -> None:
        """Begins to read messages, with these layers plugged in. To be called once.

        Args:
            layers: plug a layer in, each on top of those before it.
        """
        for plug_in in layers:
            self.layers.append(plug_in(self))
        # Before the threads start: one of them may close this agent at once.
        self._switch_interval.ask()
        keep_freed_memory()
        self._io.start()

    def layer(self, kind: type[L]) -> L:
        """The layer of this type.

        Raises:
            RpcError: there is none.
        """
        for layer in self.layers:
            if isinstance(layer, kind):
                return layer
        raise RpcError(f"the agent of {self.worker_info} was started without a {kind.__name__}")

    def as_current(self) -> AbstractContextManager[Agent]:
        """Makes this the agent of `zrpc.rpc_sync` and its like, in the present context."""
        return as_current(self)

    # -- what is under way ---------------------------------------------------------------

    @property
    def calls(self) -> PendingCalls:
        """The calls of this worker that wait for answers."""
        return self._calls

    @property
    def event_loop(self) -> EventLoop:
        """What runs the ``async def`` handlers."""
        return self._loop

    def requests(self) -> list[Message]:
        """The requests that came in and are not answered yet."""
        return self._executing.all()

    # -- plugging in ---------------------------------------------------------------------

    def register(self, kind: Kind, handler: Handler) -> None:
        """Has messages of ``kind`` given to ``handler``, in the I/O thread.

        The handler must neither wait nor unpickle. Before the agent serves only.
        """
        self._handlers[kind] = handler

    def register_extension(self, tag: int, handler: Callable[[Message, bytes], Any]) -> None:
        """Has extensions with ``tag`` read by ``handler(message, data)``, in the I/O thread.

        What it returns is ``message.attachments[tag]``. Before the agent serves only.
        """
        self._extension_handlers[tag] = handler

    # -- sending -------------------------------------------------------------------------

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
        return self._decode(call.claim())

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
        future: Future[Any] = Future.of_call(call, self._decode, self._complete_soon)
        self._send_call(call, message)
        return future

    def call_notify(
        self,
        to: WorkerInfo,
        kind: Kind,
        obj: Any,
        timeout: float,
        extension: tuple[int, bytes],
        on_settled: Callable[[PendingCall], None],
    ) -> None:
        """Sends a request; ``on_settled(call)`` is called when there is an outcome.

        That is in the I/O thread or in the one that calls this, and must be short.
        """
        call, message = self._prepare(to, kind, obj, timeout, extension)
        call.on_settled = on_settled
        self._send_call(call, message)

    def post(self, rank: int, message: Message, counted: bool = True) -> None:
        """Sends a message that has no answer; see `Outbox.post`."""
        self.outbox.post(rank, message, counted)

    def answer(self, request: Message, value: Any) -> None:
        """Answers a request with a value, or with an error where it can't be pickled."""
        if request.scope.cancelled:  # nobody waits for it
            self._executing.end(request)
            return
        reply = Message(Kind.RESULT, request.call_id)
        encoder = None
        if value is not None or self.in_context(request):
            encoder = self.encoder(request.sender, request)
        try:
            if encoder is None:
                reply.body = _NONE
            else:
                encoder.pack(value, reply)
            self.post(request.sender, reply)
        except BaseException as error:  # SystemExit too: the caller waits for an answer
            if encoder is not None:
                encoder.abort()
            self.answer_error(request, error)
            return
        self._executing.end(request)

    def answer_error(self, request: Message, error: BaseException) -> None:
        """Answers a request with an error."""
        try:
            if request.scope is None or not request.scope.cancelled:
                same_main = self.membership.same_main(request.sender)
                body = dump_exception(error, repr(self.worker_info), same_main)
                self.post(request.sender, Message(Kind.ERROR, request.call_id, body=body))
        finally:
            self._executing.end(request)
        if out_of_descriptors(error):
            self.in_io_thread(self.outbox.send_again)  # which looks for them at once

    def encoder(self, rank: int, request: Message | None = None) -> Encoder:
        """For packing a message to ``rank``, which may be the answer to a request."""
        same_main = self.membership.same_main(rank)
        if not self.in_context(request):
            return Encoder(self, rank, same_main, request)
        in_graph = torch.is_grad_enabled()
        return Encoder(self, rank, same_main, request, self.finishers, in_graph)

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
        if self.closed:
            raise has_shut_down()
        timeout = self.rpc_timeout if timeout < 0 else checked_timeout("timeout", timeout)
        message = Message(kind)
        peer = to.number
        encoder = self.encoder(peer)
        encoder.pack(obj, message)
        if extension is not None:
            message.extensions = [*message.extensions, extension]
        scope = current_scope()
        if scope is not None:
            timeout = scope.bounded(timeout)
        message.deadline = timeout
        call = self._calls.new(peer, timeout, holds, died)
        call.kind, call.what = kind, name_of(obj)
        message.call_id = call.call_id
        if encoder.undoable:
            call.undo = encoder.abort
        return call, message

    def _send_call(self, call: PendingCall, message: Message) -> None:
        later = False
        try:
            self._calls.enter(call)
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
        if not self.closed:
            self.post(call.peer, Message(Kind.CANCEL, call.call_id))

    def _send_entered(self, call: PendingCall, message: Message) -> bool:
        """Sends a call of the table; whether that is done later, in another thread."""
        admitted: bool | None = True
        if message.kind in _METERED and call.peer not in self.membership.lost:
            admitted = self._enter_window(call, message)
        if admitted:
            self._send_admitted(call, message)
        return admitted is None

    def _enter_window(self, call: PendingCall, message: Message) -> bool | None:
        """Waits for room; False where the call is settled, None where it is sent later."""
        if not in_event_loop():
            thread = threading.get_ident() if in_handler() else None
            return self._window.enter(call, thread, message.nbytes)
        # This thread must not wait: it would hold up all coroutines.
        caller = id(asyncio.current_task()) if current_scope() is not None else None
        go = partial(self._completions.submit, partial(self._send_later, call, message))
        size = message.nbytes
        if not self._window.enter_now(call, caller, size):
            # The caller may change its tensors meanwhile.
            message.buffers = [bytes(memoryview(buffer)) for buffer in message.buffers]
            if not self._window.enter_later(call, caller, size, go):
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

    def _undo_unsent(self, call: PendingCall) -> None:
        # What went to a worker that is lost is the layers' business.
        if call.undo is not None and not call.sent and call.peer not in self.membership.lost:
            undo, call.undo = call.undo, None
            undo()

    def _send_admitted(self, call: PendingCall, message: Message) -> None:
        lost = self.membership.lost
        if call.peer not in lost:
            if call.delayed and call.timeout:
                message.deadline = call.remaining()
            call.sent = True
            if call.settled:
                call.sent = False  # cancelled, by a thread that looks at `sent` afterwards
                return
            try:
                self.outbox.send(call.peer, message)
            except zmq.ZMQError as error:
                hint = advice(error)
                if hint is not None:
                    call.sent = False
                    if error.errno == errno.ENOMEM:
                        raise MemoryError(f"the call can't be sent: {hint}") from error
                    raise OSError(error.errno, f"the call can't be sent: {hint}") from error
                # The peer's mailbox is closed when it is lost, and all are at the end.
                if call.peer not in lost:
                    self._calls.fail(lambda _: has_shut_down())
        if call.peer in lost:
            self._calls.fail(self._died, call.peer)

    def _receive_answer(self, call: PendingCall) -> None:
        """Receives until a call is settled, in the thread that waits for it; see `receive`.

        A handler does not. It may be called back meanwhile, and another thread that receives, and
        that this one wakes while its call is on its way, runs such a call itself.
        For others the I/O thread rests from now on, see `_on_answer`.
        """
        if not in_handler() and call.peer != self.membership.rank:
            call.received_here = True
            self.receive(call.gate, call.deadline)

    def receive(self, gate: threading.Lock, deadline: float = NEVER) -> None:
        """Receives until ``gate`` opens, in the thread that waits for that, where that can be.

        So no other thread need wake. Not for long: then the I/O thread goes on.

        Args:
            gate: opened by what is to be received.
            deadline: until when at most, on the clock of ``time.monotonic``.
        """
        if not self._io.resting or not hold_interrupts():
            return
        try:
            if not self._io.sit():
                return
            begun = now = time.monotonic()
            end = min(begun + LONGEST_SITTING, deadline)
            awake = begun + self._spin_of_sitter.seconds
            try:
                while gate.locked() and now < end:
                    self._turn(end, awake - now)
                    now = time.monotonic()
                self._spin_of_sitter.waited(now - begun)
            finally:
                self._io.leave()
            if len(self._calls):  # this one, or those of others
                self._io.end_rest()
        finally:
            release_interrupts()

    def _died(self, call: PendingCall) -> WorkerDied:
        return call.died(
            f"{self.why_gone(call.peer)}; calls to it fail, unless another one is started under "
            "its name and joins the mesh"
        )

    def why_gone(self, rank: int) -> str:
        """For error messages: who is gone, why, and when it was last heard."""
        return self._watch.epitaph(rank) + self._calls.explain(rank)

    def _decode(self, outcome: Any) -> Any:
        """The value of a call's outcome, or its error, raised; the same each time."""
        if isinstance(outcome, Exception):
            raise type(outcome)(*outcome.args)
        if outcome.kind == Kind.ERROR:
            raise load_exception(outcome.body)
        return None if outcome.body == _NONE else self.unpack(outcome)

    # -- executing -----------------------------------------------------------------------

    def execute(
        self, request: Message, outlet: Outlet, resolve: Callable[[], tuple[Any, Any, Any]]
    ) -> None:
        """Runs a function for a request, in the pool; see `Execution`."""
        scope = request.scope or self.accept(request)
        if scope.cancelled:
            return  # before it came, or while it waited for an RRef's value
        scopes = [self.scopes[tag] for tag in request.attachments or () if tag in self.scopes]
        if scopes:
            within = ExecutionWithin(outlet, self._loop, self.run, scope, resolve)
            within.within = [partial(enter, request) for enter in scopes]
            self.run(within)
        else:
            self.run(Execution(outlet, self._loop, self.run, scope, resolve))

    def run(self, job: Callable[[], None]) -> None:
        """Has a handler's job run: in the pool, or by the I/O thread after its present turn."""
        if self._io.take(self.pool, job):
            self._handler_taken = True
        else:
            self.pool.submit(job)

    def _complete_soon(self, job: Callable[[], None]) -> None:
        """Has a future completed for which nobody waits."""
        if not self._io.take(self._completions, job):
            self._completions.submit(job)

    def accept(self, request: Message) -> CancelScope:
        """Notes that a request will be answered: until then this worker is not idle."""
        return self._executing.accept(request, self.membership.infos[request.sender])

    def answering(self, request: Message) -> Outlet:
        """An outlet that answers the request with the function's outcome."""
        return _Answer(self, request)

    def unpack(self, message: Message) -> Any:
        """The object in a message. It runs what the sender chose: never in the I/O thread."""
        return Decoder(self, message, self.openers).unpack()

    def log_failure(self, error: BaseException) -> None:
        """Tells this worker's log that a handler failed, but not because of our own end."""
        if self.closed:
            return
        # As text: a log record that is kept must not keep the handler's arguments.
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        logger.error("On %s: a call failed\n%s", self.worker_info, text.rstrip())

    def _on_call(self, request: Message) -> None:
        self.execute(request, self.answering(request), partial(self.unpack, request))

    def _on_cancel(self, message: Message) -> None:
        self._executing.cancel(message.sender, message.call_id)

    def _drop_abandoned(self) -> None:
        """Takes requests out of the pool's queue for which nobody waits any more."""
        if self._executing.expire(time.monotonic()):
            self.pool.discard(lambda job: isinstance(job, Execution) and job.useless)

    def _on_answer(self, message: Message) -> None:
        call = self._calls.pop(message.call_id)
        if call is None:
            return
        call.settle(message)
        # The next answer may be received where it is waited for, see _receive_answer.
        if (
            call.received_here
            and not len(self._calls)
            and time.monotonic() - call.begun < LONGEST_SITTING
        ):
            self._io.rest(self._next_tick)

    # -- the I/O thread ------------------------------------------------------------------

    def _lead(self) -> None:
        """A turn of the leading I/O thread."""
        self._turn(spin=self._spin_of_leader.seconds)

    def _turn(self, until: float = float("inf"), spin: float = 0.0) -> None:
        """Waits for a message, at most ``until`` then, and does what is due.

        In one thread at a time: the leading I/O thread, or one that sits for it.
        """
        try:
            self._receive_next(until, spin)
            self._do_what_is_due()
        except Exception:
            logger.exception("%s: the I/O thread goes on after an error", self.worker_info)

    def _receive_next(self, until: float, spin: float) -> None:
        """Waits for a message, and deals with it, and with others that have come with it.

        These are left to the next turn where a handler is to run after this one.
        """
        begun = time.monotonic()
        wait = min(self._next_tick, self._calls.earliest, until) - begun
        self._handler_taken = False
        count = 0
        try:
            if self._assembler.busy:
                spin = 0.0  # the next chunk's way through the system is better off with the core
            received = self._network.receive(max(0.0, wait), spin)
            self._spin_of_leader.waited(time.monotonic() - begun)
            while received is not None:
                self._dispatch(*received)
                count += 1
                if self._handler_taken or count == _MOST_AT_ONCE:
                    break
                received = self._network.at_hand()
        except OutOfMemory as error:
            self._errands.append(partial(self._on_lost_message, error))

    def _do_what_is_due(self) -> None:
        while self._errands:
            self._errands.popleft()()
        for flush in self.flushers:
            flush()
        now = time.monotonic()
        if now >= self._calls.earliest:
            self._calls.expire(now)
        if self._shutdown.under_way:
            # A handler that ends in the pool says nothing here: look more often.
            self._next_tick = min(self._next_tick, now + _TICK_AT_SHUTDOWN)
            if self._shutdown.asked and self._idle():
                self._report_idle()
            self._shutdown.look()
        if now >= self._next_tick:
            self._tick()
            self._next_tick = now + _TICK

    def _dispatch(self, identity: bytes, first: bytes, buffers: Sequence[Any]) -> None:
        sender = self.membership.rank_of(identity)
        if sender is None:
            self._on_outsider(identity, first, buffers)
            return
        try:
            if is_chunk(first):
                whole = self._assembler.add(sender, first, buffers)
                if whole is None:
                    return
                first, buffers = whole
            message = parse(first, buffers, sender)
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise ProtocolError(f"expected a known kind of message, found {message.kind}")
        except ProtocolError as error:
            logger.error("%s: a message from %s: %s", self.worker_info, sender, error)
            return
        if message.kind not in _UNCOUNTED:
            self._received[sender] += 1
        try:
            if message.extensions:
                message.attachments = self._read_extensions(message)
            handler(message)
        except Exception as error:
            # Whatever it is, the caller must not wait for it until its deadline.
            if message.kind in REQUESTS:
                self.answer_error(message, error)
            elif (
                message.kind in (Kind.RESULT, Kind.ERROR)
                and (call := self._calls.pop(message.call_id)) is not None
            ):
                # A segment of shared memory that isn't there any more has gone with its owner.
                gone = isinstance(error, FileNotFoundError)
                hint = advice(error)
                why = f"{error}; {hint}" if hint else error
                unreadable = ProtocolError(f"the answer can't be read: {why}")
                call.settle(self._died(call) if gone else unreadable)
                if gone:
                    return
            raise

    def _on_lost_message(self, error: OutOfMemory) -> None:
        """Tells whoever waits for it, where so much of it is known."""
        logger.error("%s: %s", self.worker_info, advice(error))
        sender = self.membership.rank_of(error.identity)
        if sender is None:
            return
        self._received[sender] += 1  # what is large is counted
        if error.first is None:
            return
        message = parse(error.first, (), sender)
        if message.kind in REQUESTS:
            self.answer_error(message, error)
        elif (call := self._calls.pop(message.call_id)) is not None:
            call.settle(MemoryError(f"{error}, an answer of {call.peer}: {advice(error)}"))

    def _read_extensions(self, message: Message) -> dict[int, Any]:
        handlers = self._extension_handlers
        try:
            return {
                tag: handlers[tag](message, data)
                for tag, data in message.extensions
                if tag in handlers
            }
        except struct.error as error:
            raise ProtocolError(f"an extension can't be read: {error}") from error

    def _tick(self) -> None:
        for loss in self._watch.tick(self._shutdown.waits_for_all):
            self._lose(loss)
        self.pool.relieve()
        self._completions.relieve()
        for tick in self.tickers:
            tick()

    def _on_leave(self, message: Message) -> None:
        body = bytes(message.body)
        reason = Reason.GAVE_UP if body == _GAVE_UP else Reason.LEFT
        sent = _SENT.unpack(body)[0] if len(body) == _SENT.size else 0
        loss = self._watch.leave(message.sender, reason, sent)
        if loss is not None:
            self._lose(loss)

    def _on_outsider(self, identity: bytes, first: bytes, buffers: Sequence[Any]) -> None:
        """The waker's message, or a stranger's, of which nothing is read; or one of a worker that
        was given up too soon, which is told so: it must not wait for us.
        """
        rank = self.membership.lost_rank_of(identity)
        if rank is None:
            # Whoever sends has joined, even if we have yet to hear of that.
            awaited = self.membership.awaited_rank_of(identity)
            if awaited is not None:
                self.admit(awaited)
                self._dispatch(identity, first, buffers)
            return
        if is_chunk(first):
            return
        message = parse(first, (), rank)
        if message.kind == Kind.TERMINATION:
            self._on_termination(message)  # it may have gone with the word that all may go
        now = time.monotonic()
        if message.kind != Kind.LEAVE and now > self._told_to_leave.get(rank, 0.0):
            self._told_to_leave[rank] = now + _TELL_EVERY
            self._network.send(rank, Message(Kind.LEAVE, body=_GAVE_UP).first_frame(), (), False)

    def _lose(self, loss: Loss) -> None:
        """A peer is gone, as the membership knows already."""
        rank = loss.rank
        self._assembler.forget(rank)
        if self.membership.was_found(rank):
            logger.info("%s: %s", self.worker_info, self.why_gone(rank))
        self._calls.fail(self._died, rank)
        self._executing.lose(rank)
        # Not here: a thread may be copying what it sends.
        self._completions.submit(partial(self._network.drop, rank))
        for layer in self.layers:
            layer.lose(rank)
        self._shutdown.lose(rank)
        if not self._shutdown.done and self.membership.was_found(rank):
            self.lost.tell(self.membership.infos[rank])

    def _report_idle(self) -> None:
        """Tells the leader of a shutdown that there is nothing to do here."""
        living = self.membership.living
        received = sum(self._received[rank] for rank in living)
        self._shutdown.idle(self._network.sent(living), received)

    def _under_way(self) -> set[Hashable]:
        """The handlers that run here, and the calls that wait for an answer."""
        return {
            *map(id, self._executing.all()),
            *(("call", call_id) for call_id in self._calls.ids()),
        }

    def _idle(self) -> bool:
        """Whether this worker does nothing and waits for nothing."""
        return not (
            self._executing
            or len(self.outbox)
            or len(self._calls)
            or self.pool.active
            or self._completions.active
            or not all(layer.quiet() for layer in self.layers)
        )

    # -- workers that come and go; in the I/O thread, or before the agent serves -----------

    def introduce(self, card: Card, endpoint: str) -> None:
        """A worker is about to join the mesh; it can be reached at ``endpoint``."""
        number = card.number
        self.membership.introduce(card)
        self._received[number] = 0
        self._watch.add(number)
        self._network.introduce(number, endpoint, card.public_key)

    def admit(self, number: int) -> None:
        """A worker that was introduced has joined, and can be found."""
        if self.membership.admit(number):
            self._shutdown.admit(number)
            self.joined.tell(self.membership.infos[number])

    def part(self, number: int, reason: Reason) -> None:
        """A worker is gone, as others say."""
        loss = self._watch.leave(number, reason)
        if loss is not None:
            self._lose(loss)

    def expect(self, numbers: Collection[int]) -> None:
        """Looks after these workers also where nothing was exchanged with them, and no others."""
        self._watch.expected = set(numbers)

    def shut_out(self, number: int) -> None:
        """A worker has ended for good: nobody may connect with its key any more."""
        self._network.dismiss(number)

    def reason_gone(self, number: int) -> Reason | None:
        """Why a worker is gone, where that was found here."""
        return self._watch.reason(number)

    @property
    def has_terminated(self) -> bool:
        """Whether the whole mesh had nothing left to do, and all leave it."""
        return self._shutdown.done

    def has_heard(self, number: int) -> bool:
        """Whether any message of a worker ever came in."""
        return bool(self._received[number])

    # -- the end -------------------------------------------------------------------------

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """Leaves the mesh, and ends all that this agent has started. Idempotent.

        Args:
            graceful: first wait until all workers have called this and nothing is under way
                anywhere; or in an elastic mesh, until this worker has nothing under way.
                Otherwise this worker leaves at once, and calls that its peers have
                under way to it fail.
            timeout: for the graceful wait, in seconds; 0 means none. A worker that dies
                meanwhile is not waited for.

        Raises:
            RpcTimeoutError: the others did not come in time; this agent is closed all the same.
            RpcError: called from a handler with ``graceful``, which would wait for itself.
        """
        own = in_pool(self.pool) or in_pool(self._completions) or self._loop.runs_here()
        if self.closed:
            # Another thread may still be at it, and wait for this one where it is one of ours.
            if not own and self._closer != threading.get_ident():
                self._ended.wait(_END_TIMEOUT)
            return
        timeout = checked_timeout("timeout", timeout)
        if graceful and own:
            raise RpcError(
                "a graceful shutdown waits for all handlers and callbacks, and can't be called "
                "from one: call it in the main thread, or with graceful=False"
            )
        try:
            if graceful:
                self._terminate(timeout)
        finally:
            self.close()

    def _terminate(self, timeout: float) -> None:
        self.in_io_thread(self._shutdown.begin)
        if not self._shutdown.wait(timeout):
            missing = [rank_of(number) for number in self._shutdown.missing]
            who = f"; ranks {missing} have not begun to shut down" if missing else ""
            if self._executing:
                who += f"; calls of others are still running here: {len(self._executing)}"
            raise RpcTimeoutError(
                f"a graceful shutdown of {self.worker_info} took longer than {timeout:g} s{who}"
            )

    def in_io_thread(self, errand: Callable[[], None]) -> None:
        """Has something done in the I/O thread soon. Not for finalizers: it takes locks."""
        self._errands.append(errand)
        self._network.wake()

    def _on_termination(self, message: Message) -> None:
        self._shutdown.receive(message.sender, message.body)

    def _post_termination(self, rank: int, content: TerminationMessage) -> None:
        self.post(rank, Message(Kind.TERMINATION, body=content.pack()), counted=False)

    def close(self) -> None:
        """Leaves at once: as `shutdown` with ``graceful=False``."""
        with self._closing_lock:
            if self.closed:
                return
            self.closed = True
            self.outbox.close()
            self._closer = threading.get_ident()
        try:
            self._close()
        finally:
            self._switch_interval.give_back()
            self._ended.set()

    def _close(self) -> None:
        gracefully = self._shutdown.settled
        self._shutdown.leave_all_the_same()
        self._executing.close()
        if not self._shutdown.done:
            for rank in self.membership.living:
                known = self._network.knows(rank) or self._received[rank]
                if known and rank != self.membership.rank:
                    sent = _SENT.pack(self._network.sent([rank])) if gracefully else b""
                    self.post(rank, Message(Kind.LEAVE, body=sent), counted=False)
        ended = self._io.stop(_HANDLER_TIMEOUT if self._executing else _JOIN_TIMEOUT)
        self._calls.fail(lambda _: has_shut_down())
        self._watch.close()
        for layer in self.layers:
            layer.close()
        self._loop.close(_JOIN_TIMEOUT)
        # Somebody may await the futures that have failed just now.
        self._completions.close(_JOIN_TIMEOUT, finish=True)
        ended &= self.pool.close(_HANDLER_TIMEOUT if self._executing else _JOIN_TIMEOUT)
        if not ended:
            logger.warning(
                "%s has shut down while %d handlers were still running; their threads end "
                "with them",
                self.worker_info,
                len(self._executing),
            )
        self._store = None  # which closes it, where this worker has hosted it
        linger = _LINGER if self._shutdown.settled else _LINGER_NOT_GRACEFUL
        self._network.close(linger, self.membership.lost)


class _Answer:
    """Sends the outcome of an execution to the caller."""

    __slots__ = ("_agent", "request")

    def __init__(self, agent: Agent, request: Message) -> None:
        self._agent = agent
        self.request = request

    def value(self, value: Any) -> None:
        self._agent.answer(self.request, value)

    def error(self, error: BaseException) -> None:
        # Of the end of a call that it has cancelled, nobody needs to be told.
        expected = isinstance(error, (RpcCancelledError, asyncio.CancelledError))
        try:
            if not (expected and self.request.scope.cancelled):
                self._agent.log_failure(error)
        finally:  # there may be no memory for a log
            self._agent.answer_error(self.request, error)
