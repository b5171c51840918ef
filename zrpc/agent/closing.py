"""The end of an agent: when it is idle, how it says farewell, and what it ends in which order."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import zmq

from zrpc.agent.peers import LeaveMessage
from zrpc.agent.shutdown import Phase, Quiescence, Shutdown
from zrpc.calls.last_calls import LastCalls
from zrpc.constants import Seconds
from zrpc.errors import RpcError, RpcTimeoutError
from zrpc.options import checked_timeout
from zrpc.runtime import garbage_collector
from zrpc.runtime.interrupts import UninterruptedLock, uninterrupted
from zrpc.runtime.thread_pool import in_pool

if TYPE_CHECKING:
    from zrpc.agent.agent import Agent

logger = logging.getLogger(__name__)


class Closing:
    """Ends one agent. Any thread may call `shutdown` and `close`.

    Args:
        shutdown: its wait until it may leave.
    """

    def __init__(self, agent: Agent, shutdown: Shutdown) -> None:
        self._agent = agent
        self._shutdown = shutdown
        self._quiescence = Quiescence()
        self._lock = UninterruptedLock()
        self._closer = 0  # the ident of the thread that closes; the lock guards it
        self._ended = threading.Event()  # and has

    # -- in the I/O thread -----------------------------------------------------------------

    def look(self) -> None:
        """Does what a shutdown in progress has to do after a turn."""
        agent = self._agent
        if self._shutdown.all_begun and agent.caller.last_calls is None:
            chains = self._shutdown.timing.chains
            agent.caller.last_calls = LastCalls(agent.callee.requests, agent.completions, chains)
        if self._shutdown.asked and self._idle():
            living = agent.membership.living
            received = sum(agent.dispatcher.received[member] for member in living)
            self._shutdown.idle(agent.network.sent(living), received)
        self._shutdown.look()

    def _idle(self) -> bool:
        """Whether this worker does nothing and waits for nothing."""
        agent = self._agent
        return not (
            agent.callee.requests
            or len(agent.outbox)
            or len(agent.caller.calls)
            or agent.pool.active
            or agent.completions.active
            or not (self._rests() or self._waits_in_vain())
        )

    def _rests(self) -> bool:
        """Whether no thread reads an answer, and the services wait for nothing."""
        agent = self._agent
        return not agent.caller.calls.handed and all(each.idle() for each in agent.services)

    def _waits_in_vain(self) -> bool:
        """Whether what these wait for may never come: no message has come lately."""
        received = sum(self._agent.dispatcher.received.values())
        return self._quiescence.lasted(received) > self._shutdown.timing.services

    # -- in any thread ---------------------------------------------------------------------

    def shutdown(self, graceful: bool, timeout: Seconds) -> None:
        """Leaves the mesh, and ends all that the agent has started; see `Agent.shutdown`."""
        agent = self._agent
        own = in_pool(agent.pool) or in_pool(agent.completions) or agent.event_loop.runs_here()
        # Of a finalizer, whose thread may be the one that receives.
        own = own or garbage_collector.interrupts_zrpc()
        if agent.closed or self._closer:
            # Another thread may still close it, and wait for this one if it is one of the agent's.
            if not own and self._closer != threading.get_ident():
                self._ended.wait(self._shutdown.timing.end)
            return
        timeout = checked_timeout("timeout", timeout)
        if graceful and own:
            raise RpcError(
                "a graceful shutdown waits for all handlers and callbacks, and can't be called "
                "from one, nor by a finalizer that the garbage collector runs in the midst of "
                "zrpc's own code: call it in the main thread, or with graceful=False"
            )
        try:
            if graceful:
                self._wait_to_leave(timeout)
        finally:
            self.close()

    def _wait_to_leave(self, timeout: float) -> None:
        with contextlib.suppress(zmq.ZMQError):  # another thread has closed the agent meanwhile
            self._agent.receiver.in_io_thread(self._shutdown.begin)
        if not self._shutdown.wait(timeout):
            who = self._shutdown.obstacles()
            if running := len(self._agent.callee.requests):
                who += f"; calls of others are still running here: {running}"
            raise RpcTimeoutError(
                f"a graceful shutdown of {self._agent.worker_info} took longer than "
                f"{timeout:g} s{who}"
            )

    def close(self) -> None:
        """Leaves at once."""
        # All of it, even if a step raises. Handlers of signals run only in the waits for threads,
        # which are told to end before that.
        with uninterrupted, ExitStack() as rest, self._lock:
            if self._agent.closed or self._closer:
                return
            self._closer = threading.get_ident()
            for step in reversed(self._steps()):
                rest.callback(step)

    def _steps(self) -> list[Callable[[], object]]:
        """Returns the steps of the end, in order."""
        agent = self._agent
        ended: list[bool] = []
        return [
            # First: the error of a handler whose own call finds this worker closed is not answered.
            agent.callee.requests.close,
            agent.outbox.close,
            self._say_farewell,
            lambda: ended.append(agent.receiver.stop(self._patience_seconds)),
            agent.caller.calls.close,
            agent.liveness.close,
            *(service.close for service in agent.services),
            lambda: agent.event_loop.close(self._shutdown.timing.join),
            # Coroutines may await the futures that have just failed.
            lambda: agent.completions.close(self._shutdown.timing.join, finish=True),
            lambda: ended.append(agent.pool.close(self._patience_seconds)),
            lambda: self._warn_of_handlers(all(ended)),
            self._close_network,
            agent.switch_interval.give_back,
            self._ended.set,
        ]

    def _say_farewell(self) -> None:
        agent = self._agent
        gracefully = self._shutdown.phase >= Phase.SETTLED
        self._shutdown.leave_anyway()
        if not self._shutdown.done:
            for member in agent.membership.living:
                known = agent.network.knows(member) or agent.dispatcher.received.get(member)
                if known and member != agent.membership.own_id:
                    sent = agent.network.sent([member]) if gracefully else 0
                    agent.outbox.post(member, LeaveMessage(sent=sent).pack())

    @property
    def _patience_seconds(self) -> float:
        """How long to wait for the end of threads."""
        return (
            self._shutdown.timing.handlers
            if self._agent.callee.requests
            else self._shutdown.timing.join
        )

    def _warn_of_handlers(self, ended: bool) -> None:
        if not ended:
            logger.warning(
                "%s has shut down; handlers still running: %d. Their threads exit when they return",
                self._agent.worker_info,
                len(self._agent.callee.requests),
            )

    def _close_network(self) -> None:
        self._agent.store = None  # closes it if this worker hosts it and nobody else holds it
        timing = self._shutdown.timing
        gracefully = self._shutdown.phase >= Phase.SETTLED
        linger = timing.linger if gracefully else timing.linger_not_graceful
        self._agent.network.close(linger, self._agent.membership.lost)


def work_in_progress(agent: Agent) -> set[Hashable]:
    """Returns the handlers that run at a worker, and its calls that wait for an answer."""
    return {
        *map(id, agent.callee.requests.all()),
        *(("call", call.call_id) for call in agent.caller.calls.in_flight()),
    }
