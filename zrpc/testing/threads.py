"""A mesh inside of this process: each worker is an agent and a thread of its own."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from zrpc.testing.failure import attribute, traceback_of, without_frames
from zrpc.testing.leaks import lasting
from zrpc.testing.spec import MeshSpec
from zrpc.testing.stacks import stacks_of
from zrpc.testing.worker import Worker, described

if TYPE_CHECKING:
    import torch.distributed as dist

    from zrpc.agent import Agent
    from zrpc.secret import ClusterSecret

__all__ = ["ThreadWorker", "import_core", "thread_workers"]

_Task = tuple[Future[Any], Callable[[], Any]]


def thread_workers(spec: MeshSpec) -> list[Worker]:
    """The workers of a mesh that meet in a store of this process; none is started yet."""
    import_core()
    import torch.distributed as dist

    from zrpc.secret import ClusterSecret, new_secret

    store, secret = dist.HashStore(), ClusterSecret(new_secret())
    return [ThreadWorker(name, rank, spec, store, secret) for rank, name in enumerate(spec.names)]


def import_core() -> None:
    """Imports it here, not in N threads at once; what libraries keep open is theirs."""
    if "zrpc.api" not in sys.modules:
        with lasting():
            import zrpc.api  # noqa: F401


class ThreadWorker(Worker):
    """A worker that is a thread of this process; see `Worker`."""

    def __init__(
        self, name: str, rank: int, spec: MeshSpec, store: dist.Store, secret: ClusterSecret
    ) -> None:
        super().__init__(name, rank)
        self._secret = secret
        self._spec = spec
        self._store = store
        # Set and cleared by the worker's thread.
        self._agent: Agent | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name=f"zrpc-test-{name}-main", daemon=True
        )
        self._closer: threading.Thread | None = None

    @property
    def label(self) -> str:
        """The worker as a reader knows it."""
        return f"{self.name} (a thread)"

    @property
    def agent(self) -> Agent:
        """The worker's agent.

        Raises:
            RuntimeError: it has not started, or is shut down.
        """
        if self._agent is None:
            raise RuntimeError(f"{self.name} has no agent: it is not started, or is shut down")
        return self._agent

    def start(self) -> Future[Any]:
        """Starts the worker's thread and has it join the mesh."""
        self._thread.start()
        return self._do("starts", self._start)

    def submit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        """Has ``fn(*args, **kwargs)`` run in the worker's thread, its agent current."""

        def call() -> Any:
            with self.agent.as_current():
                return fn(*args, **kwargs)

        return self._do(f"runs {described(fn)}", call)

    def shutdown(self, graceful: bool) -> Future[list[str]]:
        """Shuts the agent down, in the worker's thread."""

        def leave() -> list[str]:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.shutdown(graceful=graceful)
            return []

        return self._do("shuts down", leave)

    def stacks(self) -> str:
        """The stacks of the worker's and its agent's threads, innermost call last."""
        return stacks_of(self.name)

    def end(self) -> None:
        """Closes the agent, which fails its calls; a function that does no calls goes on."""
        with self._lock:
            agent = self._agent
            if agent is None or self._closer is not None:
                return
            # A thread of its own, since the worker's is busy and the caller's must not block.
            self._closer = threading.Thread(
                target=agent.close, name=f"zrpc-test-{self.name}-close", daemon=True
            )
            self._closer.start()

    def dismiss(self) -> None:
        """Ends the worker's thread once it has done what it was told to."""
        self._tasks.put(None)

    def close(self, timeout: float) -> list[str]:
        """Waits for the end of the worker's thread.

        Returns:
            Nothing: what is left behind is left in this process, where the test looks.
        """
        for thread in (self._closer, self._thread):
            if thread is not None and thread.ident is not None:
                thread.join(timeout)
        if self._thread.is_alive():
            # It runs on, as no thread can be killed: it must not pass for a later mesh's.
            self._thread.name = f"zrpc-test-abandoned-{self._thread.native_id}"
        return []

    def _do(self, what: str, work: Callable[[], Any]) -> Future[Any]:
        future = self._enter(what)
        if not future.done():
            self._tasks.put((future, work))
        return future

    def _start(self) -> None:
        from zrpc.api import start_agent
        from zrpc.options import ZmqRpcBackendOptions

        agent = start_agent(
            self.name,
            rank=self.rank,
            world_size=None if self._spec.elastic else self._spec.workers,
            store=self._store,
            options=ZmqRpcBackendOptions(**self._spec.options),
            secret=self._secret,
        )
        with self._lock:
            self._agent = agent
            aborted = self._error is not None
        if aborted:  # meanwhile; nobody else has seen the agent
            agent.close()

    def _serve(self) -> None:
        """The life of the worker's thread."""
        while (task := self._tasks.get()) is not None:
            future, work = task
            value, error = None, None
            try:
                value = work()
            except BaseException as e:  # also pytest's outcomes, SystemExit: all the test's
                error = without_frames(e, 2)
                attribute(error, self.label, traceback_of(error))
            self._settle(future, value, error)
            # What they refer to must not live on until the next task.
            del task, future, work, value, error
