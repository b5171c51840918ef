"""init_rpc: how workers meet, what they are told otherwise, and the options of a mesh."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zrpc as rpc
from tests.support.threads import start_all
from tests.support.waiting import SOON
from tests.support.watched import Watched
from tests.support.ways import WAYS
from zrpc.membership.init_method import resolve_rank
from zrpc.testing import Mesh
from zrpc.testing.leaks import lasting, no_leaks

# Where a rendezvous must fail by its timeout; the others fail or succeed at once.
SHORT = 0.3
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


Unset = Callable[..., None]


def options(timeout: float = 10.0, **more: Any) -> rpc.ZmqRpcBackendOptions:
    return rpc.ZmqRpcBackendOptions(init_timeout=timeout, **more)


@pytest.fixture(autouse=True, scope="module")
def _once() -> None:
    """The first TCPStore of a process opens a pipe for good."""
    with lasting():
        dist.TCPStore("127.0.0.1", 0, 1, True)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Removes variables from the environment: first all that a launcher sets."""

    def unset(*names: str) -> None:
        for name in names:
            monkeypatch.delenv(name, raising=False)

    unset("RANK", "WORLD_SIZE", *ADDRESS)
    return unset


def shut_down_after_a_call() -> None:
    """As the only worker of a mesh."""
    assert rpc.rpc_sync(0, max, (1, 2)) == 2
    rpc.shutdown()
    assert not rpc.is_initialized()


def test_a_worker_may_be_called_by_its_rank(alone: int, monkeypatch: Any) -> None:
    for name in ("worker0", "trainer0"):
        rpc.init_rpc()
        assert rpc.get_worker_info() == rpc.WorkerInfo(name, 0)
        rpc.shutdown()
        monkeypatch.setenv("ZRPC_WORKER_NAME", "trainer0")


def test_who_needs_an_address_or_must_start_others(alone: int, unset: Unset) -> None:
    unset("RANK", "WORLD_SIZE")
    with pytest.raises(rpc.RendezvousError, match=r"zrpc launch -n 2 .* RANK and WORLD_SIZE"):
        rpc.init_rpc()
    unset("MASTER_PORT")
    with pytest.raises(rpc.RendezvousError, match="expected the host and port of the master"):
        rpc.init_rpc("me", rank=0, world_size=1)
    unset("MASTER_ADDR")
    with pytest.raises(rpc.RendezvousError, match=r"starts its workers itself .* zrpc.start_mesh"):
        rpc.init_rpc("driver", rank=2, world_size=3)
    for _ in range(2):  # a mesh of one
        rpc.init_rpc("me", rank=0, world_size=1)
        shut_down_after_a_call()


def test_a_rank_without_a_world_size_is_warned_of_but_in_an_elastic_launch(
    alone: int, unset: Unset, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    unset("WORLD_SIZE")
    rpc.init_rpc()
    rpc.shutdown()
    assert "RANK is set and WORLD_SIZE is not, so this mesh is elastic" in caplog.text
    caplog.clear()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert resolve_rank("env://", -1, None) == (0, None)
    assert "elastic" not in caplog.text


WRONG_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": "a b"}, RuntimeError, "Worker name must match"),
    *(
        ({"rank": rank, "world_size": size}, ValueError, f"rank={rank} and world_size={size}")
        for rank, size in ((1, 1), (5, 2), (0, 0))
    ),
    *(
        ({name: value}, TypeError, re.escape(f"expected an int as {name}, but got {value!r}"))
        for name, value in (("rank", "0"), ("rank", False), ("rank", 0.0), ("world_size", True))
    ),
    *(
        ({"rpc_backend_options": wrong}, TypeError, "must be an instance of RpcBackendOptions")
        for wrong in (object(), {"rpc_timeout": 5}, "env://")
    ),
    ({"rpc_backend_options": rpc.RpcBackendOptions()}, TypeError, "Could not infer backend"),
    ({"backend": "tensorpipe"}, TypeError, "backend"),
]


def test_arguments_that_do_not_fit(alone: int) -> None:
    for arguments, kind, text in WRONG_ARGUMENTS:
        with pytest.raises(kind, match=text):
            rpc.init_rpc(**{"name": "me", **arguments})
    assert not rpc.is_initialized()


def test_threads_of_gevent_are_refused(alone: int, monkeypatch: Any) -> None:
    monkey = SimpleNamespace(is_module_patched=lambda name: name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    with pytest.raises(rpc.RpcError, match="expected Python's own threads, found those of gevent"):
        rpc.init_rpc()


@pytest.mark.system
def test_without_a_world_size_the_mesh_is_elastic(alone: int, unset: Unset, tmp_path: Any) -> None:
    """Rank 0 hosts the store where it has to, and it ends with it."""
    unset("WORLD_SIZE")
    for method in ("env://", f"tcp://127.0.0.1:{alone}?rank=0", f"file://{tmp_path}/store"):
        with no_leaks():
            rpc.init_rpc("me", rpc_backend_options=options(1e12, init_method=method))
            assert rpc.get_worker_info() == rpc.WorkerInfo("me", 0)
            shut_down_after_a_call()


def test_torchs_way_to_say_it(alone: int) -> None:
    made = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=9)
    kind = rpc.BackendType.TENSORPIPE
    for init in (
        lambda: rpc.init_rpc("me", backend=kind, rpc_backend_options=made),
        lambda: rpc.init_rpc("me", kind, 0, 1, made),
    ):
        with no_leaks():
            init()
            assert rpc.get_rpc_timeout() == 9.0
            shut_down_after_a_call()


