"""Handlers that fork: the child never acts as the worker."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import zrpc as rpc
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


def fork_in_generator(in_child: Callable[[], Any]) -> Iterator[int]:
    yield fork(in_child)


async def fork_in_async_generator(in_child: Callable[[], Any]) -> AsyncIterator[int]:
    yield fork(in_child)


@pytest.mark.parametrize("generator", [fork_in_generator, fork_in_async_generator])
def test_a_child_that_leaves_its_generator_exits(
    caller: Mesh, generator: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for in_child, code in ((result, 0), (error, 1), (leave, 3)):
        stream = rpc.rpc_stream("worker1", generator, args=(in_child,), timeout=20)
        assert list(stream) == [code]
        assert rpc.rpc_sync("worker1", os.getpid, timeout=20) == _TEST
    assert "ValueError: in the child" in capfd.readouterr().err


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
