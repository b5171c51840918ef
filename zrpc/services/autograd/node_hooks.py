"""Whether a program has hooks on nodes of autograd's graph.

A node does not list its hooks. To find out whether it has any, one must be added and removed again,
for each leaf in each pass. But torch calls a function in Python for each hook that Python adds to a
node. So a wrapper around that function notes all hooks, and as long as there are none, no node is
looked at. Most programs have hooks on tensors only, or hooks of modules for the forward pass, which
don't count here. Full backward hooks of modules do: torch hangs them on nodes of each graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zrpc.torch_internals import any_hook_before, wrap_hook_registration

__all__ = ["OwnHook", "any_registered"]


class OwnHook(partial[Any]):
    """A hook of zrpc's own on a node: a function, with its first arguments."""


# The dictionaries of hooks that nodes have, by their ids. A dictionary lives as long as its node.
# Single operations on the dict are atomic.
_noted: dict[int, weakref.ref[dict[int, Any]]] = {}


def _noting(register: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(hooks: Any, hook: Any) -> Any:
        hooks, handle = register(hooks, hook)
        if not isinstance(hook, OwnHook) and id(hooks) not in _noted:
            key = id(hooks)
            _noted[key] = weakref.ref(hooks, lambda _: _noted.pop(key, None))
        return hooks, handle

    return wrapper


def _install() -> bool:
    """Notes all hooks from now on; returns whether it works, and whether there were none before."""
    none_before = not any_hook_before()
    wrap_hook_registration(_noting)
    node: Any = torch.ones(1, requires_grad=True).view(1).grad_fn
    for register in (node.register_hook, node.register_prehook):
        register(print)
    return none_before and len(_noted) == 2


def any_registered() -> bool:
    """Returns whether any node may have a hook other than zrpc's own."""
    return not _complete or bool(_noted and any(each() for each in list(_noted.values())))


_complete = _install()
