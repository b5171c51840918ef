"""One member of a mesh: its threads, what it receives, and how it leaves.

What becomes of its own calls is in `zrpc.caller`, of the calls of others in `zrpc.callee`, and who
deals with a message that has come in, in `zrpc.dispatcher`.

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

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol, TypeVar

from torch.distributed import Store

from zrpc.callee import Callee
from zrpc.caller import Caller
from zrpc.calls import NEVER
from zrpc.card import Card
from zrpc.codec import Codec
from zrpc.current import as_current, context_of, has_shut_down
from zrpc.dispatcher import Dispatcher
from zrpc.errors import ProtocolError, RpcError, RpcTimeoutError
from zrpc.event_loop import EventLoop
from zrpc.failure_detector import Loss, Reason
from zrpc.graceful_shutdown import GracefulShutdown
from zrpc.hooks import Hooks
from zrpc.interrupts import hold_interrupts, release_interrupts
from zrpc.io_threads import LONGEST_SITTING, IoThreads
from zrpc.leaving import LeavingAlone
from zrpc.malloc import keep_freed_memory
from zrpc.membership import Membership
from zrpc.options import ZmqRpcBackendOptions, checked_timeout
from zrpc.outbox import Outbox
from zrpc.pool import WorkerPool, in_pool
from zrpc.silence import Silence
from zrpc.spin import Spin
from zrpc.switch_interval import SwitchInterval
from zrpc.termination import TerminationMessage
from zrpc.transport.chunks import is_chunk
from zrpc.transport.inbox import OutOfMemory
from zrpc.transport.network import Network
from zrpc.watch import Watch
from zrpc.wire.header import Message, parse
from zrpc.wire.kind import Kind
from zrpc.worker_info import WorkerInfo, rank_of

__all__ = ["Agent", "Layer"]

logger = logging.getLogger(__name__)

# How often the I/O thread looks after deadlines, peers and threads while nothing arrives, in
# seconds; the second number is for an agent that is shutting down.
_TICK = 0.1
_TICK_AT_SHUTDOWN = 0.005
# How long a shutdown waits for its own threads, and for queued messages to leave, in seconds.
_JOIN_TIMEOUT = 5.0
# How long a graceful one waits for what layers wait for, where no message comes in.
_LAYERS_WAIT = 10.0
# How long a second shutdown waits for the first one to end.
_END_TIMEOUT = 10.0
# How long one that isn't graceful waits for handlers that still run.
_HANDLER_TIMEOUT = 1.0
_LINGER = 2.0
_LINGER_NOT_GRACEFUL = 0.1

# The body of LEAVE to a worker that was given up, and is heard again; how often to send it, in
# seconds.
_GAVE_UP = b"gave up"
# That of a worker with nothing left to do: how many messages it has sent.
_SENT = struct.Struct("<Q")
_TELL_EVERY = 1.0

# So many messages that are there already are dealt with in one turn.
_MOST_AT_ONCE = 64


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
        caller: makes the calls to others.
        callee: answers the calls of others.
        codec: packs and unpacks values.
        dispatcher: gives messages that come in to who deals with them.
        shared_memory: the most bytes of shared memory for what this worker sends.
        warn_after: after how many seconds a call that waits is named in a warning; 0 for never.
        lost: called for each worker that is gone.
        joined: called for each other worker of the mesh.
        context: of the threads that run handlers; `current_agent` is this one there.
        pool: runs handlers.
        event_loop: runs those that are ``async def``.
        outbox: sends messages.
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
        self.layers: list[Layer] = []
        # Layers that have something to do after every turn of the I/O thread, or now and then.
        self.flushers: list[Callable[[], None]] = []
        # Those that wait for messages of certain workers.
        self.awaited: list[Callable[[], Iterable[int]]] = []
        self.tickers: list[Callable[[], None]] = []
        self.shared_memory = options.shared_memory
        self.warn_after = options.warn_after
        self._network = network
        # Rank 0 may host the store, and the others must be able to finish their start.
        self._store: Store | None = store
        self._told_to_leave: dict[int, float] = {}
        self._silence = Silence()  # while it shuts down
        self.context = context_of(self)
        name = f"zrpc-{self.worker_info.name}"
        self.pool = WorkerPool(options.num_worker_threads, f"{name}-worker", self.context)
        self._completions = WorkerPool(1, f"{name}-completion", self.context)
        self.lost = Hooks(self._completions.submit)
        self.joined = Hooks(self._completions.submit)
        for info in membership.infos.values():
            if info != self.worker_info:
                self.joined.tell(info)
        self.event_loop = EventLoop(f"{name}-asyncio", self.context)
        self._io = IoThreads(self.context, f"{name}-io", self._lead, network.wake)
        self.outbox = Outbox(network, membership, self.in_io_thread)
        self.codec = Codec(self, membership)
        self.caller = Caller(
            membership,
            self.codec,
            self.outbox,
            options,
            receive=self.receive,
            complete=self._complete_soon,
            submit=self._completions.submit,
            why_gone=self.why_gone,
        )
        self.callee = Callee(
            membership, self.codec, self.outbox, self.pool, self.event_loop, self.run
        )
        self.tickers += [self.callee.drop_abandoned, self.outbox.send_again]
        self.dispatcher = Dispatcher(membership, self.caller, self.callee, self._on_outsider)
        self._dispatch = self.dispatcher.dispatch
        self._watch = Watch(
            network, membership, options.heartbeat_timeout, self.dispatcher.received
        )
        for kind, handler in {
            Kind.CALL: self.callee.on_call,
            Kind.RESULT: self._on_answer,
            Kind.ERROR: self._on_answer,
            Kind.CANCEL: self.callee.on_cancel,
            Kind.TERMINATION: self._on_termination,
            Kind.LEAVE: self._on_leave,
        }.items():
            self.dispatcher.register(kind, handler)
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
        # Guards the change to `closed`.
        self._closing_lock = threading.Lock()
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

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """This worker, or another one; as torch's agents have it.

        Raises:
            RpcError: there is no such worker.
        """
        return self.worker_info if worker is None else self.membership.find(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers that are in the mesh, by rank; as torch's agents have it."""
        living = [self.membership.infos[number] for number in self.membership.living]
        return sorted(living, key=lambda info: info.id)

    def as_current(self) -> AbstractContextManager[Agent]:
        """Makes this the agent of `zrpc.rpc_sync` and its like, in the present context."""
        return as_current(self)

    @property
    def closed(self) -> bool:
        """Whether this agent has shut down, or is about to."""
        return self.outbox.closed

    # -- what layers use, and the two sides of calls -----------------------------------------

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
            if len(self.caller.calls):  # this one, or those of others
                self._io.end_rest()
        finally:
            release_interrupts()

    def why_gone(self, rank: int) -> str:
        """For error messages: who is gone, why, and when it was last heard."""
        return self._watch.epitaph(rank) + self.caller.calls.explain(rank)

    def run(self, job: Callable[[], None]) -> None:
        """Has a handler's job run: in the pool, or by the I/O thread after its present turn."""
        if self._io.take(self.pool, job):
            self._handler_taken = True
        else:
            self.pool.submit(job)

    def submit(self, job: Callable[[], None]) -> None:
        """Has something done soon, by another thread than the present one."""
        self._completions.submit(job)

    # -- the I/O thread ------------------------------------------------------------------

    def _complete_soon(self, job: Callable[[], None]) -> None:
        """Has a future completed for which nobody waits."""
        if not self._io.take(self._completions, job):
            self._completions.submit(job)

    def _on_answer(self, message: Message) -> None:
        call = self.caller.settle(message)
        # The next answer may be received where it is waited for, see `Caller._receive_answer`.
        if (
            call is not None
            and call.received_here
            and not len(self.caller.calls)
            and time.monotonic() - call.begun < LONGEST_SITTING
        ):
            self._io.rest(self._next_tick)

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
        wait = min(self._next_tick, self.caller.calls.earliest, until) - begun
        self._handler_taken = False
        count = 0
        try:
            if self.dispatcher.busy:
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
            self._errands.append(partial(self.dispatcher.lose_for_memory, error))

    def _do_what_is_due(self) -> None:
        while self._errands:
            self._errands.popleft()()
        for flush in self.flushers:
            flush()
        now = time.monotonic()
        if now >= self.caller.calls.earliest:
            self.caller.calls.expire(now)
        if self._shutdown.under_way:
            # A handler that ends in the pool says nothing here: look more often.
            self._next_tick = min(self._next_tick, now + _TICK_AT_SHUTDOWN)
            if self._shutdown.asked and self._idle():
                self._report_idle()
            self._shutdown.look()
        if now >= self._next_tick:
            self._tick()
            self._next_tick = now + _TICK

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
        self.dispatcher.forget(rank)
        if self.membership.was_found(rank):
            logger.info("%s: %s", self.worker_info, self.why_gone(rank))
        self.caller.calls.fail(self.caller.died, rank)
        self.callee.requests.lose(rank)
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
        received = sum(self.dispatcher.received[rank] for rank in living)
        self._shutdown.idle(self._network.sent(living), received)

    def _under_way(self) -> set[Hashable]:
        """The handlers that run here, and the calls that wait for an answer."""
        return {
            *map(id, self.callee.requests.all()),
            *(("call", call_id) for call_id in self.caller.calls.ids()),
        }

    def _idle(self) -> bool:
        """Whether this worker does nothing and waits for nothing."""
        return not (
            self.callee.requests
            or len(self.outbox)
            or len(self.caller.calls)
            or self.pool.active
            or self._completions.active
            or not (all(layer.quiet() for layer in self.layers) or self._waits_in_vain())
        )

    def _waits_in_vain(self) -> bool:
        """Whether what layers wait for may be lost, with a connection: nothing comes for long."""
        return self._silence.lasted(sum(self.dispatcher.received.values())) > _LAYERS_WAIT

    # -- workers that come and go; in the I/O thread, or before the agent serves -----------

    def introduce(self, card: Card, endpoint: str) -> None:
        """A worker is about to join the mesh; it can be reached at ``endpoint``."""
        number = card.number
        self.membership.introduce(card)
        self.dispatcher.introduce(number)
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

    def recall(self, number: int) -> None:
        """Somebody speaks of a worker that this one does not know.

        Raises:
            ProtocolError: it is not one that was gone before this one came.
        """
        card = self.membership.recall(number)
        if card is None:
            raise ProtocolError(f"expected the number of a worker, found {number}")
        self.introduce(card, "")
        self.part(number, Reason.LEFT)

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
        """Whether any message ever came in of a worker that is not gone."""
        return bool(self.dispatcher.received.get(number))

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
        own = in_pool(self.pool) or in_pool(self._completions) or self.event_loop.runs_here()
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
            if self.callee.requests:
                who += f"; calls of others are still running here: {len(self.callee.requests)}"
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
        self.outbox.post(rank, Message(Kind.TERMINATION, body=content.pack()), counted=False)

    def close(self) -> None:
        """Leaves at once: as `shutdown` with ``graceful=False``."""
        with self._closing_lock:
            if self.closed:
                return
            self.outbox.close()
            self._closer = threading.get_ident()
        try:
            self._close()
        finally:
            self._switch_interval.give_back()
            self._ended.set()

    def _close(self) -> None:
        ended: list[bool] = []
        steps: list[Callable[[], object]] = [
            self._say_farewell,
            lambda: ended.append(self._io.stop(self._patience)),
            self.outbox.send_handed_over,  # that of leaving, say
            lambda: self.caller.calls.fail(lambda _: has_shut_down()),
            self._watch.close,
            *(layer.close for layer in self.layers),
            lambda: self.event_loop.close(_JOIN_TIMEOUT),
            # Somebody may await the futures that have failed just now.
            lambda: self._completions.close(_JOIN_TIMEOUT, finish=True),
            lambda: ended.append(self.pool.close(self._patience)),
            lambda: self._warn_of_handlers(all(ended)),
            self._close_network,
        ]
        with ExitStack() as rest:  # all of it, also where something raises, or Ctrl-C comes
            for step in reversed(steps):
                rest.callback(step)

    def _say_farewell(self) -> None:
        gracefully = self._shutdown.settled
        self._shutdown.leave_all_the_same()
        self.callee.requests.close()
        if not self._shutdown.done:
            for rank in self.membership.living:
                known = self._network.knows(rank) or self.dispatcher.received.get(rank)
                if known and rank != self.membership.rank:
                    sent = _SENT.pack(self._network.sent([rank])) if gracefully else b""
                    self.outbox.post(rank, Message(Kind.LEAVE, body=sent), counted=False)

    @property
    def _patience(self) -> float:
        """How long to wait for the end of threads, in seconds."""
        return _HANDLER_TIMEOUT if self.callee.requests else _JOIN_TIMEOUT

    def _warn_of_handlers(self, ended: bool) -> None:
        if not ended:
            logger.warning(
                "%s has shut down while %d handlers were still running; their threads end "
                "with them",
                self.worker_info,
                len(self.callee.requests),
            )

    def _close_network(self) -> None:
        self._store = None  # which closes it, where this worker has hosted it
        linger = _LINGER if self._shutdown.settled else _LINGER_NOT_GRACEFUL
        self._network.close(linger, self.membership.lost)
