"""The names that programs import."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import zrpc


def words(text: str) -> set[str]:
    return set(text.split())


# What torch 2.13's `torch.distributed.rpc` offers to programs, written down here so that the
# test needs no torch built with RPC. Left out: TensorPipe's agent, and names that torch's
# modules have only because they import them.
TORCH_NAMES = words("""
    BackendType Future PyRRef RRef RpcBackendOptions TensorPipeRpcBackendOptions WorkerInfo
    get_rpc_timeout get_worker_info init_rpc is_available remote rpc_async rpc_sync shutdown
""")
# Attributes of the package; a star import doesn't bring them.
MODULES = words("""
    api autograd backend_registry constants errors functions nn optim options testing
""")
TORCH_PRIVATE_NAMES = words("""
    _get_current_rpc_agent _is_current_rpc_agent_set _set_rpc_timeout _wait_all
""")
OWN_NAMES = words("""
    AuthenticationError BackwardError Call CallFilter CallbackError DriverMesh GroupError
    NotInitializedError
    OptionError OwnerDied ProcessGroupRpcBackendOptions ProtocolError Queue QueueClosed RemoteError
    RendezvousError RpcCancelledError RpcError RpcTimeoutError SerializationError Stream actor
    UNSET_RPC_TIMEOUT WorkerDied ZmqRpcBackendOptions all_gather as_completed barrier
    batched
    breakpoint collect_all current_call get_actor get_worker_infos is_initialized local_mesh
    on_worker_joined on_worker_lost rpc_stream session span set_rpc_timeout spawn start_mesh stats
    trace
    wait_all world_size
""")
REQUIRED = inspect.Parameter.empty


def test_all_is_what_it_should_be() -> None:
    assert set(zrpc.__all__) == TORCH_NAMES | OWN_NAMES
    assert len(zrpc.__all__) == len(set(zrpc.__all__))


def test_each_name_is_there_and_described() -> None:
    for name in TORCH_NAMES | TORCH_PRIVATE_NAMES | OWN_NAMES | MODULES:
        value = getattr(zrpc, name)
        assert value is not None, name
        assert getattr(zrpc, name) is value, name
    for name in MODULES:  # without an import
        assert zrpc.__getattr__(name).__name__ == f"zrpc.{name}"
    for name in zrpc.__all__:
        value = getattr(zrpc, name)
        if inspect.ismodule(value) or inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'zrpc' has no attribute 'rpc_snyc'"):
        zrpc.rpc_snyc  # noqa: B018
    assert set(zrpc.__all__) | MODULES | {"__version__"} <= set(dir(zrpc))


def test_a_star_import_brings_all_names() -> None:
    namespace: dict[str, object] = {}
    exec("from zrpc import *", namespace)
    assert set(zrpc.__all__) <= set(namespace)
    assert not MODULES & set(namespace)


def test_parameters_have_the_names_the_order_and_the_defaults_of_torch() -> None:
    call = {"to": REQUIRED, "func": REQUIRED, "args": None, "kwargs": None, "timeout": -1.0}
    mesh = {"backend": None, "rank": -1, "world_size": None, "rpc_backend_options": None}
    for function, parameters in (
        (zrpc.init_rpc, {"name": None, **mesh}),  # in torch the name is required
        (zrpc.shutdown, {"graceful": True, "timeout": 0}),
        (zrpc.rpc_sync, call),
        (zrpc.rpc_async, call),
        (zrpc.remote, {**call, "name": None, "exist_ok": False}),  # torch has no names
        (zrpc.get_worker_info, {"worker_name": None}),
    ):
        found = inspect.signature(function).parameters.values()
        assert [(each.name, each.default) for each in found] == list(parameters.items())


@pytest.mark.system
def test_importing_zrpc_alone_costs_nothing() -> None:
    """Nor do its commands and its plugin, errors and names."""
    code = (
        "import sys, zrpc, zrpc.cli, zrpc.testing.plugin; zrpc.ProtocolError; dir(zrpc)\n"
        "heavy = {'torch', 'zmq', 'numpy', 'cloudpickle', 'opentelemetry', 'zrpc.agent.agent'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_rref_serves_as_type_hint_and_class_base() -> None:
    class Mine(zrpc.RRef[int]):
        pass

    class Options(zrpc.RpcBackendOptions):
        pass

    def function(rref: zrpc.RRef[int]) -> zrpc.RRef[list[str]]: ...

    assert issubclass(Mine, zrpc.RRef)
    assert issubclass(zrpc.TensorPipeRpcBackendOptions, zrpc.RpcBackendOptions)
    assert Options(rpc_timeout=3).rpc_timeout == 3
