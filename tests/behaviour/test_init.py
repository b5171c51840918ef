"""init_rpc: how workers meet, and what they are told where they don't."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import zrpc as rpc
from tests.support.agents import join_all
from tests.support.threads import start_all
from tests.support.waiting import SOON
from zrpc.membership.init_method import resolve_rank
from zrpc.testing.leaks import lasting, no_leaks

# Where a rendezvous must fail by its timeout; the others fail or succeed at once.
SHORT = 0.3
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def options(timeout: float = 10.0, **more: Any) -> rpc.ZmqRpcBackendOptions:
    return rpc.ZmqRpcBackendOptions(init_timeout=timeout, **more)


@pytest.fixture(autouse=True, scope="module")
def _once() -> None:
    """The first TCPStore of a process opens a pipe for good."""
    with lasting():
        dist.TCPStore("127.0.0.1", 0, 1, True)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_store_that_has_seen_a_mesh_serves_again() -> None:
    store = dist.HashStore()
    for name in ["first", "second"]:
        agents = join_all((f"{name}0", 0, 2), (f"{name}1", 1, 2), store=store)
        with agents[0].as_current():
            assert rpc.rpc_sync(f"{name}1", max, (1, 2)) == 2
        for agent in agents:
            agent.close()


def test_a_worker_without_a_name_is_called_by_the_launcher_or_by_its_rank(
    alone: int, monkeypatch: Any
) -> None:
    for name in ("worker0", "trainer0"):
        rpc.init_rpc()
        assert rpc.get_worker_info() == rpc.WorkerInfo(name, 0)
        rpc.shutdown()
        monkeypatch.setenv("ZRPC_WORKER_NAME", "trainer0")


def test_a_program_that_was_started_alone_learns_how_to_start_it(
    alone: int, monkeypatch: Any
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    with pytest.raises(rpc.RendezvousError, match=r"zrpc launch -n 2 .* RANK and WORLD_SIZE"):
        rpc.init_rpc()


def test_a_mesh_of_one_worker_needs_no_address(alone: int, monkeypatch: Any) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    for _ in range(2):
        rpc.init_rpc("me", rank=0, world_size=1)
        assert rpc.rpc_sync("me", max, args=(1, 2)) == 2
        rpc.shutdown()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(rpc.RendezvousError, match="expected the host and port of the master"):
        rpc.init_rpc("me", rank=0, world_size=1)


def test_a_program_that_joins_workers_of_its_own_is_told_of_start_mesh(
    alone: int, monkeypatch: Any
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    with pytest.raises(rpc.RendezvousError, match=r"starts its workers itself .* zrpc.start_mesh"):
        rpc.init_rpc("driver", rank=2, world_size=3)


def test_a_rank_without_a_world_size_is_warned_of(
    alone: int, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    rpc.init_rpc()
    assert "RANK is set and WORLD_SIZE is not, so this mesh is elastic" in caplog.text
    rpc.shutdown()


def test_an_elastic_launch_is_not_warned_of(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert resolve_rank("env://", -1, None) == (3, None)
    assert "elastic" not in caplog.text


@pytest.mark.system
def test_nothing_is_left_of_what_failed(alone: int) -> None:
    with no_leaks(), pytest.raises(rpc.RendezvousError):
        rpc.init_rpc("me", rank=1, world_size=2, rpc_backend_options=options(SHORT))


def test_names_and_numbers_that_do_not_fit(alone: int) -> None:
    with pytest.raises(RuntimeError, match="Worker name must match"):
        rpc.init_rpc("a b")
    for rank, world_size in ((1, 1), (5, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank={rank} and world_size={world_size}"):
            rpc.init_rpc("me", rank=rank, world_size=world_size)
    for name, value in (("rank", "0"), ("rank", False), ("rank", 0.0), ("world_size", True)):
        text = re.escape(f"expected an int as {name}, but got {value!r}")
        with pytest.raises(TypeError, match=text):
            rpc.init_rpc("me", **{name: value})
    assert not rpc.is_initialized()


@pytest.mark.parametrize("scheme", ["env", "file"])
def test_an_init_timeout_of_a_lifetime(alone: int, tmp_path: Path, scheme: str) -> None:
    method = f"file://{tmp_path}/store" if scheme == "file" else "env://"
    rpc.init_rpc("me", rpc_backend_options=options(1e12, init_method=method))
    assert rpc.rpc_sync("me", max, (1, 2)) == 2
    rpc.shutdown()


def test_threads_of_gevent_are_refused(alone: int, monkeypatch: Any) -> None:
    monkey = SimpleNamespace(is_module_patched=lambda name: name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    with pytest.raises(rpc.RpcError, match="expected Python's own threads, found those of gevent"):
        rpc.init_rpc()


@pytest.mark.system
def test_without_a_world_size_the_mesh_is_elastic(
    alone: int, monkeypatch: Any, tmp_path: Any
) -> None:
    """Rank 0 hosts the store where it has to, and it ends with it."""
    monkeypatch.delenv("WORLD_SIZE")
    for method in ("env://", f"tcp://127.0.0.1:{alone}", f"file://{tmp_path}/store"):
        with no_leaks():
            rpc.init_rpc("me", rpc_backend_options=options(init_method=method))
            assert rpc.get_worker_info() == rpc.WorkerInfo("me", 0)
            assert rpc.rpc_sync("me", max, (1, 2)) == 2
            rpc.shutdown()


@pytest.mark.system
def test_a_worker_without_rank_and_world_size_hosts_no_store(alone: int, monkeypatch: Any) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    with pytest.raises(rpc.RendezvousError, match="found nobody"):
        rpc.init_rpc("me", rpc_backend_options=options(SHORT))


def test_bad_init_methods(alone: int) -> None:
    for init_method in (
        *("", "nonsense", "http://localhost:1", "tcp://", "tcp://localhost", "file://"),
        "tcp://h:port",
    ):
        with pytest.raises((rpc.RendezvousError, ValueError)) as info:
            rpc.init_rpc("me", rpc_backend_options=options(SHORT, init_method=init_method))
        assert str(info.value)
        assert not rpc.is_initialized()


def test_wrong_options(alone: int) -> None:
    text = "Argument rpc_backend_options must be an instance of RpcBackendOptions"
    for wrong in (object(), {"rpc_timeout": 5}, "env://"):
        with pytest.raises(TypeError, match=text):
            rpc.init_rpc("me", rpc_backend_options=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        rpc.init_rpc("me", rpc_backend_options=rpc.RpcBackendOptions())
    with pytest.raises(TypeError, match="backend"):
        rpc.init_rpc("me", backend="tensorpipe")  # type: ignore[arg-type]


@pytest.mark.parametrize("keyword", [True, False])
def test_torchs_way_to_say_it(alone: int, keyword: bool) -> None:
    made = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=9)
    if keyword:
        rpc.init_rpc("me", backend=rpc.BackendType.TENSORPIPE, rpc_backend_options=made)
    else:
        rpc.init_rpc("me", rpc.BackendType.TENSORPIPE, 0, 1, made)
    assert rpc.get_rpc_timeout() == 9.0
    rpc.shutdown()


def test_init_again_and_again(alone: int) -> None:
    for i in range(5):
        with no_leaks():
            rpc.init_rpc(f"me{i}")
            assert rpc.rpc_sync(f"me{i}", rpc.get_worker_info).name == f"me{i}"
            rpc.shutdown()
        assert not rpc.is_initialized()


@pytest.mark.system
def test_a_master_that_ends_while_others_wait(alone: int) -> None:
    """It may be back, but nobody is told only that there was none."""
    master = dist.TCPStore("127.0.0.1", alone, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(
            rpc.init_rpc, "me", rank=1, world_size=2, rpc_backend_options=options(1.5)
        )
        master.wait(["zrpc/record/-/1"])
        del master
        with pytest.raises(rpc.RendezvousError, match=f"was lost .* at 127.0.0.1:{alone} within"):
            joining.result(10)


@pytest.mark.system
@pytest.mark.usefixtures("alone", "no_leaks")
def test_ctrl_c_ends_the_wait_for_others() -> None:
    threading.Timer(SHORT, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        rpc.init_rpc("me", rank=0, world_size=2, rpc_backend_options=options(60))
    assert not rpc.is_initialized()


@pytest.mark.system
@pytest.mark.usefixtures("alone")
def test_a_shutdown_while_another_thread_joins() -> None:
    how = {"rank": 0, "world_size": 2, "rpc_backend_options": options(2 * SHORT)}
    finish = start_all([lambda: rpc.init_rpc("me", **how)], SOON)
    time.sleep(SHORT)
    with pytest.raises(rpc.NotInitializedError):
        rpc.shutdown()
    assert isinstance(finish()[0], rpc.RendezvousError)


@pytest.mark.system
def test_missing_ranks_then_again_in_the_same_process(alone: int) -> None:
    """The failed attempt gives the port back, even while somebody keeps its exception."""
    kept = []
    for _ in range(2):
        with pytest.raises(rpc.RendezvousError, match="ranks 1-2 are missing") as info:
            rpc.init_rpc("me", rank=0, world_size=3, rpc_backend_options=options(SHORT))
        kept.append(info.value)
        assert not rpc.is_initialized()
    rpc.init_rpc("me")
    assert rpc.rpc_sync("me", max, (1, 2)) == 2
    rpc.shutdown()


def test_the_timeout_of_calls_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (" 7.5 ", 7.5), ("0", 0.0), ("", 60.0):
        monkeypatch.setenv("ZRPC_RPC_TIMEOUT", text)
        assert rpc.ZmqRpcBackendOptions().rpc_timeout == seconds
        assert rpc.RpcBackendOptions().rpc_timeout == seconds
        assert rpc.ZmqRpcBackendOptions(rpc_timeout=60).rpc_timeout == 60.0
        assert rpc.ZmqRpcBackendOptions(rpc_timeout=3).rpc_timeout == 3.0
    monkeypatch.setenv("ZRPC_RPC_TIMEOUT", "long")
    with pytest.raises(rpc.OptionError, match="seconds in ZRPC_RPC_TIMEOUT, found 'long'"):
        rpc.init_rpc("me", rank=0, world_size=2)


def test_the_init_timeout_is_by_default_the_timeout_of_calls() -> None:
    assert rpc.ZmqRpcBackendOptions(rpc_timeout=7).init_timeout == 7.0
    assert rpc.ZmqRpcBackendOptions(rpc_timeout=7, init_timeout=3).init_timeout == 3.0
    assert rpc.ZmqRpcBackendOptions(rpc_timeout=0).init_timeout > 0  # never without a limit


def test_the_init_timeout_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZRPC_INIT_TIMEOUT", " 600 ")
    assert rpc.ZmqRpcBackendOptions(rpc_timeout=7).init_timeout == 600.0
    assert rpc.ZmqRpcBackendOptions(rpc_timeout=7, init_timeout=3).init_timeout == 3.0
    for unset in ("", "0"):
        monkeypatch.setenv("ZRPC_INIT_TIMEOUT", unset)
        assert rpc.ZmqRpcBackendOptions(rpc_timeout=7).init_timeout == 7.0


def test_a_wrong_init_timeout_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, found in (
        ("10m", "expected a number of seconds in ZRPC_INIT_TIMEOUT, found '10m'"),
        ("-1", "ZRPC_INIT_TIMEOUT must be a finite number of seconds"),
        ("inf", "ZRPC_INIT_TIMEOUT must be a finite number of seconds"),
    ):
        monkeypatch.setenv("ZRPC_INIT_TIMEOUT", wrong)
        with pytest.raises(rpc.OptionError, match=found):
            rpc.init_rpc("me", rank=0, world_size=2)


def test_rank_and_world_size_in_the_url(alone: int, tmp_path: Path) -> None:
    for url in [f"tcp://127.0.0.1:{alone}?rank=0&world_size=1", f"file://{tmp_path}/f"]:
        rpc.init_rpc("me", rpc_backend_options=options(init_method=url))
        assert rpc.rpc_sync("me", max, (1, 2)) == 2
        rpc.shutdown()
