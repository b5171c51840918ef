"""A mesh inside this process: each worker has an agent and a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zrpc.testing.failure import attribute, traceback_of, without_frames
from zrpc.testing.leaks import lasting
from zrpc.testing.spec import MeshSpec
from zrpc.testing.stacks import stacks_of
from zrpc.testing.worker import Work, Worker, name_of

if TYPE_CHECKING:
    from zrpc.agent.agent import Agent

logger = logging.getLogger(__name__)

_Task = tuple[Work[Any], Callable[[], Any]]


def thread_workers(spec: MeshSpec) -> list[Worker]:
    """Returns workers that meet in a store of this process; none is started yet."""
    import_core()
    import torch.distributed as dist

    from zrpc.bootstrap import join_mesh
    from zrpc.membership.secret import ClusterSecret, new_secret
    from zrpc.options import ZmqRpcBackendOptions

    size = None if spec.elastic else spec.workers
    store, secret = dist.HashStore(), ClusterSecret(new_secret())

    def join(name: str, rank: int) -> Agent:
        options = ZmqRpcBackendOptions(**spec.options)
        return join_mesh(
            name, rank=rank, world_size=size, store=store, options=options, secret=secret
        )

    return [ThreadWorker(name, rank, join) for rank, name in enumerate(spec.names)]


def import_core() -> None:
    """Imports zrpc here, not in N threads at once.

    What libraries keep open from then on does not count as a leak.
    """
    if "zrpc.api" not in sys.modules:
        with lasting():
            import zrpc.api  # noqa: F401


class ThreadWorker(Worker):
    """A worker that is a thread of this process; see `Worker`.

    Args:
        name: the worker's name in the mesh.
        rank: the worker's rank.
        join: makes an agent that has joined the mesh, given the name and the rank.
    """

    def __init__(self, name: str, rank: int, join: Callable[[str, int], Agent]) -> None:
        super().__init__(name, rank)
        self._join = join
        # Set and cleared by the worker's thread.
        self._agent: Agent | None = None
        self._current: Work[Any] | None = None  # the latest that its thread has begun
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = self._new_thread()
        self._closer: threading.Thread | None = None

    @property
    def label(self) -> str:
        """The worker's name and kind, for a reader."""
        return f"{self.name} (a thread)"

    @property
    def agent(self) -> Agent:
        """The worker's agent.

        Raises:
            RuntimeError: the worker has not started, or is shut down.
        """
        if self._agent is None:
            raise RuntimeError(f"{self.name} has no agent: it is not started, or is shut down")
        return self._agent

    def start(self) -> Work[Any]:
        """Starts the worker's thread and makes it join the mesh."""
        self._thread.start()
        return self._enqueue("starts", self._start)

    def submit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Work[Any]:
        """Queues ``fn(*args, **kwargs)`` for the worker's thread, with its agent current."""

        def call() -> Any:
            with self.agent.as_current():
                value = fn(*args, **kwargs)
                return asyncio.run(value) if inspect.iscoroutine(value) else value

        return self._enqueue(f"runs {name_of(fn)}", call)

    def interrupt(self, work: Work[Any]) -> None:
        """Leaves the function to its thread, if it has begun, and goes on in another one."""
        with self._lock:
            if (what := self._pending.pop(work, None)) is None:
                return
            begun = work is self._current
            if begun:
                self._abandon_thread()
                self._thread = self._new_thread()
                self._thread.start()
        if begun:
            logger.warning(
                "%s still %s, whose caller was interrupted: a thread can't be stopped, so it goes "
                "on beside what the worker runs next",
                self.label,
                what,
            )

    def shutdown(self, graceful: bool) -> Work[list[str]]:
        """Shuts the agent down, in the worker's thread."""

        def leave() -> list[str]:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.shutdown(graceful=graceful)
            return []

        return self._enqueue("shuts down", leave)

    def stacks(self) -> str:
        """Returns the stacks of the threads of worker and agent, innermost call last."""
        return stacks_of(self.name)

    def abort(self) -> None:
        """Closes the agent, which fails its calls; a function that makes no calls runs on."""
        with self._lock:
            agent = self._agent
            if agent is None or self._closer is not None:
                return
            # In a new thread: the worker's is busy and the caller's must not block.
            self._closer = threading.Thread(
                target=agent.close, name=f"zrpc-test-{self.name}-close", daemon=True
            )
            self._closer.start()

    def stop_when_idle(self) -> None:
        """Stops the worker's thread after the work submitted so far."""
        self._tasks.put(None)

    def close(self, timeout: float) -> list[str]:
        """Waits until the worker's thread stops.

        Returns:
            An empty list: leaks are in this process, where the test's own check finds them.
        """
        for thread in (self._closer, self._thread):
            if thread is not None and thread.ident is not None:
                thread.join(timeout)
        if self._thread.is_alive():
            self._abandon_thread()
        return []

    def _abandon_thread(self) -> None:
        # A thread can't be killed. It must not be taken for one of a later mesh.
        self._thread.name = f"zrpc-test-abandoned-{self._thread.native_id}"

    def _new_thread(self) -> threading.Thread:
        name = f"zrpc-test-{self.name}-main"
        return threading.Thread(target=self._serve, name=name, daemon=True)

    def _enqueue(self, what: str, work: Callable[[], Any]) -> Work[Any]:
        future = self._new_future(what)
        if not future.done():
            self._tasks.put((future, work))
        return future

    def _start(self) -> None:
        agent = self._join(self.name, self.rank)
        with self._lock:
            self._agent = agent
            aborted = self._error is not None
        if aborted:  # while it started, so nothing else has closed the agent
            agent.close()

    def _serve(self) -> None:
        """Runs in the worker's thread."""
        while (task := self._tasks.get()) is not None:
            future, work = task
            with self._lock:
                begins = future in self._pending  # somebody still waits for it
                self._current = future if begins else None
            if not begins:
                continue
            value, error = None, None
            try:
                value = work()
            except BaseException as e:  # SystemExit and pytest's outcomes too go to the test
                error = without_frames(e, 2)
                attribute(error, self.label, traceback_of(error))
            self._complete(future, value, error)
            with self._lock:
                if self._current is future:
                    self._current = None
            # Otherwise these objects would live until the next task.
            del task, future, work, value, error
            if threading.current_thread() is not self._thread:
                return  # it was interrupted, and another thread has gone on
