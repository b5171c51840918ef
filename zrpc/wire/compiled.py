"""How functions and modules that ``torch.compile`` returned are pickled.

They arrive compiled, with the same settings: the original is sent, and the receiver compiles it
when it is called. What was compiled before stays behind. A compiled function that can be imported
is sent by its name, like any other.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

_HOME = "torch._dynamo.eval_frame"
# What each layer of a backend calls the next one; torch 2.8 and older use the second name.
_INNER = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")


def reduce_compiled_function(value: Any) -> Any:
    """Reduces a compiled function that can't be imported; NotImplemented for other values.

    Also reduces modules of settings, such as ``torch._dynamo.config``: their classes are their own,
    and decorators of compiled functions copy references to them.
    """
    if (
        isinstance(value, ModuleType)
        and type(value) is not ModuleType
        and sys.modules.get(value.__name__) is value
    ):
        return importlib.import_module, (value.__name__,)
    if type(value) is not FunctionType or value.__globals__.get("__name__") != _HOME:
        return NotImplemented
    original = getattr(value, "_torchdynamo_orig_callable", None)
    context = _context(value)
    if original is None or context is None or _is_importable(value):
        return NotImplemented
    return _reduce(original, context)


def reduce_compiled_module(module: Any) -> Any:
    """Reduces a compiled module, an ``OptimizedModule``."""
    return _reduce(module._orig_mod, module.dynamo_ctx)


def reduce_compiler(context: Any) -> Any:
    """Reduces what compiles, an ``OptimizeContext``; decorators copy references to it."""
    return _make_compiler, (_settings(context),)


def _is_importable(function: FunctionType) -> bool:
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _reduce(original: Any, context: Any) -> Any:
    if not callable(context.callback):  # of `torch.compiler.disable`
        return torch.compiler.disable, (original,)
    return _compile, (original, _settings(context))


def _settings(context: Any) -> dict[str, Any]:
    """Returns the arguments of ``torch.compile``."""
    backend, fullgraph = context.callback, False
    while (name := next((each for each in _INNER if hasattr(backend, each)), None)) is not None:
        fullgraph = fullgraph or getattr(backend, "_one_graph", False)
        backend = getattr(backend, name)
    return {"fullgraph": fullgraph, "dynamic": context._dynamic, **_of_backend(backend)}


def _of_backend(backend: Any) -> dict[str, Any]:
    if isinstance(backend, torch._TorchCompileInductorWrapper):
        return {"options": backend.config or None}
    if not isinstance(backend, torch._TorchCompileWrapper):
        return {"backend": backend}
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    name, function = backend.compiler_name, backend.compiler_fn
    is_known = name in list_backends(exclude_tags=()) and lookup_backend(name) is function
    return {"backend": name if is_known else function, **backend.kwargs}


def _compile(original: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return torch.compile(original, **settings)


def _make_compiler(settings: dict[str, Any]) -> Any:
    return _context(torch.compile(_make_compiler, **settings))


def _context(compiled: Any) -> Any:
    """Returns what has compiled a function: a variable of the function around it."""
    cells = zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True)
    return next((cell.cell_contents for name, cell in cells if name == "self"), None)
