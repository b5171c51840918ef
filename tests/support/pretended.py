"""A pretended accelerator, which has tensors and computes nothing. Importing this sets it up.

Only programs of their own do: it stays as long as the process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretended")
_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def empty(size: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns a tensor on the accelerator."""
    return torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.float32)


def implement(name: str, function: Any) -> None:
    """Has a function do the work of an operator there."""
    _library.impl(name, function, "PrivateUse1")


implement("empty.memory_format", lambda size, *, dtype=None, **_: empty(size, dtype))
