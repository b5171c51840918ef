"""The two libraries behind one face: their interface is the same, but for how to join."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LIBRARIES", "Library", "current", "load"]

LIBRARIES = ("torch", "zrpc")
_MODULES = {
    "torch": ("torch.distributed.rpc", "torch.distributed.autograd"),
    "zrpc": ("zrpc", "zrpc.autograd"),
}
# The one that this process has joined with; set once, in the process's main thread.
_current: Library | None = None


@dataclass
class Library:
    """An RPC library in a process that measures it.

    Attributes:
        name: one of `LIBRARIES`.
        rpc: its module with ``rpc_sync`` and the like.
        autograd: its module with ``context`` and ``backward``.
    """

    name: str
    rpc: Any = field(repr=False)
    autograd: Any = field(repr=False)

    def join(self, rank: int, workers: int, *, tcp: bool, init_method: str = "env://") -> None:
        """Joins this process to a mesh, with the library's default options.

        Args:
            rank: this worker's rank; its name is ``worker`` and the rank.
            workers: how many there are.
            tcp: use nothing but tcp.
            init_method: where they meet.
        """
        global _current
        arguments: dict[str, Any] = {"init_method": init_method}
        if self.name == "zrpc":
            options = self.rpc.ZmqRpcBackendOptions
            if tcp:
                # torch encrypts nothing, and what is compared is the way, not the cipher.
                arguments.update(transport="tcp", security="none")
        else:
            options = self.rpc.TensorPipeRpcBackendOptions
            if tcp:
                arguments.update(_transports=["uv"], _channels=["basic"])
        self.rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=workers,
            rpc_backend_options=options(**arguments),
        )
        _current = self

    def leave(self) -> None:
        """Leaves the mesh, together with all others."""
        self.rpc.shutdown()


def load(name: str) -> Library:
    """The library of that name; imports it and no other."""
    rpc, autograd = _MODULES[name]
    return Library(name, importlib.import_module(rpc), importlib.import_module(autograd))


def current() -> Library:
    """The library that this process has joined a mesh with.

    Raises:
        RuntimeError: it has not.
    """
    if _current is None:
        raise RuntimeError("this process has joined no mesh; call Library.join first")
    return _current
