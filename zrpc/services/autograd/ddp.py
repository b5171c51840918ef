"""Which leaves DistributedDataParallel reduces: its reducer hangs on their AccumulateGrad nodes.

Nothing in Python leads from a parameter to the DDP module that reduces it. So the modules are
noted as they run, by a wrapper around the class's ``forward``: a hook would miss programs that
call ``forward`` themselves. It is installed when a context is entered in a process that has a
process group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.parallel import DistributedDataParallel

from zrpc.runtime.forks import free_in_child
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.torch_internals import has_process_group

# Guards the two that follow.
_lock = free_in_child(UninterruptedLock())
_watches = False
# The DDP modules that have run.
_modules: WeakSet[DistributedDataParallel] = WeakSet()


def watch() -> None:
    """Notes from now on which DDP modules run, if this process can have any."""
    global _watches
    if _watches or not has_process_group():
        return
    with _lock:
        if not _watches:
            DistributedDataParallel.forward = _noting(DistributedDataParallel.forward)  # type: ignore[method-assign]
            _watches = True


def in_use() -> bool:
    """Returns whether a run of the engine may wait for other processes of a process group."""
    return bool(_modules)


def reduced_with(leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns all parameters of the DDP modules that reduce some of these leaves.

    That includes parameters that are not among the leaves: DDP gives them a gradient if another
    process has used them.
    """
    if not in_use():
        return []
    with _lock:
        modules = [list(module.parameters()) for module in _modules]
    used = set(map(id, leaves))
    found: dict[int, torch.Tensor] = {}
    for parameters in modules:
        if not used.isdisjoint(map(id, parameters)):
            found.update({id(each): each for each in parameters if each.requires_grad})
    return list(found.values())


def _noting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            _modules.add(self)
        return forward(self, *args, **kwargs)

    return wrapper
