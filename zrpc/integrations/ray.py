"""Starts a mesh on Ray: one worker in each Ray actor, and the driver as one more member.

Ray places the actors, restarts them and stops them. Calls, references and gradients go through
zrpc. The workers meet in a store that the driver hosts, so the mesh ends with its driver. The
secret of the mesh is sent to the actors by Ray, as an argument.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from zrpc.agent.agent import Agent
from zrpc.agent.current import find_agent
from zrpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, Seconds
from zrpc.driver.place import DRIVER, MeetingPlace
from zrpc.errors import RendezvousError, RpcError
from zrpc.launch.port import ReservedPort
from zrpc.membership.init_method import master
from zrpc.membership.secret import new_secret
from zrpc.membership.store import tcp_store
from zrpc.options import ZmqRpcBackendOptions, checked_options

try:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError(
        "zrpc.integrations.ray needs Ray, which is not installed: pip install ray"
    ) from error

__all__ = ["DRIVER", "RayMesh", "start_mesh"]

# Keys of the store: how often the actor of each rank has been started.
_STARTS = "zrpc-ray/starts/"
# For workers to close their sockets when all have agreed to leave.
_STOP_SECONDS = 10.0
# The arguments of Ray's actors for resources that have a name of their own there.
_ARGUMENTS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


@dataclass(frozen=True)
class RayMesh:
    """A mesh whose workers are Ray actors.

    Attributes:
        actors: the handles of the actors, by rank, for functions of Ray such as ``ray.kill``.
        placement_group: where Ray has placed them; bundle i is that of rank i.
    """

    actors: Sequence[Any]
    placement_group: Any


@contextlib.contextmanager
def start_mesh(
    num_workers: int,
    resources_per_worker: Mapping[str, float] | None = None,
    placement: Any = "PACK",
    *,
    max_restarts: int = 0,
    rpc_backend_options: ZmqRpcBackendOptions | None = None,
    shutdown_timeout: Seconds = DEFAULT_SHUTDOWN_TIMEOUT,
) -> Iterator[RayMesh]:
    """Starts workers in Ray actors, for a ``with`` statement; this process is a member too.

    The workers are ``worker0``, ``worker1`` …, with ranks from 0. This process is ``driver``, with
    the rank ``num_workers``. At the end of the statement all leave: gracefully, unless an exception
    ends it. Then the actors are stopped.

    Args:
        num_workers: the number of actors; each is one worker.
        resources_per_worker: what Ray reserves for each, as ``{"CPU": 2, "GPU": 1}``. Default: one
            CPU.
        placement: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``, as in
            ``ray.util.placement_group``; or a placement group of your own with a bundle for each
            worker, which is not removed at the end.
        max_restarts: how often Ray starts each actor again if it dies; -1 means no limit. The new
            worker joins under the same name and rank, as the next incarnation.
        rpc_backend_options: for all workers and the driver. Ray has ``init_timeout`` seconds to
            place and start the actors, and then the workers have ``init_timeout`` seconds to meet.
            ``init_method`` is ignored.
        shutdown_timeout: the limit of the graceful shutdown in seconds; 0 means no limit.

    Returns:
        A context manager that gives a `RayMesh`.

    Raises:
        RendezvousError: Ray can't place the actors in time, one of them fails to start, or the
            workers don't meet.
        RpcError: this process is a worker already.
        ValueError: a number, a resource or the placement is not possible.
        RpcTimeoutError: at the end, the workers did not shut down in time. They are stopped.

    Call it in one thread at a time.

    Example:
        >>> import ray, zrpc
        >>> from zrpc.integrations.ray import start_mesh
        >>> with start_mesh(2, {"CPU": 1}) as mesh:  # doctest: +SKIP
        ...     print(zrpc.rpc_sync("worker1", max, args=(1, 2)))
        2
    """
    if num_workers < 1:
        raise ValueError(f"expected 1 worker or more, got num_workers={num_workers}")
    if find_agent() is not None:
        raise RpcError("RPC is already initialized: leave that mesh by zrpc.shutdown() first")
    options = checked_options(rpc_backend_options)
    resources = dict(resources_per_worker or {"CPU": 1})
    deadline = time.monotonic() + options.init_timeout
    with contextlib.ExitStack() as stack:
        group = _place(stack, num_workers, resources, placement, options.init_timeout)
        place, store = _host_store(num_workers, options, max_restarts != 0)
        strategies = [PlacementGroupSchedulingStrategy(group, i) for i in range(num_workers)]
        actors = [
            ray.remote(_WorkerActor)
            .options(
                **_actor_arguments(resources),
                scheduling_strategy=strategy,
                max_restarts=max_restarts,
            )
            .remote(place, rank)
            for rank, strategy in enumerate(strategies)
        ]
        for actor in actors:
            stack.callback(ray.kill, actor)
        _await_start(actors, deadline, options.init_timeout)
        agent = _join_with(actors, place, store)
        yield from _serve(agent, RayMesh(actors, group), shutdown_timeout)


class _WorkerActor:
    """A Ray actor that is one worker. Ray calls its methods in one thread, one at a time."""

    def __init__(self, place: MeetingPlace, rank: int) -> None:
        self._place = place
        self._rank = rank
        self._serving: threading.Thread | None = None
        timeout = place.own_options.init_timeout
        try:
            host, port = master(place.init_method)
            self._store = tcp_store(host, port, False, time.monotonic() + timeout, timeout)
        except RendezvousError as error:
            raise RendezvousError(
                f"worker{rank} can't reach the store of the driver at {place.init_method}, "
                f"or the driver has ended: {error}"
            ) from error
        self._restarts = self._store.add(f"{_STARTS}{rank}", 1) - 1
        if self._restarts:
            self.join()  # Ray calls only this method again

    def started(self) -> None:
        """Returns as soon as the actor has started."""

    def join(self) -> None:
        """Joins the mesh, unless this worker has joined it already; then serves until it ends."""
        if self._serving is None:
            name = f"worker{self._rank}"
            agent = self._place.join(name, self._rank, self._restarts, self._store)
            # A worker that waits in its shutdown serves until all others, and so the driver, want
            # to leave. Not in Ray's thread: an actor that starts again must return from here.
            self._serving = threading.Thread(target=agent.shutdown, name="zrpc-ray", daemon=True)
            self._serving.start()

    def left(self) -> None:
        """Returns when this worker has left the mesh, after a few seconds at most."""
        if self._serving is not None:
            self._serving.join(_STOP_SECONDS)


def _place(
    stack: contextlib.ExitStack,
    num_workers: int,
    resources: Mapping[str, float],
    placement: Any,
    timeout: float,
) -> Any:
    """Returns a placement group that Ray has placed; removes it at the end if it is a new one."""
    if isinstance(placement, str):
        group = ray.util.placement_group([dict(resources)] * num_workers, strategy=placement)
        stack.callback(ray.util.remove_placement_group, group)
    else:
        group = placement
        if len(group.bundle_specs) < num_workers:
            raise ValueError(
                f"expected a placement group with a bundle for each of {num_workers} workers, "
                f"found one with {len(group.bundle_specs)}"
            )
    if not group.wait(timeout):
        raise RendezvousError(
            f"expected Ray to place {num_workers} workers with {dict(resources)} each within "
            f"{timeout:g} s, as {group.bundle_specs and placement!r}; its nodes have "
            f"{_amounts(ray.cluster_resources())}, with {_amounts(ray.available_resources())} "
            "free: ask for less, add nodes, wait for other jobs to end, or raise init_timeout"
        )
    return group


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    """Returns the resources without those that Ray adds for nodes and placement groups."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if ":" not in name and "_group_" not in name and name != "object_store_memory"
    }


