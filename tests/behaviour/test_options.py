"""Options, and torch's names for them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.watched import Watched
from zrpc.testing import Mesh


def test_defaults_and_torchs_names_for_them() -> None:
    options = rpc.ZmqRpcBackendOptions()
    assert (options.num_worker_threads, options.rpc_timeout) == (16, 60.0)
    assert (options.init_method, options.switch_interval) == ("env://", 0.001)
    assert (options.device_maps, options.devices) == ({}, [])
    assert rpc.TensorPipeRpcBackendOptions is rpc.ZmqRpcBackendOptions
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8,
        rpc_timeout=20,
        init_method="file:///tmp/x",
        device_maps=None,
        devices=None,
        _transports=["uv"],
        _channels=["basic"],
    )
    assert (options.num_worker_threads, options.rpc_timeout) == (8, 20.0)
    assert isinstance(options, rpc.RpcBackendOptions)
    with pytest.raises(TypeError):
        rpc.ZmqRpcBackendOptions(16)  # type: ignore[misc]
    with pytest.raises(TypeError):
        rpc.ZmqRpcBackendOptions(no_such_option=1)  # type: ignore[call-arg]


def test_names_and_arguments_of_torch_1_7() -> None:
    assert rpc.ProcessGroupRpcBackendOptions is rpc.ZmqRpcBackendOptions
    assert rpc.BackendType.PROCESS_GROUP is rpc.BackendType.ZMQ
    options = rpc.ProcessGroupRpcBackendOptions(
        num_send_recv_threads=4, rpc_timeout=timedelta(seconds=20), init_method="file:///tmp/x"
    )
    assert (options.num_send_recv_threads, options.num_worker_threads) == (4, 4)
    assert (options.rpc_timeout, options.init_method) == (20.0, "file:///tmp/x")
    options.num_send_recv_threads = 32
    options.rpc_timeout = timedelta(milliseconds=1500)
    assert (options.num_worker_threads, options.rpc_timeout) == (32, 1.5)
    made = rpc.backend_registry.construct_rpc_backend_options(
        rpc.BackendType.PROCESS_GROUP,
        rpc_timeout=timedelta(minutes=1),
        num_send_recv_threads=2,
        init_method="file:///tmp/x",
    )
    assert (made.num_worker_threads, made.rpc_timeout) == (2, 60.0)
    made.init_method = made.init_method + "y"
    assert made.init_method == "file:///tmp/xy"
    with pytest.raises(rpc.OptionError, match="must be positive, got 0"):
        rpc.ProcessGroupRpcBackendOptions(num_send_recv_threads=0)


def test_a_timedelta_is_a_time_as_its_seconds_are() -> None:
    options = rpc.ZmqRpcBackendOptions(
        rpc_timeout=timedelta.max,
        init_timeout=timedelta(minutes=2),
        heartbeat_timeout=timedelta(seconds=3),
        warn_after=timedelta(0),
    )
    assert (options.rpc_timeout, options.init_timeout) == (1e9, 120.0)
    assert (options.heartbeat_timeout, options.warn_after) == (3.0, 0.0)
    with pytest.raises(rpc.OptionError, match="RPC Timeout must be non-negative"):
        rpc.ZmqRpcBackendOptions(rpc_timeout=timedelta(seconds=-1))


def test_values_out_of_range() -> None:
    infinite = (float("nan"), float("inf"))
    wrong: dict[str, tuple[Any, ...]] = {
        "num_worker_threads": (0, -1),
        "rpc_timeout": (-1, *infinite),
        "init_timeout": (-1,),
        "switch_interval": (-0.001, *infinite),
        "transport": ("carrier pigeon",),
        "port_range": ("", "20000-", "20100-20000", "20000-65536"),
        "max_bytes_in_flight": (-1, -(1 << 30)),
    }
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        for kind in (ValueError, RuntimeError):  # torch's are RuntimeErrors
            with pytest.raises(kind, match=name):
                rpc.ZmqRpcBackendOptions(**{name: value})
    with pytest.raises(rpc.OptionError, match="num_worker_threads must be positive, got 0"):
        rpc.TensorPipeRpcBackendOptions(num_worker_threads=0)  # torch's text
    for name in ("num_worker_threads", "rpc_timeout"):
        with pytest.raises(ValueError, match=name):
            setattr(rpc.ZmqRpcBackendOptions(), name, -1)


def test_values_of_other_types() -> None:
    wrong: dict[str, tuple[Any, ...]] = {
        "num_worker_threads": (2.5, "4", True),
        "rpc_timeout": (None, "3"),
        "init_timeout": ("3",),
        "heartbeat_timeout": (None,),
        "warn_after": ("soon",),
        "init_method": (None, b"env://"),
        "port_range": (20000,),
    }
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        found = f"{name} must be an? .* but got {value!r} of type {type(value).__name__}"
        with pytest.raises(TypeError, match=found):
            rpc.ZmqRpcBackendOptions(**{name: value})
    with pytest.raises(TypeError, match="init_method must be a URL"):
        rpc.ZmqRpcBackendOptions().init_method = None  # type: ignore[assignment]


_EVER = 1e12
_LONG = dict.fromkeys(("rpc_timeout", "init_timeout", "heartbeat_timeout", "warn_after"), _EVER)


@pytest.mark.zrpc(options=_LONG)
def test_as_long_as_can_be(caller: Mesh) -> None:
    """Longer than the system's clocks have for a wait."""
    assert rpc.get_rpc_timeout() == 1e9
    assert rpc.rpc_sync(1, max, (1, 2)) == 2
    assert rpc.rpc_sync(1, max, (1, 2), timeout=_EVER) == 2
    assert rpc.rpc_async(1, max, (1, 2), timeout=_EVER).wait() == 2
    for owner in (0, 1):
        rref = rpc.remote(owner, time.sleep, (0.01,), timeout=_EVER)
        assert rref.to_here(timeout=_EVER) is None
    with Watched() as watched:
        pending = rpc.rpc_async(1, wait_for_its_end, (watched,), timeout=0)
        watched.await_entry()
        pending.cancel()
        assert watched.await_end() == [True]


