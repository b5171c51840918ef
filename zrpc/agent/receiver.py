"""The thread that receives: which one it is, and what it does with a turn.

One of two I/O threads receives, see `zrpc.runtime.leader_follower`. A thread that waits for an
answer receives in its place for a short time. "The I/O thread" is, here and
in the services, whichever thread receives at the moment. It reads headers, settles
calls and hands requests to the pool. It neither unpickles, nor runs what a user wrote, nor waits
for a peer, except for handlers that have been quick of late: these it runs itself, between two
messages.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial

from zrpc.agent.dispatcher import Dispatcher
from zrpc.agent.shutdown import Shutdown
from zrpc.calls.pending_calls import PendingCalls
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.leader_follower import LeaderFollower
from zrpc.runtime.thread_errors import printing_errors
from zrpc.runtime.thread_pool import HandlerPool
from zrpc.transport.network import Network

logger = logging.getLogger(__name__)

# How often the I/O thread looks after deadlines, peers and threads while nothing arrives.
_TICK_SECONDS = 0.1
# At most this many messages that are there already are dealt with in one turn.
_MESSAGES_PER_TURN = 64


@dataclass(eq=False)
class Receiver:
    """Receives one worker's messages, in one thread at a time. Any thread may call its methods.

    Args:
        context: of the I/O threads.
        network: where messages come from.
        pool: runs handlers.
        completions: completes futures.
        shutdown: this worker's; once it is in progress, it is looked after at each turn.

    Attributes:
        receive, hurry, relieve: see `LeaderFollower`.
        run: runs a handler's job; see `LeaderFollower.run`.
        complete: completes a future that no thread waits for, by a job.
    """

    _worker: WorkerInfo
    _context: contextvars.Context
    _network: Network
    _pool: HandlerPool
    _completions: HandlerPool
    _shutdown: Shutdown

    def __post_init__(self) -> None:
        name = f"zrpc-{self._worker.name}-io"
        self._threads = LeaderFollower(self._context, name, self._turn, self._network)
        # For each call: without a function of their own.
        self.receive, self.hurry = self._threads.receive, self._threads.hurry
        self.relieve = self._threads.relieve
        self.run = partial(self._threads.run, self._pool)
        self.complete = partial(self._threads.run, self._completions)
        # When the next turn must begin at the latest, and when the next tick is due.
        self._next_turn = self._next_tick = 0.0
        # What other threads want done in the I/O thread.
        self._errands: deque[Callable[[], object]] = deque()

    def start(
        self,
        dispatcher: Dispatcher,
        calls: PendingCalls,
        after_turn: Sequence[tuple[Sized, Callable[[], None]]],
        look: Callable[[], None],
        tick: Callable[[], None],
    ) -> None:
        """Starts the I/O threads.

        Args:
            dispatcher: gives each message to its handler.
            calls: those that wait for answers.
            after_turn: see `Service.after_turn`.
            look: called while a shutdown is in progress, at each tick. While it waits for this
                worker to be idle, also often, and after each turn that leaves no handler to run.
            tick: called about ten times a second.
        """
        self._unfinished = dispatcher.unfinished
        self._dispatch = dispatcher.dispatch
        self._calls = calls
        self._after_turn = after_turn
        self._look = look
        self._tick = tick
        self._threads.in_flight = calls.by_id
        self._threads.start()

    def stop(self, timeout: float) -> bool:
        """Ends the I/O threads; False if a job still ran in one when the timeout passed."""
        return self._threads.stop(timeout)

    # -- for other threads -----------------------------------------------------------------

    def in_io_thread(self, errand: Callable[[], None]) -> None:
        """Runs a job in the I/O thread soon. Not for finalizers: it takes locks."""
        self._errands.append(errand)
        self._network.wake()

    def in_next_turn(self, errand: Callable[[], object]) -> None:
        """Runs a job in the I/O thread, at its next tick at the latest; takes no locks."""
        self._errands.append(errand)

    # -- the I/O thread --------------------------------------------------------------------

    def _turn(self, until: float) -> float:
        """Waits for a message until a time at most, and does what is due.

        In one thread at a time: the leading I/O thread, or a thread that receives in its place.
        Messages that have come with the first are dealt with too. They are left to the next turn if
        a quick handler must run after this one, but not for a callback: the answers to many calls
        in flight would take a turn each.

        Returns:
            When the next turn must begin, though no message comes; 0 if one has come, and less if
            others have, too.
        """
        at_hand, received = self._network.at_hand, None
        try:
            wait = min(self._next_turn, self._calls.earliest, until) - time.monotonic()
            # The next chunk's way through the system is better off with the core.
            received = self._network.receive(max(0.0, wait), not self._unfinished)
            if received is not None:
                at_hand.appendleft(received)  # until there is memory to deal with it
                self._dispatch(at_hand)
                if at_hand:
                    self._dispatch_rest()
            if self._errands:
                self._do_errands()
            for work, do in self._after_turn:
                if work:
                    do()
            now = time.monotonic()
            due = now >= self._next_tick
            if due:
                self._next_tick = now + _TICK_SECONDS  # first: also if an error ends the turn
            self._next_turn = self._next_tick
            if self._shutdown.phase:
                # With a handler to run, this worker is not idle. It may be soon.
                if due or (self._shutdown.asked and self._threads.job_pool is not self._pool):
                    self._look()
                if self._shutdown.asked:
                    self._next_turn = min(self._next_tick, now + self._shutdown.timing.look)
            # Before calls expire: a service may postpone their deadlines.
            if due:
                self._tick()
            if now >= self._calls.earliest:
                self._calls.expire(now)
        except Exception:
            with printing_errors():
                logger.exception("%s: the I/O thread goes on after an error", self._worker)
        if at_hand or self._network.inbox.unread:
            return -1.0
        if received is not None:
            return 0.0
        return min(self._next_turn, self._calls.earliest)

    def _dispatch_rest(self) -> None:
        """Deals with the messages that have come with the first one of a turn."""
        at_hand = self._network.at_hand
        for _ in range(_MESSAGES_PER_TURN - 1):
            if not at_hand or (self._threads.job_pool is self._pool and self._pool.times.quick):
                break
            self._dispatch(at_hand)

    def _do_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()