def _actor_arguments(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns an actor's options: what it needs of its bundle."""
    arguments: dict[str, Any] = {"num_cpus": 0}
    arguments |= {_ARGUMENTS[name]: n for name, n in resources.items() if name in _ARGUMENTS}
    return arguments | {"resources": {k: n for k, n in resources.items() if k not in _ARGUMENTS}}


def _host_store(
    num_workers: int, options: ZmqRpcBackendOptions, restarts: bool
) -> tuple[MeetingPlace, Store]:
    """Hosts the store in which the workers meet, at this node's address in the Ray cluster."""
    host = ray.util.get_node_ip_address()
    timeout = options.init_timeout
    with ReservedPort() as port:
        store = tcp_store(host, port.number, True, time.monotonic() + timeout, timeout)
        url = f"tcp://{host}:{port.number}"
        place = MeetingPlace(url, num_workers, new_secret(), options, restarts)
    return place, store


def _await_start(actors: Sequence[Any], deadline: float, timeout: float) -> None:
    """Waits until all actors run.

    Raises:
        RendezvousError: one has failed, or does not run in time.
    """
    ranks = {actor.started.remote(): rank for rank, actor in enumerate(actors)}
    left = list(ranks)
    while left:
        ready, left = ray.wait(left, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RendezvousError(
                f"expected Ray to start the actors within {timeout:g} s, found that those of ranks "
                f"{sorted(ranks[ref] for ref in left)} don't run yet: see Ray's dashboard or "
                "`ray list actors`, or raise init_timeout"
            )
        for ref in ready:
            _raise_failure(ref, f"the actor of worker{ranks[ref]} failed to start")


def _raise_failure(ref: Any, what: str) -> None:
    """Raises RendezvousError if the actor's method, which has ended, has failed."""
    try:
        ray.get(ref)
    except ray.exceptions.RayError as error:
        raise RendezvousError(f"{what}: {error}") from error


def _join_with(actors: Sequence[Any], place: MeetingPlace, store: Store) -> Agent:
    """Joins with all actors at once; returns the driver's agent."""
    joins = [actor.join.remote() for actor in actors]
    try:
        return place.join_as_driver(store=store)
    except RpcError as error:
        ended, _ = ray.wait(joins, num_returns=len(joins), timeout=1.0)
        for ref in ended:
            rank = joins.index(ref)
            _raise_failure(ref, f"{error}; worker{rank} failed to join")
        raise


def _serve(agent: Agent, mesh: RayMesh, timeout: Seconds) -> Iterator[RayMesh]:
    """Lends the mesh to the program; all leave it afterwards."""
    try:
        yield mesh
    except BaseException:
        agent.close()
        raise
    agent.shutdown(timeout=timeout)
    # They leave at the same time. Let them close their sockets. An actor that Ray is starting again
    # refuses the question, and is killed at once.
    ray.wait(
        [actor.left.remote() for actor in mesh.actors],
        num_returns=len(mesh.actors),
        timeout=_STOP_SECONDS,
    )
