"""The RPC libraries behind one interface. They differ only in how a worker joins."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

LIBRARIES = ("torch", "zrpc")
# Those that have actors in place of RPC; by name, what to install. See `zrpc.bench.actors`.
ACTOR_LIBRARIES = {"ray": "ray>=2.40", "monarch": "torchmonarch>=0.7", "rpyc": "rpyc>=6"}
EVERY_LIBRARY = (*LIBRARIES, *ACTOR_LIBRARIES)
# By library: the module with its calls, and the package of those with the rest.
_MODULES = {"torch": ("torch.distributed.rpc", "torch.distributed"), "zrpc": ("zrpc", "zrpc")}
# The library that this process has joined a mesh with; set once, in the main thread.
_current: Library | None = None


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a worker process that is measured.

    Attributes:
        participant: a library's name, or ``limit``.
        workers: the number of workers; their names are ``worker`` and the rank.
        forms_mesh: whether they form a mesh.
        tcp: whether to use only tcp.
        keys: whether zrpc encrypts what it sends over tcp. torch can't.
        device: the device that tensors of all workers are on; empty for the CPU.
        rank: the worker's rank.
        namespace: the network namespace that the worker enters; empty for none.
        directory: the mesh's directory, with the store for the rendezvous; empty if a launcher has
            set the variables for that.
        socket: the descriptor of the socket for requests and replies.
    """

    participant: str
    workers: int
    forms_mesh: bool = True
    tcp: bool = False
    keys: bool = False
    device: str = ""
    rank: int = 0
    namespace: str = ""
    directory: str = ""
    socket: int = -1


@dataclass
class Library:
    """An RPC library in a process that measures it.

    Attributes:
        name: one of `LIBRARIES` or `ACTOR_LIBRARIES`.
        rpc: its module with ``rpc_sync``, ``rpc_async`` and ``remote``.
        autograd: its module with ``context`` and ``backward``.
    """

    name: str
    rpc: Any = field(repr=False)
    autograd: Any = field(repr=False)

    def join(self, settings: WorkerSettings) -> None:
        """Joins this process to a mesh, with the library's default options."""
        global _current
        rank, workers, device = settings.rank, settings.workers, settings.device
        place = f"file://{settings.directory}/store" if settings.directory else "env://"
        arguments: dict[str, Any] = {"init_method": place}
        if device:
            others = [f"worker{other}" for other in range(workers) if other != rank]
            arguments.update(device_maps={other: {device: device} for other in others})
        if self.name == "torch":
            options = self.rpc.TensorPipeRpcBackendOptions
            over_tcp: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
        else:
            options = self.rpc.ZmqRpcBackendOptions
            # torch does not encrypt, and this compares transports, not ciphers.
            over_tcp = {"transport": "tcp", **({} if settings.keys else {"security": "none"})}
        if settings.tcp:
            arguments |= over_tcp
        self.rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=workers,
            rpc_backend_options=options(**arguments),
        )
        _current = self

    @property
    def optim(self) -> Any:
        """Its module with ``DistributedOptimizer``."""
        # Loaded when it is used: torch's takes a while.
        return importlib.import_module(f"{_MODULES[self.name][1]}.optim")

    def leave(self) -> None:
        """Leaves the mesh, together with all other workers."""
        self.rpc.shutdown()


def load(name: str) -> Library:
    """Imports and returns the library of that name, and no other."""
    rpc, package = _MODULES[name]
    return Library(
        name, importlib.import_module(rpc), importlib.import_module(f"{package}.autograd")
    )


def current() -> Library:
    """Returns the library that this process has joined a mesh with.

    Raises:
        RuntimeError: this process has joined no mesh.
    """
    if _current is None:
        raise RuntimeError("this process has joined no mesh; call Library.join first")
    return _current
