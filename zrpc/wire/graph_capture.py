"""What torch records while a program runs, and what becomes of a call then.

``torch.jit.trace`` records what a thread does with tensors. A call isn't recorded: its result is a
constant of the trace, and a warning says so. ``torch.export``, ``make_fx`` and ``torch.fx`` make
graphs that are used in the place of the program, so a call fails there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch._C import _get_tracing_state
from torch.fx.proxy import Attribute, MetaProxy, ParameterProxy, Proxy
from torch.utils._pytree import tree_map_only

from zrpc.errors import SerializationError

# The types of what stands for values in ``torch.fx.symbolic_trace``.
PROXIES = (Proxy, Attribute, MetaProxy, ParameterProxy)

is_tracing = torch._C._is_tracing
count_modes = torch._C._len_torch_dispatch_stack
_MODES = torch._C._TorchDispatchModeKey
_mode = torch._C._get_dispatch_mode
_set_tracing_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


@contextmanager
def uncaptured() -> Iterator[None]:
    """Hides what this thread does in a ``with`` block from ``torch.jit.trace``."""
    state = _get_tracing_state()
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(state)


def constant_of(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what a function returns, as a constant of the trace that this thread makes.

    Constants can't require grad.
    """
    with uncaptured():
        return tree_map_only(torch.Tensor, torch.Tensor.detach, function(*args))


def warn() -> None:
    """Warns that ``torch.jit.trace`` does not record the call that this thread makes."""
    warnings.warn(
        "torch.jit.trace does not record calls to other workers: the result of this call will be a "
        "constant of the trace",
        torch.jit.TracerWarning,
        stacklevel=_level_of_program(),
    )


def check_modes() -> None:
    """Checks whether this thread may make a call in its modes of torch's dispatcher.

    Raises:
        SerializationError: it makes a graph that can't have calls.
    """
    makes_graph = _mode(_MODES.PROXY) is not None
    is_exported = _mode(_MODES.FAKE) is not None and torch.compiler.is_compiling()
    if makes_graph or is_exported:
        raise SerializationError(
            f"expected a call outside of {'torch.export' if is_exported else 'make_fx'}, found one "
            "in its function: a graph can't have calls to other workers; export what comes before "
            "and after the call on its own"
        )


def _level_of_program() -> int:
    """Returns the stack level of the program's frame, for a warning of the caller."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level


def refuse_proxy(proxy: Any) -> NoReturn:
    """Refuses a value of a symbolic trace; a reducer.

    Raises:
        SerializationError: always.
    """
    raise SerializationError(
        f"expected values, found a {type(proxy).__name__} of torch.fx.symbolic_trace, which only "
        "stands for one: a graph can't have calls to other workers; put the call into a function "
        "of its own, and name that function in torch.fx.wrap"
    )
