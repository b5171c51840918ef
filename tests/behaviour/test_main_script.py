"""What workers take from each other's main scripts: functions and classes, by name or by value."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest

import zrpc
from tests.support import targets
from tests.support.programs import Programs
from zrpc.testing import Mesh

Succeed = Callable[..., list[str]]

pytestmark = pytest.mark.system

HEAD = """
import enum, os, sys, threading
import torch
import zrpc as rpc

LOCK = threading.Lock()
STEPS = []
rank = int(os.environ["RANK"])
first, other, state = rank == 0, f"worker{1 - rank}", [rank]

class Thing: pass

class Color(enum.Enum):
    RED = 1

class Failed(Exception): pass

def register(step):
    with LOCK:
        STEPS.append(step)
        return len(STEPS)

def kinds(thing, color):
    return isinstance(thing, Thing), color is Color.RED

class Owner:
    def check(self, thing, color, function):
        return kinds(thing, color)

def answer():
    return Thing(), Color.RED, lambda: kinds

def fail():
    error = Failed("why")
    error.more = [Thing(), lambda: kinds]
    raise error

def whose():
    return state[0]

async def triple(x):
    return 3 * x

rpc.init_rpc()
"""
END = "\nrpc.shutdown()\n"


def run(programs: Programs, *scripts: str) -> None:
    """Runs a script as each worker."""
    pids = [programs.start(script, rank, 2) for rank, script in enumerate(scripts)]
    ended = [programs.wait(pid, rank) for rank, pid in enumerate(pids)]
    assert [e.code for e in ended] == [0, 0], ended


def test_what_the_script_defines_means_the_same_in_every_direction(succeed: Succeed) -> None:
    succeed(
        HEAD
        + """
if first:
    assert rpc.rpc_sync("worker1", register, args=(len,)) == 1
    assert rpc.rpc_sync("worker1", register, args=(lambda x: x,)) == 2
    assert rpc.rpc_sync("worker1", lambda: register(1)) == 3
    owner = rpc.remote("worker1", Owner)
    assert owner.rpc_sync().check(Thing(), Color.RED, lambda: 0) == (True, True)
    assert rpc.rpc_sync("worker1", lambda r: type(r.local_value()) is Owner, args=(owner,))
    made = rpc.remote("worker1", lambda: [Thing(), Color.RED])
    assert kinds(*made.to_here()) == (True, True)
    *found, function = rpc.rpc_sync("worker1", answer)
    assert kinds(*found) == (True, True) and function() is kinds
    try:
        rpc.rpc_sync("worker1", fail)
    except Failed as error:
        assert type(error.more[0]) is Thing and error.more[1]() is kinds
    with rpc.autograd.context():
        x = torch.ones(2, requires_grad=True)
        thing, y = rpc.rpc_sync("worker1", lambda t, x: (Thing(), x * 2), args=(Thing(), x))
        assert type(thing) is Thing and y.requires_grad
rpc.shutdown()
assert len(STEPS) == (0 if first else 3)
"""
    )


def test_a_name_that_one_worker_lacks_fails_the_call(succeed: Succeed) -> None:
    """If the callee lacks it, before it runs."""
    succeed(
        HEAD
        + """
if first:
    def only_here(): return 5
    class OnlyHere: pass
else:
    class OnlyThere: pass
    def made(): return OnlyThere(), lambda: 0
rpc.barrier()

def check(call, executed, *names):
    try:
        call()
        sys.exit("it was called")
    except rpc.SerializationError as error:
        assert error.executed is executed, error
        assert any(repr(name) in str(error) for name in names), error

if first:
    for call in (
        lambda: rpc.rpc_sync("worker1", lambda: only_here()),
        lambda: rpc.rpc_sync("worker1", lambda x: 5, args=([OnlyHere(), only_here],)),
        lambda: rpc.rpc_async("worker1", lambda: only_here()).wait(),
        lambda: rpc.remote("worker1", lambda: only_here()).to_here(),
        lambda: rpc.remote("worker1", Owner).rpc_sync().check(only_here, 0, lambda: 0) and 5,
    ):
        check(call, False, "only_here", "OnlyHere")
    made = lambda: rpc.rpc_sync("worker1", lambda: sys.modules["__main__"].made())
    check(made, True, "OnlyThere")
"""
        + END
    )


def test_between_different_main_scripts_all_goes_by_value(programs: Programs) -> None:
    plain = "import zrpc as rpc\nrpc.init_rpc()\nrpc.shutdown()\n"
    calls = """
assert rpc.rpc_sync(other, whose) == 0
assert rpc.rpc_sync(other, Owner().check, (Thing(), Color.RED, 0)) == (True, True)
assert rpc.rpc_sync(other, triple, (4,)) == 12
try:
    rpc.rpc_sync(other, fail)
    sys.exit("nothing was raised")
except RuntimeError as error:
    assert "Failed" in str(error) and "why" in str(error)
except Failed as error:
    assert error.args == ("why",)
"""
    run(programs, HEAD + calls + END, plain)


def test_a_function_means_that_of_the_callee_in_an_equal_script(programs: Programs) -> None:
    """An equal script may lie at two places, as on two hosts."""
    equal = f"{HEAD}assert rpc.rpc_sync(other, whose) == 1 - rank{END}"
    one = f"{HEAD}assert rpc.rpc_sync(other, whose) == 0{END}"
    another = one.replace("whose) == 0", "whose) == 1").replace("return state[0]", "return 1")
    run(programs, equal, equal)
    run(programs, one, another)


# -- classes that workers have only by value: their state, and what changes in them ---------------


class Counter:
    total = 0

    def add(self) -> int:
        type(self).total += 1
        return self.total


class Sub(Counter):
    def add(self) -> int:
        return super().add() * 10


class Slotted:
    __slots__ = ("x",)
    total = 0

    def add(self) -> int:
        Slotted.total += 1
        return self.total


class Color(enum.Enum):
    RED = 1

    def add(self) -> int:
        Color.total = getattr(Color, "total", 0) + 1  # type: ignore[attr-defined]
        return Color.total  # type: ignore[attr-defined,no-any-return]


class Registry:
    names: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls) -> None:
        Registry.names.append(cls.__name__)


class Registered(Registry):
    def add(self) -> int:
        Registry.names.append("call")
        return Registry.names.count("call")


def call(to: str, value: Any) -> Any:
    return zrpc.rpc_sync(to, add, args=(value,))


def add(value: Any) -> Any:
    targets.kept.append(value)  # or its class would end with it
    return value.add()


MAKERS: list[Callable[[], Any]] = [Counter, Slotted, lambda: Color.RED, Registered]


@pytest.mark.zrpc(workers=2, processes=True)
def test_a_class_keeps_its_state_from_call_to_call(mesh: Mesh) -> None:
    """From two callers; one has the class itself by value."""
    for make in MAKERS:
        calls = [mesh.run(1, add, make()), mesh.run(1, add, make())]
        calls += [mesh.run(0, call, "worker1", make()), mesh.run(0, call, "worker1", make())]
        assert calls == [1, 2, 3, 4]
    assert mesh.run(1, add, Sub()) == 50  # it has its base class's state
