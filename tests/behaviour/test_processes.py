"""What only real processes show: functions of `__main__`, logs, and separate memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import zrpc as rpc
from tests.support.programs import Programs
from zrpc.testing import Mesh

Succeed = Callable[..., list[str]]

HEAD = """
import os, sys
import torch
import zrpc as rpc
from dataclasses import dataclass

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
other = f"w{1 - rank}"
state = [rank]

def double(x):
    return 2 * x

def whose():
    return state[0]

async def triple(x):
    return 3 * x

@rpc.functions.async_execution
def later(x):
    return rpc.rpc_async(other, double, (x,))

@dataclass
class Sample:
    x: torch.Tensor

class Model:
    def __init__(self, n):
        self.n = n
    def times(self, x):
        return self.n * x

class Mistake(Exception):
    pass

def fail(kind, *args):
    raise kind(*args)

def meet():
    rpc.init_rpc(f"w{rank}")

def part():
    rpc.shutdown()

"""


def test_what_the_main_script_defines(succeed: Succeed) -> None:
    succeed(
        HEAD
        + """
if __name__ == "__main__":
    meet()
    assert rpc.rpc_sync(other, double, (4,)) == 8
    assert rpc.rpc_async(other, lambda x: double(x) + 1, (4,)).wait() == 9
    assert rpc.rpc_sync(other, triple, (4,)) == 12
    assert rpc.rpc_sync(other, later, (4,)) == 8
    assert rpc.rpc_sync(other, Model(5).times, (2,)) == 10
    rref = rpc.remote(other, Model, (3,))
    assert rref.rpc_sync().times(2) == 6
    sample = rpc.rpc_sync(other, Sample, (torch.ones(3),))
    assert type(sample) is Sample and sample.x.sum() == 3
    part()
"""
    )


def test_different_main_scripts(programs: Programs) -> None:
    """By value, where the other's main script is another one."""
    body = """
meet()
assert rpc.rpc_sync(other, double, (4,)) == 8
assert rpc.rpc_sync(other, Model(5).times, (2,)) == 10
assert rpc.rpc_sync(other, triple, (4,)) == 12
try:
    rpc.rpc_sync(other, fail, (Mistake, "text"))
except RuntimeError as error:
    assert "Mistake" in str(error) and "text" in str(error)
except Mistake as error:
    assert error.args == ("text",)
else:
    sys.exit("nothing was raised")
part()
"""
    plain = "import os, zrpc as rpc\nrpc.init_rpc('w1')\nrpc.shutdown()\n"
    pids = [programs.start(HEAD + body, 0, 2), programs.start(plain, 1, 2)]
    ended = [programs.wait(pid, rank) for rank, pid in enumerate(pids)]
    assert [e.code for e in ended] == [0, 0], ended


def test_one_main_script_at_two_places(programs: Programs) -> None:
    """As on two hosts: by name, so that the functions find what the callee has."""
    script = HEAD + "meet(); assert rpc.rpc_sync(other, whose) == 1 - rank; part()\n"
    pids = [programs.start(script, rank, 2) for rank in range(2)]
    ended = [programs.wait(pid, rank) for rank, pid in enumerate(pids)]
    assert [e.code for e in ended] == [0, 0], ended


def test_a_script_with_a_function_that_the_other_lacks(programs: Programs) -> None:
    """Both name the same `__main__` function, and each means its own."""
    one = HEAD + "meet(); assert rpc.rpc_sync(other, whose) == 0; part()\n"
    other = one.replace("whose) == 0", "whose) == 1").replace("return state[0]", "return 1")
    pids = [programs.start(one, 0, 2), programs.start(other, 1, 2)]
    ended = [programs.wait(pid, rank) for rank, pid in enumerate(pids)]
    assert [e.code for e in ended] == [0, 0], ended


def test_the_callee_prints_a_failure_once(programs: Programs) -> None:
    """To its standard error, where no logging is set up."""
    ended = programs.run(
        HEAD
        + """
meet()
if rank == 0:
    try:
        rpc.rpc_sync(other, fail, (ValueError, "printed" + " once"))
    except ValueError:
        pass
part()
"""
    )
    assert [e.code for e in ended] == [0, 0], ended
    assert ended[0].output == ""
    assert ended[1].output.count("ValueError: printed once") == 1
    assert "Traceback (most recent call last)" in ended[1].output
    assert "WorkerInfo(id=1, name=w1)" in ended[1].output


def test_a_lost_error_is_printed_once(programs: Programs) -> None:
    ended = programs.run(
        HEAD
        + """
meet()
if rank == 0:
    rpc.rpc_async(other, fail, (ValueError, "lost" + " error"))
part()
"""
    )
    assert [e.code for e in ended] == [0, 0], ended
    assert ended[0].output.count("nobody waited for it") == 1
    assert "ValueError: lost error" in ended[0].output


def _pid() -> int:
    return os.getpid()


@pytest.mark.zrpc(workers=3, processes=True)
def test_each_worker_is_a_process(mesh: Mesh) -> None:
    pids = [mesh.run(0, rpc.rpc_sync, to, _pid) for to in range(3)]
    assert pids == [mesh.pid(rank) for rank in range(3)]


def _sums(n: int) -> list[float]:
    big = torch.full((n,), 2.0)
    futures = [rpc.rpc_async(i % 3, torch.sum, (big * i,)) for i in range(12)]
    return [f.item() for f in torch.futures.wait_all(futures)]


@pytest.mark.zrpc(workers=3, processes=True)
def test_large_tensors_between_processes(mesh: Mesh) -> None:
    n = 1_000_000
    assert mesh.run_all(_sums, n) == [[2.0 * n * i for i in range(12)]] * 3


def _mutate(tensor: torch.Tensor) -> float:
    tensor += 1
    return tensor.sum().item()


def _writable_and_private() -> bool:
    mine = torch.zeros(500_000)
    sums = {rpc.rpc_sync(1, _mutate, (mine,)) for _ in range(5)}
    received = [rpc.rpc_sync(1, torch.zeros, (500_000,)) for _ in range(5)]
    for i, tensor in enumerate(received):
        tensor += i
    totals = [tensor[-1].item() for tensor in received]
    return sums == {500_000.0} and totals == list(range(5)) and not mine.any()


@pytest.mark.zrpc(processes=True)
def test_large_tensors_are_writable_and_private(mesh: Mesh) -> None:
    assert mesh.run(0, _writable_and_private)
