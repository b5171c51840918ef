"""Libraries of actors, behind what the workloads use of an RPC module.

The processes of the actors are started here, or by the library. So one process of the benchmark is
enough: the one that calls them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from typing_extensions import override

import zrpc
from zrpc.bench import targets
from zrpc.bench.library import Library

__all__ = ["ActorLibrary", "start"]

# What a pickle adds to the bytes of a tensor, at most.
_PICKLED_BYTES = 10_000
# For a process to exit by itself.
_EXIT_SECONDS = 5.0


class Peer:
    """An actor. Its methods are named as the functions and methods that the workloads call."""

    def reset(self) -> None:  # makes the counter of `increment`
        self._counter = targets.Counter()

    def nothing(self) -> None:
        targets.nothing()

    def add(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return targets.add(one, other)

    def echo(self, value: Any) -> Any:
        return targets.echo(value)

    def take(self, tensor: torch.Tensor) -> float:
        return targets.take(tensor)

    def increment(self) -> int:
        return self._counter.increment()

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        targets.load(weights)

    def numbers(self, count: int) -> Iterator[int]:
        yield from targets.numbers(count)

    def tensors(self, count: int, size: int) -> Iterator[torch.Tensor]:
        yield from targets.tensors(count, size)


class _Actors(Protocol):
    """The peers ``worker1``, ``worker2``, ... of one library; only Ray has all of these."""

    def begin(self, peer: str, method: str, args: Sequence[Any]) -> Callable[[], Any]:
        """Begins to call a method; returns what waits for its result."""

    def stop(self) -> None:
        """Stops all actors and everything that was started for them."""

    def call_all(self, peers: Sequence[str], method: str, args: Sequence[Any]) -> list[Any]:
        """Calls a method on several peers, with the same arguments; returns the results."""

    def stream(self, peer: str, method: str, args: Sequence[Any]) -> Iterator[Any]:
        """Returns the items of a method that is a generator."""

    def queue(self) -> Any:
        """Makes a queue between processes. Its ``put`` and ``get`` wait until it is done."""

    def compiled(
        self, peer: str, method: str, size: int
    ) -> AbstractContextManager[Callable[[Any], Any]]:
        """Prepares the calls of a method whose argument and result have at most that many bytes."""


class _Ray:
    def __init__(self, workers: int, directory: str) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        ray.init(
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=directory,
        )
        self._ray = ray
        actor = ray.remote(num_cpus=0)(Peer)
        self._peers = {f"worker{rank}": actor.remote() for rank in range(1, workers)}

    def begin(self, peer: str, method: str, args: Sequence[Any]) -> Callable[[], Any]:
        reference = getattr(self._peers[peer], method).remote(*args)
        return lambda: self._ray.get(reference)

    def call_all(self, peers: Sequence[str], method: str, args: Sequence[Any]) -> list[Any]:
        stored = [self._ray.put(each) for each in args]
        found = [getattr(self._peers[peer], method).remote(*stored) for peer in peers]
        return list(self._ray.get(found))

    def stream(self, peer: str, method: str, args: Sequence[Any]) -> Iterator[Any]:
        streaming = getattr(self._peers[peer], method).options(num_returns="streaming")
        return map(self._ray.get, streaming.remote(*args))

    def queue(self) -> Any:
        from ray.util.queue import Queue

        return Queue(actor_options={"num_cpus": 0})

    @contextmanager
    def compiled(self, peer: str, method: str, size: int) -> Iterator[Callable[[Any], Any]]:
        from ray.dag import InputNode

        with InputNode() as value:
            graph = getattr(self._peers[peer], method).bind(value)
        made = graph.experimental_compile(_buffer_size_bytes=size + _PICKLED_BYTES)
        try:
            yield lambda value: self._ray.get(made.execute(value))
        finally:
            made.teardown()

    def stop(self) -> None:
        self._ray.shutdown()


class _Monarch:
    def __init__(self, workers: int) -> None:
        from monarch.actor import Actor, endpoint, this_host

        methods = {k: endpoint(v) for k, v in vars(Peer).items() if not k.startswith("_")}
        actor = type("MonarchPeer", (Peer, Actor), methods)
        self._processes = this_host().spawn_procs(per_host={"peers": workers - 1})
        actors = self._processes.spawn("peers", actor)
        self._peers = {f"worker{rank}": actors.slice(peers=rank - 1) for rank in range(1, workers)}

    def begin(self, peer: str, method: str, args: Sequence[Any]) -> Callable[[], Any]:
        wait: Callable[[], Any] = getattr(self._peers[peer], method).call_one(*args).get
        return wait

    def stop(self) -> None:
        from monarch.actor import shutdown_context

        self._processes.stop().get()
        shutdown_context().get()


class _Rpyc:
    """RPyC over pairs of Unix sockets. It refers to what can change: so tensors go as pickles."""

    def __init__(self, workers: int) -> None:
        import rpyc

        self._connections = []
        self._processes = []
        self._calls: dict[str, Any] = {}
        for rank in range(1, workers):
            own, of_peer = socket.socketpair()
            process = multiprocessing.get_context("fork").Process(target=_serve, args=(of_peer,))
            process.start()
            of_peer.close()
            self._processes.append(process)
            self._connections.append(rpyc.connect_stream(rpyc.SocketStream(own)))
            self._calls[f"worker{rank}"] = rpyc.async_(self._connections[-1].root.call)

    def begin(self, peer: str, method: str, args: Sequence[Any]) -> Callable[[], Any]:
        result = self._calls[peer](method, _pickled(args or None))
        return lambda: _unpickled(result.value)

    def stop(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_EXIT_SECONDS)
            process.kill()
            process.join()


def _serve(connected: socket.socket) -> None:
    """The process of a peer of RPyC; ends with the connection."""
    import rpyc

    peer = Peer()

    class Service(rpyc.Service):  # type: ignore[misc]
        def exposed_call(self, method: str, args: bytes | None) -> bytes | None:
            return _pickled(getattr(peer, method)(*_unpickled(args) or ()))

    rpyc.connect_stream(rpyc.SocketStream(connected), Service).serve_all()


def _pickled(value: Any) -> bytes | None:
    return None if value is None else pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _unpickled(data: bytes | None) -> Any:
    return None if data is None else pickle.loads(data)


_KINDS: dict[str, Callable[[int, str], Any]] = {
    "ray": _Ray,
    "monarch": lambda workers, directory: _Monarch(workers),
    "rpyc": lambda workers, directory: _Rpyc(workers),
}


@dataclass(frozen=True)
class _Methods:
    """The methods of an actor: each is called by its name, with its arguments."""

    _call: Callable[[str, Sequence[Any]], Any]

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self._call(method, args)


class _Rpc:
    """The functions of an RPC module. A call of a function is one of the method of that name."""

    def __init__(self, actors: _Actors) -> None:
        self._actors = actors
        self.begin = actors.begin

    def rpc_sync(self, to: Any, func: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        if isinstance(to, str):
            return self.begin(to, func.__name__, args)()
        return self._actors.call_all(to, func.__name__, args)

    def group(self, members: Sequence[str]) -> Sequence[str]:
        return members

    def compiled(
        self, to: str, func: Callable[..., Any], size: int
    ) -> AbstractContextManager[Callable[[Any], Any]]:
        return self._actors.compiled(to, func.__name__, size)

    def rpc_stream(self, to: str, func: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return self._actors.stream(to, func.__name__, args)

    def rpc_async(self, to: str, func: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return SimpleNamespace(wait=self.begin(to, func.__name__, args))

    def remote(self, to: str, func: type[Any]) -> Any:
        if func is zrpc.Queue:
            queue = self._actors.queue()
            return SimpleNamespace(rpc_sync=lambda: queue)
        self.begin(to, "reset", ())()
        sync = _Methods(lambda method, args: self.begin(to, method, args)())
        later = _Methods(lambda method, args: SimpleNamespace(wait=self.begin(to, method, args)))
        return SimpleNamespace(rpc_sync=lambda: sync, rpc_async=lambda: later)


@dataclass
class ActorLibrary(Library):
    """A library of actors, in the process that calls them."""

    _actors: _Actors = field(repr=False)

    @override
    def leave(self) -> None:
        self._actors.stop()


def start(name: str, workers: int, directory: str) -> ActorLibrary:
    """Starts actors as ``worker1``, ``worker2``, ...; returns when all of them can be called.

    Args:
        name: one of `zrpc.bench.library.ACTOR_LIBRARIES`.
        workers: the number of workers, with this process as the first.
        directory: where Ray keeps its files; the caller removes it. Monarch has a place of its own.
    """
    actors = _KINDS[name](workers, directory)
    for wait in [actors.begin(f"worker{rank}", "nothing", ()) for rank in range(1, workers)]:
        wait()
    return ActorLibrary(name, _Rpc(actors), None, actors)