@pytest.mark.system
def test_a_master_that_ends_while_others_wait(alone: int) -> None:
    """It may be back, but nobody is told only that there was none."""
    master = dist.TCPStore("127.0.0.1", alone, is_master=True, wait_for_workers=False)
    how = {"rank": 1, "world_size": 2, "rpc_backend_options": options(1.5)}
    finish = start_all([lambda: rpc.init_rpc("me", **how)], SOON)
    master.wait(["zrpc/record/-/1"])
    del master
    [error] = finish()
    assert isinstance(error, rpc.RendezvousError)
    assert re.search(f"was lost .* at 127.0.0.1:{alone} within", str(error))


@pytest.mark.system
@pytest.mark.usefixtures("alone", "no_leaks")
def test_ctrl_c_ends_the_wait_for_others() -> None:
    threading.Timer(SHORT, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        rpc.init_rpc("me", rank=0, world_size=2, rpc_backend_options=options(60))
    assert not rpc.is_initialized()


@pytest.mark.system
@pytest.mark.usefixtures("alone", "no_leaks")
def test_missing_ranks_then_again_in_the_same_process() -> None:
    """The failed attempt gives the port back, even while somebody keeps its exception."""
    how = {"rank": 0, "world_size": 3, "rpc_backend_options": options(2 * SHORT)}
    kept = []
    for _ in range(2):
        finish = start_all([lambda: rpc.init_rpc("me", **how)], SOON)
        time.sleep(SHORT)  # it joins in another thread meanwhile
        with pytest.raises(rpc.NotInitializedError):
            rpc.shutdown()
        kept += finish()
        with pytest.raises(rpc.RendezvousError, match="ranks 1-2 are missing"):
            raise kept[-1]
        assert not rpc.is_initialized()
    rpc.init_rpc("me")
    shut_down_after_a_call()


def test_timeouts_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    make = rpc.ZmqRpcBackendOptions
    for text, seconds in (" 7.5 ", 7.5), ("0", 0.0), ("", 60.0):
        monkeypatch.setenv("ZRPC_RPC_TIMEOUT", text)
        assert make().rpc_timeout == rpc.RpcBackendOptions().rpc_timeout == seconds
        assert make(rpc_timeout=60).rpc_timeout == 60.0
    for text, seconds in ((" 600 ", 600.0), ("", 7.0), ("0", 7.0)):
        monkeypatch.setenv("ZRPC_INIT_TIMEOUT", text)
        assert make(rpc_timeout=7).init_timeout == seconds
        assert make(rpc_timeout=7, init_timeout=3).init_timeout == 3.0
    assert make(rpc_timeout=0).init_timeout > 0  # never without a limit
    for name, text, found in (
        ("ZRPC_INIT_TIMEOUT", "10m", "a number of seconds in ZRPC_INIT_TIMEOUT, found '10m'"),
        ("ZRPC_INIT_TIMEOUT", "-1", "ZRPC_INIT_TIMEOUT must be a finite number of seconds"),
        ("ZRPC_INIT_TIMEOUT", "inf", "ZRPC_INIT_TIMEOUT must be a finite number of seconds"),
        ("ZRPC_RPC_TIMEOUT", "long", "seconds in ZRPC_RPC_TIMEOUT, found 'long'"),
    ):
        monkeypatch.setenv(name, text)
        with pytest.raises(rpc.OptionError, match=found):
            rpc.init_rpc("me", rank=0, world_size=2)


def test_defaults_and_torchs_names_for_them() -> None:
    options = rpc.ZmqRpcBackendOptions()
    assert (options.num_worker_threads, options.rpc_timeout) == (16, 60.0)
    assert (options.init_method, options.switch_interval) == ("env://", 0.001)
    assert (options.device_maps, options.devices) == ({}, [])
    assert rpc.TensorPipeRpcBackendOptions is rpc.ZmqRpcBackendOptions
    of_torch: dict[str, Any] = {"device_maps": None, "devices": None}
    of_torch |= {"_transports": ["uv"], "_channels": ["basic"]}
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, **of_torch)
    assert options.num_worker_threads == 8
    assert isinstance(options, rpc.RpcBackendOptions)
    with pytest.raises(TypeError):
        rpc.ZmqRpcBackendOptions(16)  # type: ignore[misc]
    with pytest.raises(TypeError):
        rpc.ZmqRpcBackendOptions(no_such_option=1)  # type: ignore[call-arg]


