"""Which names of torch's are replaced, and by what."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.rpc as torch_rpc

import zrpc
from zrpc.drop_in.names import KEPT, MODULES, REPLACEMENTS, advice
from zrpc.drop_in.replacement import replace_names


@pytest.mark.system
def test_each_name_that_is_kept_or_replaced_exists_in_torch() -> None:
    names = {name for module in MODULES for name in vars(importlib.import_module(module))}
    assert (KEPT | set(REPLACEMENTS)) <= names
    assert not KEPT & set(REPLACEMENTS)
    for name, home in sorted(REPLACEMENTS.items()):
        assert hasattr(importlib.import_module(home), name)


def test_constants_of_torch_that_stay_agree_with_ours() -> None:
    constants = torch_rpc.constants
    assert constants.UNSET_RPC_TIMEOUT == zrpc.UNSET_RPC_TIMEOUT
    options = zrpc.ZmqRpcBackendOptions()
    assert options.rpc_timeout == constants.DEFAULT_RPC_TIMEOUT_SEC
    assert options.num_worker_threads == constants.DEFAULT_NUM_WORKER_THREADS
    assert options.init_method == constants.DEFAULT_INIT_METHOD


def test_advice_is_specific_if_there_is_some() -> None:
    assert "one back end" in advice("torch.distributed.rpc.backend_registry.register_backend")
    assert "coming-from-torch" in advice("torch.distributed.rpc.something_else")


class _Own:
    """Stands for a class of torch's."""


_Own.__module__ = "torch.distributed.rpc.api"


def _own(number: int) -> int:
    return number


_own.__module__ = "torch.distributed.rpc.api"


def test_names_are_replaced_or_raise_when_they_are_used_and_others_stay() -> None:
    module: Any = ModuleType("one")
    vars(module).update(
        rpc_sync=_own, ProfilerManager=_Own, method=_own, serialize=_own, os=os, limit=3
    )
    replace_names(module)
    assert module.rpc_sync is zrpc.rpc_sync
    assert (module.serialize, module.os, module.limit) == (_own, os, 3)
    assert set(dir(module)) >= {"rpc_sync", "ProfilerManager", "method", "limit"}
    with pytest.raises(AttributeError, match="module 'one' has no attribute 'rpc_snyc'"):
        module.rpc_snyc  # noqa: B018
    with pytest.raises(NotImplementedError, match=r"but got one\.method: "):
        module.method(1)
    with pytest.raises(NotImplementedError, match=r"one\.ProfilerManager: zrpc can't profile"):
        module.ProfilerManager()
    assert not isinstance(3, module.ProfilerManager)
    assert issubclass(type("Mine", (module.ProfilerManager,), {}), module.ProfilerManager)
