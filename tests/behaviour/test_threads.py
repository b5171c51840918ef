"""Calls from many threads, and what each gets back."""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.targets import echo, fail
from tests.support.threads import start_all
from tests.support.waiting import SOON
from tests.support.ways import WAYS
from zrpc.functions import async_execution
from zrpc.testing import Mesh


def in_threads(mesh: Mesh, count: int, work: Callable[[int], None], *ranks: int) -> None:
    """Runs ``work(i)`` in that many threads of each worker at once; raises what they raise."""
    workers = ranks or (0,)
    start = threading.Barrier(count * len(workers))

    def run(rank: int, number: int) -> None:
        with mesh.agent(rank).as_current():
            start.wait(SOON)
            work(number)

    calls = [partial(run, rank, number) for rank in workers for number in range(count)]
    for error in start_all(calls, 2 * SOON)():
        if error is not None:
            raise error


def test_the_first_calls_of_a_mesh_from_many_threads(mesh: Mesh) -> None:
    """They all open the one mailbox."""
    in_threads(mesh, 16, lambda i: _is(rpc.rpc_sync(1, echo, (i,)), i))


def _is(found: Any, expected: Any) -> None:
    assert found == expected


@async_execution
def later(x: Any) -> Any:
    return rpc.rpc_async(0, echo, (x,))


async def soon(x: Any) -> Any:
    return await rpc.rpc_async(0, echo, (x,))


def nested(x: Any) -> Any:
    return rpc.rpc_sync(0, echo, (x,))


@pytest.mark.system
@pytest.mark.zrpc(workers=3, timeout=60)
def test_calls_of_all_kinds_from_all_workers_at_once(mesh: Mesh) -> None:
    per_thread = 60

    def work(i: int) -> None:
        rng = random.Random(i)
        outstanding: list[tuple[Any, Any]] = []
        for n in range(per_thread):
            to, value = rng.randrange(3), (i, n)
            function = rng.choice([echo, later, soon, nested, lambda x: x])
            match rng.randrange(4):
                case 0:
                    outstanding.append((rpc.rpc_async(to, function, (value,)), value))
                case 1:
                    _is(rng.choice(WAYS)(to, function, (value,)), value)
                case 2:
                    tensor = torch.full((rng.choice([3, 10_000]),), float(n))
                    future = rpc.rpc_async(to, torch.add, (tensor, i))
                    outstanding.append((future.then(lambda f: f.wait()[-1].item()), n + i))
                case 3:
                    with pytest.raises(KeyError) as info:
                        rpc.rpc_sync(to, fail, (KeyError(value),))
                    _is(info.value.args, (value,))
        for future, value in outstanding:
            _is(future.wait(), value)

    in_threads(mesh, 4, work, 0, 1, 2)


@pytest.mark.system
def test_a_burst_of_ten_thousand(shared: Mesh) -> None:
    futures = [rpc.rpc_async(1, operator.mul, (i, 2)) for i in range(10_000)]
    assert torch.futures.wait_all(futures) == [2 * i for i in range(10_000)]
