"""What a message names in the main script, which both ends run."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.wire.test_pickling import arrived, sent
from zrpc.errors import SerializationError
from zrpc.wire.kind import Kind
from zrpc.wire.pickling import dumps
from zrpc.wire.unpickling import Decoder

SCRIPT = """
import collections, dataclasses, enum, functools, threading, types, typing

LOCK = threading.Lock()
STEPS = []
T = typing.TypeVar("T")
config = types.ModuleType("config")
Made = dataclasses.make_dataclass("Made", ["x"])

def register(step):
    with LOCK:
        STEPS.append(step)

def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

@logged
def decorated(): pass

def changed(): return "first"

taken = changed

def changed(): return "second"

nameless = lambda: "nameless"

class Meta(type): pass

class OfMeta(metaclass=Meta): pass

class Thing(typing.Generic[T]):
    class Inner: pass
    def method(self): pass
    @classmethod
    def make(cls): return cls
    @staticmethod
    def static(): pass

class Color(enum.Enum):
    RED = 1

class Flags(enum.Flag):
    A = 1
    B = 2

class Pair(typing.NamedTuple):
    a: object = 1

@dataclasses.dataclass
class Data:
    a: object = 1

class Proud(enum.Enum):
    ONE = "1"
    def shout(self): return self.value
"""


class Scripts:
    """The script as its sender and its receiver run it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.ours, self.theirs = types.ModuleType("__main__"), types.ModuleType("__main__")
        for script in (self.ours, self.theirs):
            exec(SCRIPT, vars(script))

    def send(self, expression: str, pack: Callable[[Any], Any]) -> Any:
        """Returns the message with the value that an expression has in the sender's script."""
        self._monkeypatch.setitem(sys.modules, "__main__", self.ours)
        message = pack(eval(expression, vars(self.ours)))
        self._monkeypatch.setitem(sys.modules, "__main__", self.theirs)
        return message

    def travel(self, expression: str, same_main: bool = True) -> Any:
        """Returns the value of an expression as it arrives."""
        message = self.send(expression, lambda value: sent(value, same_main))
        return Decoder(None, arrived(message)).unpack()


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return Scripts(monkeypatch)


NAMES = [
    "register",
    "decorated",
    "Thing",
    "Thing.Inner",
    "Thing.method",
    "Thing.static",
    "Thing.make.__func__",
    "OfMeta",
    "Color",
    "Color.RED",
    "Flags.A | Flags.B",
    "Proud.ONE.shout.__func__",
    "Pair",
    "Data",
    "Made",
    "T",
    "config",
]


def test_what_a_lambda_uses_is_named(scripts: Scripts) -> None:
    for name in NAMES:
        assert scripts.travel(f"lambda: {name}")() is eval(name, vars(scripts.theirs)), name


def test_what_carries_a_function_without_a_name_names_the_rest(scripts: Scripts) -> None:
    for expression, find in (
        ("collections.defaultdict(lambda: 0, a=Thing)", lambda found: found["a"]),
        ("functools.partial(lambda x: x, Thing)", lambda found: found()),
        ("(lambda kept: lambda: kept)(Thing)", lambda found: found()),
        ("lambda kept=Thing: kept", lambda found: found()),
        ("Data([Thing, lambda: 0])", lambda found: found.a[0]),
        ("logged(lambda: Thing)", lambda found: found()),
    ):
        assert find(scripts.travel(expression)) is scripts.theirs.Thing


def test_a_class_method_is_the_one_of_the_receiver(scripts: Scripts) -> None:
    _, make = scripts.travel("(lambda: 0, Thing.make)")
    assert make() is scripts.theirs.Thing
    assert make.__func__ is scripts.theirs.Thing.make.__func__


def test_the_script_itself_is_named(scripts: Scripts) -> None:
    scripts.ours.this = scripts.ours
    assert scripts.travel("(lambda: 0, this)")[1] is scripts.theirs


def test_plain_values_of_the_script_are_copied(scripts: Scripts) -> None:
    scripts.ours.STEPS.append("mine")
    found = scripts.travel("lambda: STEPS")()
    assert found == ["mine"]
    assert found is not scripts.theirs.STEPS


def test_what_the_script_has_not_under_its_name_is_copied(scripts: Scripts) -> None:
    del scripts.theirs.STEPS, scripts.theirs.nameless, scripts.theirs.taken
    for expression, result in (
        ("taken", "first"),
        ("changed", "second"),
        ("nameless", "nameless"),
        ("lambda: taken()", "first"),
    ):
        assert scripts.travel(expression)() == result, expression


def test_all_is_copied_if_the_scripts_differ(scripts: Scripts) -> None:
    del scripts.ours.LOCK
    for name in ("register", "Thing", "Color.RED", "Data()"):
        theirs = eval(name, vars(scripts.theirs))
        for beside in ("0", "lambda: 0"):
            _, found = scripts.travel(f"({beside}, {name})", same_main=False)
            assert found is not theirs
            assert type(found).__name__ == type(theirs).__name__


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.RESULT])
@pytest.mark.parametrize("name", ["register", "Thing", "Made", "Color.RED"])
def test_what_the_receiver_lacks_is_named_in_the_error(
    scripts: Scripts, name: str, kind: Kind
) -> None:
    message = arrived(scripts.send(f"lambda: {name}", sent))
    message.kind = kind
    missing = name.partition(".")[0]
    delattr(scripts.theirs, missing)
    with pytest.raises(SerializationError, match=f"'{missing}'") as raised:
        Decoder(None, message).unpack()
    assert raised.value.executed is (kind == Kind.RESULT)


def with_copies(value: Any) -> bytes:
    return dumps(value, same_main=True, copies=True)


def test_a_copy_that_is_large_is_left_out(scripts: Scripts) -> None:
    exec("import numpy\nLARGE = numpy.ones(200_000)", vars(scripts.ours))
    exec("def large(): return LARGE", vars(scripts.ours))
    pickled = scripts.send("lambda: large", with_copies)
    assert len(pickled) < 10_000


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize("same_main", [True, False])
def test_a_torchscript_function_is_named_only_if_the_scripts_are_the_same(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, same_main: bool
) -> None:
    monkeypatch.setattr(twice, "__module__", "__main__")
    scripts.ours.twice = torch.jit.script(twice)
    scripts.theirs.twice = len
    for expression in ("twice", "(lambda: twice)()"):
        found = scripts.travel(expression, same_main)
        assert (found is len) is same_main
        if not same_main:
            assert found(torch.ones(1)).item() == 2
