"""Loads the state of a remote module that is part of a local one.

torch loads a state module by module, and shows each module the metadata of itself alone: its
version, for example. So while a state is loaded, each part of the remote module has a stand-in
here, which notes what it is shown. Then the remote module loads its part of the state at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zrpc.services.rref.rref import RRef


class _StandIn(torch.nn.Module):
    """Notes the metadata of a remote module."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        super().__init__()
        self._metadata = metadata
        self.then: Callable[[], None] | None = None

    def _load_from_state_dict(self, _: Any, prefix: str, metadata: Any, *found: Any) -> None:
        self._metadata[prefix[:-1]] = metadata
        if self.then is not None:
            self.then()


def stand_ins(
    names: Sequence[str],
    metadata: dict[str, Any],
    prefix: str,
    own: Any,
    then: Callable[[], None],
) -> dict[str, torch.nn.Module | None]:
    """Returns the parts that a remote module must have while a state is loaded.

    Args:
        names: what `module_names` returns.
        metadata: gets that of all modules.
        prefix: of the keys of the remote module.
        own: the metadata of the remote module itself.
        then: is called when the metadata of all its parts is known.
    """
    made = {name: _StandIn(metadata) for name in names}
    for each in names[1:]:
        parent, _, name = each.rpartition(".")
        made[parent]._modules[name] = made[each]
    made[names[-1]].then = then
    made[""]._load_from_state_dict(None, prefix, own)
    return made[""]._modules


# The functions below run on the worker that has the module.


def module_names(module_rref: RRef[torch.nn.Module]) -> list[str]:
    """Returns the names of the module, which is empty, and of its parts, in torch's order."""
    return [name for name, _ in module_rref.local_value().named_modules(remove_duplicate=False)]


class _Container(torch.nn.Module):
    """Keeps the lists of what torch finds: missing keys, unexpected ones, and errors."""

    found: tuple[list[str], ...] = ()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *found: Any
    ) -> None:
        self.found = found


def load_part(
    module_rref: RRef[torch.nn.Module], state: Mapping[str, Any], prefix: str, assign: bool
) -> tuple[list[str], ...]:
    """Loads a state whose keys have a prefix; returns what torch has found, as three lists."""
    container = _Container()
    container._modules[prefix[:-1]] = module_rref.local_value()
    try:
        container.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError:
        if not (container.found and container.found[-1]):
            raise
    return container.found
