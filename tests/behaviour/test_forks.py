"""Handlers that fork: the child never acts as the worker."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zrpc as rpc
from tests.support import forks
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh

pytestmark = pytest.mark.system

_TEST = os.getpid()
_children: list[int] = []


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    yield
    while _children:
        with contextlib.suppress(OSError):
            os.kill(_children[-1], signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(_children[-1], 0)
        _children.pop()


def fork(in_child: Callable[[], Any]) -> int:
    """Returns how the child exits, or in the child what ``in_child`` returns."""
    child = os.fork()
    if child == 0:
        return in_child()
    _children.append(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def fork_in_coroutine(in_child: Callable[[], Any]) -> int:
    return fork(in_child)


def fork_in_callback(in_child: Callable[[], Any]) -> int:
    """Forks in a callback, which runs before it completes the future that is waited for."""
    future = rpc.rpc_async(rpc.get_worker_info().name, min, args=(1, 2))
    return future.then(lambda _: fork(in_child)).wait()


def result() -> int:
    return -1


def error() -> None:
    raise ValueError("in the child")


def leave() -> None:
    sys.exit(3)


@pytest.mark.parametrize("handler", [fork, fork_in_coroutine])
def test_a_child_that_leaves_its_handler_exits_and_only_the_parent_answers(
    caller: Mesh, handler: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for in_child, code in ((result, 0), (error, 1), (leave, 3)):
        assert rpc.rpc_sync("worker1", handler, args=(in_child,), timeout=20) == code
        assert rpc.rpc_sync("worker1", os.getpid, timeout=20) == _TEST
    assert "ValueError: in the child" in capfd.readouterr().err


@rpc.functions.async_execution
def answer_by_callback(in_child: Callable[[], Any]) -> rpc.Future[int]:
    future = rpc.rpc_async(rpc.get_worker_info().name, min, args=(1, 2))
    return future.then(lambda _: fork(in_child))


def test_a_child_that_leaves_a_callback_exits(caller: Mesh) -> None:
    for handler in (fork_in_callback, answer_by_callback):
        assert rpc.rpc_sync("worker1", handler, args=(result,), timeout=20) == 0
        assert rpc.rpc_sync("worker1", os.getpid, timeout=20) == _TEST


def test_a_child_joins_a_mesh_while_its_parent_does(free_port: int, tmp_path: Path) -> None:
    def join(name: str, size: int, init_method: str) -> None:
        options = rpc.ZmqRpcBackendOptions(init_method=init_method, init_timeout=6)
        rpc.init_rpc(name, rank=0, world_size=size, rpc_backend_options=options)

    def wait_in_vain() -> None:
        with pytest.raises(rpc.RendezvousError):
            join("parent", 2, f"tcp://127.0.0.1:{free_port}")

    def join_alone() -> None:
        join("child", 1, f"file://{tmp_path / 'store'}")
        rpc.shutdown()

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    until(lambda: is_listening(free_port))
    child = forks.fork(join_alone)
    _children.append(child)
    thread.join(SOON)
    assert forks.exit_code(child) == 0


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
