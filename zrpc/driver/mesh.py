"""`start_mesh`: a program or a notebook starts a mesh on its own host, and is its driver."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from zrpc.agent.agent import Agent
from zrpc.agent.current import find_agent
from zrpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, Seconds
from zrpc.driver.place import DRIVER, MeetingPlace
from zrpc.driver.processes import WorkerProcesses, check_interpreter
from zrpc.errors import RendezvousError, RpcError
from zrpc.launch.store import parse_address
from zrpc.launch.worker import Roles
from zrpc.membership.launched import launching
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.store import connect_store
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import ZmqRpcBackendOptions, checked_options
from zrpc.runtime.forks import free_in_child

_RPC_TIMEOUT = "ZRPC_RPC_TIMEOUT"
# Held by start_mesh: one mesh at a time.
_start_lock = free_in_child(threading.Lock())
# Keeps the mesh that this process has started: without a variable it would otherwise end at once.
_latest: DriverMesh | None = None


def start_mesh(
    workers: int | Mapping[str, int],
    *,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    rpc_backend_options: ZmqRpcBackendOptions | None = None,
) -> DriverMesh:
    """Starts workers on this host, and joins their mesh as ``driver``; returns when all can call.

    This program needs no launcher and no ``if __name__ == "__main__":``. It may be a script, also
    one from standard input, an interactive session, or a notebook. The workers run no script: they
    serve calls of this process and of each other. Functions and classes of the script, or of cells,
    go to them by value. They get the environment, the folder and ``sys.path`` that this process has
    now, and ``RANK``, ``WORLD_SIZE`` and ``MASTER_PORT`` for a process group of the workers.

    The mesh has no deadline. It ends by `DriverMesh.close`, or at the end of a ``with`` statement.
    When this process ends, in any way, all workers end with it, and all that they have started.

    Args:
        workers: how many; they are ``worker0``, ``worker1`` … Or the number for each role:
            ``{"learner": 1, "rollout": 4}`` starts ``learner0`` and ``rollout0`` to ``rollout3``,
            with ranks in this order. A worker finds its role in ``ZRPC_ROLE``. This process is
            ``driver``, with the last rank.
        env: variables for the workers, in addition to this process's. ``ZRPC_RPC_TIMEOUT`` is
            refused beside ``rpc_backend_options``, which have a timeout already.
        max_restarts: how often each worker is started again if its process exits. It joins under
            the same name and rank, as the next incarnation.
        rpc_backend_options: for the workers and the driver. ``init_method`` is ignored.

    Raises:
        RpcError: this process is a worker or a driver already, or is frozen.
        RendezvousError: a worker exits while it starts, or they don't meet within ``init_timeout``
            seconds.
        LaunchError: processes can't be started.
        RuntimeError: a child of multiprocessing has imported the script that calls this.
        ValueError: a number or a role is not possible.
        TypeError: ``workers``, ``env`` or the options have another type.

    May be called from any thread.

    Example:
        >>> import zrpc
        >>> with zrpc.start_mesh({"learner": 1, "rollout": 2}) as mesh:  # doctest: +SKIP
        ...     print(mesh.names, zrpc.rpc_sync(zrpc.group("rollout*"), max, args=(1, 2)))
        ('learner0', 'rollout0', 'rollout1') [2, 2]
    """
    global _latest
    roles = _roles(workers)
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"expected 0 or more restarts, as an int, but got {max_restarts!r}")
    if rpc_backend_options is not None:
        checked_options(rpc_backend_options)
        if _RPC_TIMEOUT in (env or {}):
            raise ValueError(
                f"expected {_RPC_TIMEOUT} in env, or rpc_backend_options, but got both: these have "
                "a timeout already, so pass it as their rpc_timeout"
            )
    with _start_lock:
        _check_free()
        check_interpreter()
        processes = WorkerProcesses(roles, env or {}, max_restarts)
        try:
            place = processes.start(rpc_backend_options)
            with launching(processes.directory):
                agent = place.join_as_driver()
        except BaseException:
            processes.stop(hurried=True)
            raise
        _latest = DriverMesh(agent, [member.name for member in roles], processes)
        return _latest


def connect(
    address: str,
    secret: str | None = None,
    *,
    name: str = DRIVER,
    rpc_backend_options: ZmqRpcBackendOptions | None = None,
) -> DriverMesh:
    """Joins an elastic mesh that runs elsewhere, from a script or a notebook, and leaves it alone.

    The mesh was started by ``zrpc launch --elastic --listen HOST:PORT``, or has a worker of rank 0
    that hosts its store. It goes on when this process leaves by `DriverMesh.close`, at the end of a
    ``with`` statement, or in any other way. This process needs no variables; its firewall must let
    the workers connect to it.

    Args:
        address: where the workers meet, as ``HOST:PORT``.
        secret: the mesh's cluster secret. Default: that of ``ZRPC_SECRET_FILE`` or ``ZRPC_SECRET``.
        name: this process's name, unique in the mesh.
        rpc_backend_options: for this process. ``init_method`` is ignored.
            ``init_timeout`` seconds (default: 60) may pass until the mesh is there.

    Raises:
        RpcError: this process is a worker or a driver already.
        RendezvousError: there is no mesh at the address, its number of workers is fixed, or a
            member has the name.
        AuthenticationError: the secret is another than the workers'.
        ValueError: the address has another form.
        RuntimeError: the name has another form than `WorkerInfo` has.
        TypeError: the options or the secret have another type.

    May be called from any thread.

    Example:
        >>> import zrpc
        >>> with zrpc.connect("head:29500", "my secret ...") as mesh:  # doctest: +SKIP
        ...     print(mesh.names, zrpc.rpc_sync("worker0", max, args=(1, 2)))
        ('worker0', 'worker1') 2
    """
    global _latest
    url = f"tcp://{parse_address(address)}"
    options = checked_options(rpc_backend_options)
    # Checks them before the wait for the mesh.
    WorkerInfo(name, 0)
    if secret is not None:
        ClusterSecret(secret)
    place = MeetingPlace(url, None, secret, options)
    with _start_lock:
        _check_free()
        try:
            store = connect_store(url, None, None, options.init_timeout)
        except RendezvousError as error:
            reason: BaseException = error
            while reason.__cause__ is not None:  # those above speak of workers and their variables
                reason = reason.__cause__
            raise RendezvousError(
                f"expected an elastic mesh at {address} within {options.init_timeout:g} s, found "
                f"none ({reason}): check the address, or start a mesh by zrpc launch --elastic "
                f"--listen {address}"
            ) from error
        agent = place.join_as_driver(name, store)
        names = [info.name for info in agent.get_worker_infos() if info.name != name]
        _latest = DriverMesh(agent, names)
        return _latest


def _roles(workers: int | Mapping[str, int]) -> Roles:
    counts = workers if isinstance(workers, Mapping) else {"worker": workers}
    for count in (*counts.values(),):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(
                "expected a number of workers, or a mapping from roles to numbers, but got "
                f"{workers!r}"
            )
    if DRIVER in counts:
        raise ValueError(f"expected other roles than {DRIVER!r}: this process has that name")
    if not counts:
        raise ValueError("expected 1 worker or more, but got no role")
    return Roles.of(counts)


def _check_free() -> None:
    """Raises an RpcError if this process is in a mesh; releases one that it has left."""
    if find_agent() is not None:
        how = "zrpc.shutdown()"
        if _latest is not None and not _latest.closed:
            how = f"mesh.close(), where mesh is what start_mesh has returned: {_latest}"
        raise RpcError(f"this process is in a mesh already; leave it first by {how}")
    if _latest is not None:
        _latest.close()


class DriverMesh:
    """A mesh that `start_mesh` or `connect` has joined. Any thread may call its methods.

    It is a context manager: at the end of a ``with`` statement it is closed, gracefully unless an
    exception ends the statement. A mesh that nothing refers to any more goes on.

    Attributes:
        names: the names of the workers at the start, by rank; the driver is not among them.
    """

    def __init__(
        self, agent: Agent, names: Iterable[str], processes: WorkerProcesses | None = None
    ) -> None:
        self.names = tuple(names)
        self._processes = processes
        self._agent = agent
        self._pid = os.getpid()
        self._closed = False
        # Held while it is closed: another thread that closes it waits for that. A signal handler
        # may close it meanwhile in the same thread.
        self._lock = threading.RLock()
        if processes is not None:
            processes.begin_reports(agent)
        atexit.register(self._close_at_exit)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or this process was forked from the driver."""
        return self._closed or os.getpid() != self._pid

    @property
    def pids(self) -> Mapping[str, int]:
        """The process ids of the workers that run, by their names, if `start_mesh` started them."""
        return {} if self._processes is None else self._processes.pids

    def close(self, graceful: bool = True, timeout: Seconds = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
        """Leaves the mesh, and ends it if `start_mesh` started it. Later calls do nothing.

        Args:
            graceful: whether to wait until nothing is in progress, as `zrpc.shutdown` does. If
                false, handlers that run have a second until their worker is killed.
            timeout: the limit of that wait in seconds; 0 means no limit. Workers that have died
                are not waited for. Ctrl-C ends it too.

        Raises:
            RpcTimeoutError: something was still in progress. The workers are stopped nevertheless.
            RpcError: a handler or a callback calls this, and can't wait for itself.
        """
        if self.closed:
            return
        with self._lock:
            if self._closed:
                return
            hurried, processes = True, self._processes
            if processes is not None:
                processes.closing = True
            try:
                self._agent.shutdown(graceful, timeout)
                hurried = not graceful
            finally:
                left = self._agent.closed  # a handler can't wait for itself, and is refused
                if processes is not None and left:
                    processes.stop(hurried)
                elif processes is not None:
                    processes.closing = False
                if left:
                    self._closed = True
                    atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            self.close(graceful=getattr(sys, "last_type", None) is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(graceful=error is None)

    def __repr__(self) -> str:
        state = "closed mesh" if self.closed else "mesh"
        workers = "1 worker" if len(self.names) == 1 else f"{len(self.names)} workers"
        return f"<{state} of {workers} and a driver: {', '.join(self.names)}>"
