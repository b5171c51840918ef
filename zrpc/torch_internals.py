"""torch's private names that zrpc uses, each with what it is used for.

Any release of torch may change them. All were tried with torch 2.13.
`tests/test_torch_internals.py` has a test for each, which names the one that another torch has
changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import profiler
from torch.distributed import distributed_c10d, is_available
from torch.utils.hooks import RemovableHandle

Hooks = dict[int, Any]

# Runs torch's engine. `torch.autograd.backward` adds Python, which takes half the time of a short
# run.
run_backward: Any = torch.autograd.Variable._execution_engine.run_backward

# The run whose node or hook this thread runs; -1 if there is none. A hook on a node that several
# runs share so knows which of them has called it.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


# Older releases of torch have none.
_remove: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)

T = TypeVar("T")


class EngineLocal(Generic[T]):
    """A value of a thread, which the threads of torch's engine have as well that it calls.

    Args:
        name: unique in the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def get(self) -> T | None:
        """Returns this thread's value; None if it has none."""
        if not torch._C._is_key_in_tls(self._name):
            return None
        value: T | None = torch._C._get_obj_in_tls(self._name)
        return value

    def set(self, value: T | None) -> T | None:
        """Sets this thread's value, or removes it; returns what it was before.

        That is to be set again at the end: a thread that ends with a value, even None, takes the
        interpreter's lock to free it, which ends the process if the interpreter is being finalized.
        """
        before = self.get()
        if value is not None or _remove is None:
            torch._C._stash_obj_in_tls(self._name, value)
        elif before is not None:
            _remove(self._name)
        return before


# A Function's `apply` without the Python that looks for tensors of torch.func.
apply_function: Any = torch._C._FunctionBase.__dict__["apply"]

# The class of a Function's nodes. Its `apply` is what the engine calls.
node_class_of: Callable[[type], Any] = attrgetter("_backward_cls")

# The class of the nodes that add up the gradients of leaves.
_view: Any = torch.empty(0, requires_grad=True).view(0)
ACCUMULATE_NODE: type = type(_view.grad_fn.next_functions[0][0])

# A node's place among those that are ready: the engine runs the highest number first. The first
# node of each thread has 0.
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
rank_last: Callable[[Any], None] = methodcaller("_set_sequence_nr", 0)
rank_second_last: Callable[[Any], None] = methodcaller("_set_sequence_nr", 1)

# What a tensor is a view of, or None.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
is_view: Callable[[torch.Tensor], bool] = methodcaller("_is_view")

# The number of owners that a tensor has in C++, and that the memory at an address has. A gradient
# that nothing else uses may be changed in place. In old versions without CUDA, memory seems to have
# many.
tensor_uses: Callable[[torch.Tensor], int] = methodcaller("_use_count")
_memory_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: sys.maxsize)


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Returns the number of owners that a tensor's memory has in C++."""
    return _memory_uses(storage._cdata)


@contextmanager
def saved_without_memory(data: torch.Tensor) -> Iterator[None]:
    """Replaces what nodes save in a ``with`` block by ``data``, with the same place in the graph.

    Only private names permit that while a program has disabled hooks of saved tensors.
    """
    disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if disabled is not None:
        _autograd._saved_tensors_hooks_enable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: data):
            yield
    finally:
        if disabled is not None:
            _autograd._saved_tensors_hooks_disable(disabled)


_autograd: Any = torch._C._autograd


def hooks_of_leaf(leaf: torch.Tensor) -> tuple[Hooks | None, Hooks | None]:
    """Returns a leaf's hooks on its gradient, and those that run when ``.grad`` has changed."""
    return leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)


def wrap_hook_registration(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the function that torch calls for each hook that Python adds to a node.

    It gets the node's dict of hooks, or None for the first one, and the hook. It returns the dict
    and a handle.
    """
    function: Any = torch.autograd.Function
    function._register_hook = staticmethod(wrap(function._register_hook))


def wrap_engine(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the function with which ``torch.autograd.backward`` and ``grad`` run the engine.

    It gets the roots, and at the fourth place after them the inputs, if only their gradients are
    asked for. `run_backward` stays as it is.
    """
    wrapped: Any = wrap(torch.autograd.graph._engine_run_backward)
    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = wrapped  # type: ignore[attr-defined]


def any_hook_before() -> bool:
    """Returns whether this process has made a hook of any kind yet."""
    return RemovableHandle.next_id > 0


def has_process_group() -> bool:
    """Returns whether this process has a process group; quicker than `is_initialized`."""
    return _world is not None and _world.default_pg is not None


_world: Any = distributed_c10d._world if is_available() else None


def is_profiling() -> bool:
    """Returns whether torch's profiler is on."""
    return profiler._is_profiler_enabled
