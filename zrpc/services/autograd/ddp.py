"""Which leaves DistributedDataParallel reduces: its reducer hangs on their AccumulateGrad nodes.

Nothing in Python leads from a parameter to the DDP module that reduces it. So the modules are
noted as they run, by a hook that all modules have while it is installed. It is installed when a
context is entered in a process that has a process group.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["is_reduced", "watch"]

# Guards the two that follow.
_lock = threading.Lock()
_hook: RemovableHandle | None = None
_reduced = WeakIdKeyDictionary()


def watch() -> None:
    """Notes from now on which parameters DDP modules reduce, if this process can have any."""
    global _hook
    if _hook is not None or not (dist.is_available() and dist.is_initialized()):
        return
    with _lock:
        if _hook is None:
            _hook = register_module_forward_pre_hook(_note_parameters)


def is_reduced(leaf: torch.Tensor) -> bool:
    """Returns whether a DDP module that has run reduces the gradient of this leaf."""
    return leaf in _reduced


def _note_parameters(module: torch.nn.Module, _: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        with _lock:
            for parameter in module.module.parameters():
                _reduced[parameter] = True
