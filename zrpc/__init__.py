"""zrpc: broker-less messaging for PyTorch on ZeroMQ.

It has the interface of ``torch.distributed.rpc``: replace ``import torch.distributed.rpc as
rpc`` with ``import zrpc as rpc``.

Names are loaded when they are first used, so that ``import zrpc`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zrpc import errors as errors
from zrpc.runtime.compiler import watch_for_compiler

if TYPE_CHECKING:
    from zrpc import api as api
    from zrpc import autograd as autograd
    from zrpc import backend_registry as backend_registry
    from zrpc import constants as constants
    from zrpc import functions as functions
    from zrpc import nn as nn
    from zrpc import optim as optim
    from zrpc import options as options
    from zrpc import testing as testing
    from zrpc.actors import actor as actor
    from zrpc.actors import concurrent as concurrent
    from zrpc.agent.call_filter import CallFilter as CallFilter
    from zrpc.api import _get_current_rpc_agent as _get_current_rpc_agent
    from zrpc.api import _is_current_rpc_agent_set as _is_current_rpc_agent_set
    from zrpc.api import _set_rpc_timeout as _set_rpc_timeout
    from zrpc.api import _wait_all as _wait_all
    from zrpc.api import get_rpc_timeout as get_rpc_timeout
    from zrpc.api import get_worker_info as get_worker_info
    from zrpc.api import init_rpc as init_rpc
    from zrpc.api import is_available as is_available
    from zrpc.api import remote as remote
    from zrpc.api import rpc_async as rpc_async
    from zrpc.api import rpc_sync as rpc_sync
    from zrpc.api import shutdown as shutdown
    from zrpc.backend_registry import BackendType as BackendType
    from zrpc.calls.current_call import Call as Call
    from zrpc.calls.current_call import current_call as current_call
    from zrpc.calls.future import Future as Future
    from zrpc.calls.future_group import as_completed as as_completed
    from zrpc.calls.future_group import collect_all as collect_all
    from zrpc.calls.future_group import wait_all as wait_all
    from zrpc.constants import UNSET_RPC_TIMEOUT as UNSET_RPC_TIMEOUT
    from zrpc.driver.mesh import DriverMesh as DriverMesh
    from zrpc.driver.mesh import connect as connect
    from zrpc.driver.mesh import start_mesh as start_mesh
    from zrpc.errors import *  # noqa: F403
    from zrpc.functions import batched as batched
    from zrpc.groups import each as each
    from zrpc.groups import group as group
    from zrpc.groups import share as share
    from zrpc.groups import split as split
    from zrpc.launch.processes import spawn as spawn
    from zrpc.membership.worker_info import WorkerInfo as WorkerInfo
    from zrpc.mesh import all_gather as all_gather
    from zrpc.mesh import barrier as barrier
    from zrpc.mesh import get_actor as get_actor
    from zrpc.mesh import get_worker_infos as get_worker_infos
    from zrpc.mesh import is_initialized as is_initialized
    from zrpc.mesh import on_worker_joined as on_worker_joined
    from zrpc.mesh import on_worker_lost as on_worker_lost
    from zrpc.mesh import session as session
    from zrpc.mesh import set_rpc_timeout as set_rpc_timeout
    from zrpc.mesh import span as span
    from zrpc.mesh import stats as stats
    from zrpc.mesh import trace as trace
    from zrpc.mesh import world_size as world_size
    from zrpc.options import ProcessGroupRpcBackendOptions as ProcessGroupRpcBackendOptions
    from zrpc.options import RpcBackendOptions as RpcBackendOptions
    from zrpc.options import TensorPipeRpcBackendOptions as TensorPipeRpcBackendOptions
    from zrpc.options import ZmqRpcBackendOptions as ZmqRpcBackendOptions
    from zrpc.services.debugger.debugger import breakpoint as breakpoint
    from zrpc.services.queue.queue import Queue as Queue
    from zrpc.services.rref.rref import PyRRef as PyRRef
    from zrpc.services.rref.rref import RRef as RRef
    from zrpc.streams import Stream as Stream
    from zrpc.streams import rpc_stream as rpc_stream
    from zrpc.testing.startup import local_mesh as local_mesh

    __version__: str

watch_for_compiler()
# The names of each module; those of zrpc itself are modules.
_NAMES = {
    "zrpc": "api autograd backend_registry constants errors functions nn optim options testing",
    "zrpc.actors": "actor concurrent",
    "zrpc.agent.call_filter": "CallFilter",
    "zrpc.api": """_get_current_rpc_agent _is_current_rpc_agent_set _set_rpc_timeout _wait_all
        get_rpc_timeout get_worker_info init_rpc is_available remote rpc_async rpc_sync shutdown""",
    "zrpc.backend_registry": "BackendType",
    "zrpc.calls.current_call": "Call current_call",
    "zrpc.calls.future": "Future",
    "zrpc.calls.future_group": "as_completed collect_all wait_all",
    "zrpc.constants": "UNSET_RPC_TIMEOUT",
    "zrpc.driver.mesh": "DriverMesh connect start_mesh",
    "zrpc.errors": " ".join(errors.__all__),
    "zrpc.functions": "batched",
    "zrpc.groups": "each group share split",
    "zrpc.launch.processes": "spawn",
    "zrpc.membership.worker_info": "WorkerInfo",
    "zrpc.mesh": """all_gather barrier get_actor get_worker_infos is_initialized on_worker_joined
        on_worker_lost session set_rpc_timeout span stats trace world_size""",
    "zrpc.options": """ProcessGroupRpcBackendOptions RpcBackendOptions
        TensorPipeRpcBackendOptions ZmqRpcBackendOptions""",
    "zrpc.services.debugger.debugger": "breakpoint",
    "zrpc.services.queue.queue": "Queue",
    "zrpc.services.rref.rref": "PyRRef RRef",
    "zrpc.streams": "Stream rpc_stream",
    "zrpc.testing.startup": "local_mesh",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

# Without the modules.
_PUBLIC = sorted(name for name in _HOME if _HOME[name] != "zrpc" and not name.startswith("_"))
# A star import would hide what a program has under these names, or under those of the modules.
_NOT_FOR_STAR = {"concurrent", "connect", "each", "group", "share", "split"}
__all__ = [name for name in _PUBLIC if name not in _NOT_FOR_STAR]


def __getattr__(name: str) -> Any:
    if _HOME.get(name) == "zrpc":
        return importlib.import_module(f"zrpc.{name}")
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("torch-zrpc")
    elif (module := _HOME.get(name)) is not None:
        value = getattr(importlib.import_module(module), name)
    else:
        raise AttributeError(f"module 'zrpc' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_NAMES["zrpc"].split(), "__version__"})