def test_names_and_arguments_of_torch_1_7() -> None:
    assert rpc.ProcessGroupRpcBackendOptions is rpc.ZmqRpcBackendOptions
    assert rpc.BackendType.PROCESS_GROUP is rpc.BackendType.ZMQ
    construct = rpc.backend_registry.construct_rpc_backend_options
    for make in (rpc.ProcessGroupRpcBackendOptions, partial(construct, rpc.BackendType.ZMQ)):
        made = make(num_send_recv_threads=4, rpc_timeout=timedelta(minutes=1), init_method="a")
        assert (made.num_send_recv_threads, made.num_worker_threads) == (4, 4)
        assert (made.rpc_timeout, made.init_method) == (60.0, "a")
        made.num_send_recv_threads, made.rpc_timeout = 32, timedelta(milliseconds=1500)
        made.init_method += "y"
        assert (made.num_worker_threads, made.rpc_timeout, made.init_method) == (32, 1.5, "ay")
        with pytest.raises(rpc.OptionError, match="num_worker_threads must be positive, got 0"):
            make(num_send_recv_threads=0)


INFINITE = (float("nan"), float("inf"))
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "num_worker_threads": (0, -1),
    "rpc_timeout": (-1, timedelta(seconds=-1), *INFINITE),
    "init_timeout": (-1,),
    "switch_interval": (-0.001, *INFINITE),
    "heartbeat_timeout": (-5, *INFINITE),
    "warn_after": (-1, *INFINITE),
    "transport": ("carrier pigeon", None),
    "security": ("requierd", True),
    "port_range": ("", "20000-", "20100-20000", "20000-65536"),
    "max_bytes_in_flight": (-1, -(1 << 30), *INFINITE),
    "shared_memory": (-5, *INFINITE),
}
OF_OTHER_TYPES: dict[str, tuple[Any, ...]] = {
    "num_worker_threads": (2.5, "4", True),
    "rpc_timeout": (None, "3"),
    "init_timeout": ("3",),
    "heartbeat_timeout": (None,),
    "warn_after": ("soon",),
    "init_method": (None, b"env://"),
    "port_range": (20000,),
    "max_bytes_in_flight": (None, "1GB"),
    "shared_memory": ("1GB",),
    "switch_interval": (None, "x"),
    "device_maps": ("x",),
}
FIXED = ("init_timeout", "port_range")


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_values_out_of_range(name: str) -> None:
    for value in OUT_OF_RANGE[name]:
        for kind in (ValueError, RuntimeError):  # torch's are RuntimeErrors
            with pytest.raises(kind, match=name):
                rpc.ZmqRpcBackendOptions(**{name: value})
            if name not in FIXED:
                with pytest.raises(kind, match=name):
                    setattr(rpc.ZmqRpcBackendOptions(), name, value)


@pytest.mark.parametrize("name", OF_OTHER_TYPES)
def test_values_of_other_types(name: str) -> None:
    for value in OF_OTHER_TYPES[name]:
        found = f"{name} must be an? .* but got {value!r} of type {type(value).__name__}"
        with pytest.raises(TypeError, match=found):
            rpc.ZmqRpcBackendOptions(**{name: value})
        if name not in FIXED:
            with pytest.raises(TypeError, match=found):
                setattr(rpc.ZmqRpcBackendOptions(), name, value)


def test_options_that_are_set_count_as_those_that_are_given() -> None:
    options = rpc.ZmqRpcBackendOptions()
    given = rpc.ZmqRpcBackendOptions(
        heartbeat_timeout=timedelta(minutes=1),
        warn_after=timedelta(seconds=5),
        switch_interval=timedelta(milliseconds=2),
        init_timeout=timedelta(seconds=3),
    )
    assert given.init_timeout == 3.0
    default, options.shared_memory = options.shared_memory, 1 << 20
    assert options.shared_memory == 1 << 20
    options.shared_memory = None
    assert options.shared_memory == default
    options.heartbeat_timeout, options.warn_after = timedelta(minutes=1), timedelta(seconds=5)
    options.switch_interval = timedelta(milliseconds=2)
    for made in (options, given, pickle.loads(pickle.dumps(given))):
        found = made.heartbeat_timeout, made.warn_after, made.switch_interval
        assert found == (60.0, 5.0, 0.002)
    options.warn_after = None
    assert options.warn_after == 0.0
    options.security = "required"
    assert options.security == "required"


_EVER = 1e12
_LONG = dict.fromkeys(("rpc_timeout", "init_timeout", "heartbeat_timeout", "warn_after"), _EVER)


@pytest.mark.zrpc(options=_LONG)
def test_as_long_as_can_be(caller: Mesh) -> None:
    """Longer than the system's clocks have for a wait."""
    assert rpc.get_rpc_timeout() == rpc.ZmqRpcBackendOptions(rpc_timeout=timedelta.max).rpc_timeout
    assert rpc.get_rpc_timeout() == 1e9
    for call in WAYS:
        assert call(1, max, (1, 2), timeout=_EVER) == 2
    for owner in (0, 1):
        assert rpc.remote(owner, max, (1, 2), timeout=_EVER).to_here(timeout=_EVER) == 2
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
    with pytest.raises(TypeError, match=r"device_map must be a mapping, .* but got 'cuda:1'"):
        options.set_device_map("w1", "cuda:1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`set_devices` expect a list of devices such as GPUs"):
        options.set_devices(["cpu"])
