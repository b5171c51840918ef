"""Which names of torch's modules zrpc replaces, and by what."""

from __future__ import annotations

# Torch's modules that have to do with RPC. `import torch` loads the first group.
MODULES = (
    "torch._C._distributed_rpc",
    "torch._C._distributed_autograd",
    "torch.distributed.autograd",
    "torch.distributed.rpc",
    "torch.distributed.rpc._utils",
    "torch.distributed.rpc.api",
    "torch.distributed.rpc.backend_registry",
    "torch.distributed.rpc.constants",
    "torch.distributed.rpc.functions",
    "torch.distributed.rpc.internal",
    "torch.distributed.rpc.options",
    "torch.distributed.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler",
    "torch.distributed.nn.api.remote_module",
    "torch.distributed.optim.optimizer",
)

_NAMES = {
    "zrpc.api": """_all_gather _barrier _get_current_rpc_agent _is_current_rpc_agent_set
        _set_rpc_timeout _wait_all _wait_all_workers get_rpc_timeout get_worker_info init_rpc
        remote rpc_async rpc_sync shutdown""",
    "zrpc.autograd": "backward context get_gradients",
    "zrpc.backend_registry": "BackendType construct_rpc_backend_options",
    "zrpc.drop_in.private": """RpcAgent TensorPipeAgent _TensorPipeRpcBackendOptionsBase
        _current_context _is_valid_context _require_initialized _retrieve_context
        backend_registered""",
    "zrpc.functions": "async_execution",
    "zrpc.membership.worker_info": "WorkerInfo",
    "zrpc.nn": "RemoteModule",
    "zrpc.optim": "DistributedOptimizer",
    "zrpc.options": "RpcBackendOptions TensorPipeRpcBackendOptions",
    "zrpc.services.rref.rref": "PyRRef RRef",
}

# For each name, the module that has the replacement.
REPLACEMENTS = {name: module for module, names in _NAMES.items() for name in names.split()}

# The same for names that only torch 1.4 to 1.7 have, in ``torch.distributed.rpc``.
OF_OLDER_TORCH = {"ProcessGroupRpcBackendOptions": "zrpc.drop_in.private"}

# Functions and classes that need no agent of torch's, and work as they are.
_KEPT = """AllGatherStates PythonUDF RPCExecMode RemoteException _InternalRPCPickler
    _build_rpc_profiling_key _to_device _to_device_list _to_device_map deserialize is_available
    serialize"""
KEPT = set(_KEPT.split())

# What to do instead, by a part of the name that isn't supported; the first that fits.
_ADVICE = {
    "rofil": "zrpc can't profile what callees do: a trace shows it, torch.profiler this worker's",
    "debug": "`zrpc stacks` shows what workers do and wait for",
    "backend": "zrpc has one back end; call init_rpc",
    "agent": "zrpc has one kind of agent; call init_rpc and shutdown",
    "_invoke": "call rpc_sync, rpc_async or remote",
    "pickle": "zrpc pickles by itself; register a reducer with copyreg.pickle",
    "rref": "zrpc counts references by itself; a worker that shuts down drops its own",
    "context": "use `with torch.distributed.autograd.context() as context_id`",
    "ptimizer": "use torch.distributed.optim.DistributedOptimizer",
    "odule": "use torch.distributed.nn.RemoteModule",
    "gather": "call torch.distributed.rpc.api._all_gather",
}
_GENERAL_ADVICE = "docs/coming-from-torch.md lists what zrpc has instead"


def advice(name: str) -> str:
    """Returns what a program should do that uses a name which zrpc doesn't support."""
    return next((text for part, text in _ADVICE.items() if part in name), _GENERAL_ADVICE)
