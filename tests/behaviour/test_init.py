"""init_rpc: how workers meet, and what they are told where they don't."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import zrpc as rpc
from tests.support.threads import start_all
from tests.support.waiting import SOON
from zrpc.membership.init_method import resolve_rank
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


def test_a_mesh_of_one_worker_needs_no_address(alone: int, unset: Unset, monkeypatch: Any) -> None:
    unset(*ADDRESS)
    for _ in range(2):
        rpc.init_rpc("me", rank=0, world_size=1)
        shut_down_after_a_call()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(rpc.RendezvousError, match="expected the host and port of the master"):
        rpc.init_rpc("me", rank=0, world_size=1)


def test_a_program_alone_learns_how_to_start_workers(alone: int, unset: Unset) -> None:
    unset("RANK", "WORLD_SIZE")
    with pytest.raises(rpc.RendezvousError, match=r"zrpc launch -n 2 .* RANK and WORLD_SIZE"):
        rpc.init_rpc()
    unset(*ADDRESS)
    with pytest.raises(rpc.RendezvousError, match=r"starts its workers itself .* zrpc.start_mesh"):
        rpc.init_rpc("driver", rank=2, world_size=3)


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


def test_threads_of_gevent_are_refused(alone: int, monkeypatch: Any) -> None:
    monkey = SimpleNamespace(is_module_patched=lambda name: name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    with pytest.raises(rpc.RpcError, match="expected Python's own threads, found those of gevent"):
        rpc.init_rpc()


@pytest.mark.system
def test_without_a_world_size_the_mesh_is_elastic(alone: int, unset: Unset, tmp_path: Any) -> None:
    """Rank 0 hosts the store where it has to, and it ends with it."""
    unset("WORLD_SIZE")
    for method in ("env://", f"tcp://127.0.0.1:{alone}", f"file://{tmp_path}/store"):
        with no_leaks():
            rpc.init_rpc("me", rpc_backend_options=options(init_method=method))
            assert rpc.get_worker_info() == rpc.WorkerInfo("me", 0)
            shut_down_after_a_call()


def test_wrong_options(alone: int) -> None:
    text = "Argument rpc_backend_options must be an instance of RpcBackendOptions"
    for wrong in (object(), {"rpc_timeout": 5}, "env://"):
        with pytest.raises(TypeError, match=text):
            rpc.init_rpc("me", rpc_backend_options=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        rpc.init_rpc("me", rpc_backend_options=rpc.RpcBackendOptions())
    with pytest.raises(TypeError, match="backend"):
        rpc.init_rpc("me", backend="tensorpipe")  # type: ignore[arg-type]


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
@pytest.mark.usefixtures("alone", "no_leaks")
def test_missing_ranks_then_again_in_the_same_process() -> None:
    """The failed attempt gives the port back, even while somebody keeps its exception."""
    kept = []
    for _ in range(2):
        with pytest.raises(rpc.RendezvousError, match="ranks 1-2 are missing") as info:
            rpc.init_rpc("me", rank=0, world_size=3, rpc_backend_options=options(SHORT))
        kept.append(info.value)
        assert not rpc.is_initialized()
    rpc.init_rpc("me")
    shut_down_after_a_call()


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


def test_where_the_init_timeout_comes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, seconds in ((" 600 ", 600.0), ("", 7.0), ("0", 7.0)):
        monkeypatch.setenv("ZRPC_INIT_TIMEOUT", variable)
        assert rpc.ZmqRpcBackendOptions(rpc_timeout=7).init_timeout == seconds
        assert rpc.ZmqRpcBackendOptions(rpc_timeout=7, init_timeout=3).init_timeout == 3.0
    assert rpc.ZmqRpcBackendOptions(rpc_timeout=0).init_timeout > 0  # never without a limit
    for wrong, found in (
        ("10m", "expected a number of seconds in ZRPC_INIT_TIMEOUT, found '10m'"),
        ("-1", "ZRPC_INIT_TIMEOUT must be a finite number of seconds"),
        ("inf", "ZRPC_INIT_TIMEOUT must be a finite number of seconds"),
    ):
        monkeypatch.setenv("ZRPC_INIT_TIMEOUT", wrong)
        with pytest.raises(rpc.OptionError, match=found):
            rpc.init_rpc("me", rank=0, world_size=2)


def test_rank_in_the_url_and_a_timeout_of_a_lifetime(alone: int, tmp_path: Path) -> None:
    for url in ("env://", f"tcp://127.0.0.1:{alone}?rank=0&world_size=1", f"file://{tmp_path}/f"):
        rpc.init_rpc("me", rpc_backend_options=options(1e12, init_method=url))
        shut_down_after_a_call()
