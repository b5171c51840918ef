"""Watches for the import of torch, and then replaces the names of its RPC modules.

That is in this process, and in the Python processes that a program starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from zrpc import stand_in
from zrpc.drop_in.names import MODULES

# It holds nothing but a `sitecustomize.py`, which Python imports at its start.
_STARTUP_DIRECTORY = str(Path(__file__).parent / "startup")


class _Finder:
    """Finds torch's modules as the other finders do, and acts once they have been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" and (name not in MODULES or _torch_is_loading()):
            return None
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                _act_after_execution(spec)
                return spec  # type: ignore[no-any-return]
        return None


def install() -> None:
    """Puts zrpc in the place of torch's RPC in this process.

    That is ``torch.distributed.rpc``, ``torch.distributed.autograd``,
    ``torch.distributed.optim.DistributedOptimizer`` and ``torch.distributed.nn.RemoteModule``.
    Idempotent. Call it before or after torch is imported, in the main thread while no other
    thread imports. The names that other modules have already imported from torch are replaced in
    them as well. Processes that are forked from this one inherit it. For those that are started
    in other ways, see `child_environment`.

    Raises:
        RuntimeError: it is too late: torch's RPC runs in this process, or a class was derived from
            one of torch's.

    Example:
        >>> import zrpc.drop_in
        >>> zrpc.drop_in.install()  # doctest: +SKIP
        >>> import torch.distributed.rpc as rpc  # doctest: +SKIP
        >>> rpc.rpc_sync.__module__  # doctest: +SKIP
        'zrpc.api'
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    is_loaded = "torch" in sys.modules and not _torch_is_loading()
    if is_loaded:
        _check_that_nothing_runs()
    stand_in.begin()
    sys.meta_path.insert(0, _Finder())
    if is_loaded:
        from zrpc.drop_in.replacement import rebind

        _replace_in_loaded_modules()
        for name, module in list(sys.modules.items()):
            # torch's compiler goes on to need the types of TorchScript.
            if not name.startswith("torch.") and isinstance(module, ModuleType):
                rebind(module)


def child_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns ``env`` whose ``PYTHONPATH`` makes Python processes install the drop-in.

    Their own Python children inherit it. It has no effect on Python started with ``-I``, ``-E`` or
    ``-S``, nor on an interpreter that doesn't have zrpc.

    Example:
        >>> child_environment({"PYTHONPATH": "/mine"})["PYTHONPATH"].endswith("startup:/mine")
        True
    """
    # An empty entry would mean the working directory.
    before = [path for path in [env.get("PYTHONPATH")] if path]
    if before and _STARTUP_DIRECTORY in before[0].split(os.pathsep):
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join([_STARTUP_DIRECTORY, *before])}


def _torch_is_loading() -> bool:
    # torch imports its own RPC while it is loaded, and needs its own names until then.
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return spec is None or getattr(spec, "_initializing", False)


def _act_after_execution(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _replace_in_loaded_modules()

    loader.exec_module = exec_module


def _loaded_modules() -> list[ModuleType]:
    return [sys.modules[name] for name in MODULES if name in sys.modules]


def _check_that_nothing_runs() -> None:
    from zrpc.drop_in.replacement import derived_classes

    rpc: Any = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and rpc.is_available() and rpc._is_current_rpc_agent_set():
        raise RuntimeError(
            "expected zrpc.drop_in.install() before init_rpc, but torch's RPC is initialized in "
            "this process; call install() earlier, or shut torch's RPC down first"
        )
    if derived := derived_classes(_loaded_modules()):
        raise RuntimeError(
            "expected zrpc.drop_in.install() before classes are derived from those of torch's "
            f"RPC, but found {derived[0].__module__}.{derived[0].__qualname__}; call install() "
            "earlier"
        )


def _replace_in_loaded_modules() -> None:
    from zrpc.drop_in.replacement import replace_names, replace_waits

    replace_waits(sys.modules["torch.futures"])
    for module in _loaded_modules():
        replace_names(module)