def wait_for_its_end(watched: Watched) -> None:
    watched.entered.release()
    watched.tell(rpc.current_call().wait_cancelled(1e300))


def test_devices_may_be_numbers_also_on_a_machine_without_any() -> None:
    accelerator = torch.accelerator.current_accelerator() or torch.device("cuda")
    zero, one = (torch.device(accelerator.type, i) for i in (0, 1))
    options = rpc.ZmqRpcBackendOptions(device_maps={"w1": {0: 1}}, devices=[0])
    assert (options.device_maps, options.devices) == ({"w1": {zero: one}}, [zero])
    # Those without an index are the first of their type.
    options = rpc.ZmqRpcBackendOptions(device_maps={"*": {"mps": "cuda", "cpu:0": "cpu"}})
    cpu, first = torch.device("cpu"), [torch.device(kind, 0) for kind in ("mps", "cuda")]
    assert options.device_maps == {"*": {first[0]: first[1], cpu: cpu}}


def test_device_maps() -> None:
    zero, one, three = (torch.device("cuda", i) for i in (0, 1, 3))
    options = rpc.ZmqRpcBackendOptions(device_maps={"w1": {"cuda:0": "cuda:1"}})
    options.set_device_map("w1", {"cuda:1": zero})
    options.set_device_map("w2", {zero: "cuda:3"})
    assert options.device_maps == {"w1": {zero: one, one: zero}, "w2": {zero: three}}
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping, trying"):
        options.set_device_map("w1", {"cuda:2": "cuda:3", "cuda:3": "cuda:3"})
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping, trying"):
        options.set_device_map("w1", {"cuda:0": "cuda:2"})
    assert options.device_maps["w1"] == {zero: one, one: zero}
    options.device_maps = {"w1": {"cuda:1": "cuda:3"}}  # torch's can be set as well
    assert options.device_maps == {"w1": {one: three}}
    options.set_devices([zero, "cuda:1"])
    assert options.devices == [zero, one]
    options.devices = ["cuda:3"]
    assert options.devices == [three]
    with pytest.raises(
        ValueError, match="`set_devices` expect a list of devices such as GPUs, but"
    ):
        options.set_devices(["cpu"])
