"""Workers that run the same main script call each other with functions that go by value."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Succeed = Callable[..., list[str]]

pytestmark = pytest.mark.system

HEAD = """
import enum, sys, threading
import torch
import zrpc as rpc

LOCK = threading.Lock()
STEPS = []

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

rpc.init_rpc()
first = rpc.get_worker_info().id == 0
"""


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


LACKING = """
if first:
    def only_here(): return 5
    class OnlyHere: pass
    CALLS = [
        lambda: rpc.rpc_sync("worker1", lambda: only_here()),
        lambda: rpc.rpc_sync("worker1", lambda x: 5, args=([OnlyHere(), only_here],)),
        lambda: rpc.rpc_async("worker1", lambda: only_here()).wait(),
        lambda: rpc.remote("worker1", lambda: only_here()).to_here(),
        lambda: rpc.remote("worker1", Owner).rpc_sync().check(only_here, 0, lambda: 0) and 5,
    ]
"""


def test_a_name_that_the_callee_lacks_fails_the_call_before_it_runs(succeed: Succeed) -> None:
    succeed(
        HEAD
        + LACKING
        + """
    for call in CALLS:
        try:
            call()
            sys.exit("it was called")
        except rpc.SerializationError as error:
            assert error.executed is False, error
            assert "'only_here'" in str(error) or "'OnlyHere'" in str(error), error
rpc.shutdown()
"""
    )


def test_a_name_that_the_caller_lacks_fails_the_call_that_has_run(succeed: Succeed) -> None:
    succeed(
        """
import os
if os.environ["RANK"] == "1":
    class OnlyHere: pass
    def made(): return OnlyHere(), lambda: 0
"""
        + HEAD
        + """
if first:
    try:
        rpc.rpc_sync("worker1", lambda: sys.modules["__main__"].made())
        sys.exit("it was read")
    except rpc.SerializationError as error:
        assert error.executed is True and "'OnlyHere'" in str(error), error
rpc.shutdown()
"""
    )
