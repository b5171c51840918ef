"""What classes by value take over from messages, in processes without I/O."""

from __future__ import annotations

import abc
import functools
import gc
import signal
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.handled import signal_handlers
from tests.support.targets import fail
from tests.support.threads import start_all
from zrpc.class_versions import ClassVersions

ID = "the id"
Message = tuple[int, dict[str, Any]]


def fill(cls: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(cls, name, value)


class Process:
    """A process that classes with one id are sent from and arrive in."""

    def __init__(self) -> None:
        self.known: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
        self.versions = ClassVersions(self.known)
        self.made = 0

    def define(self, **attributes: Any) -> Any:
        cls = self.known[ID] = type("Thing", (), attributes)
        return cls

    def send(self) -> Message:
        cls = self.known[ID]
        own = {name: value for name, value in vars(cls).items() if name not in NOT_SENT}
        return self.versions.number(cls), own

    def make(self) -> type:
        self.made += 1
        cls = self.known[ID] = type("Thing", (), {})
        return cls

    def receive(self, message: Message, fill: Callable[..., None] = fill) -> Any:
        cls = self.versions.make(ID, self.make)
        self.versions.fill(cls, *message, fill)
        return cls


NOT_SENT = ("__dict__", "__weakref__")


def first(self: Any) -> str:
    return "first"


def second(self: Any) -> str:
    return "second"


def third(self: Any) -> str:
    return "third"


@pytest.fixture
def a() -> Process:
    return Process()


@pytest.fixture
def b() -> Process:
    return Process()


def test_what_is_redefined_follows_its_process() -> None:
    for as_attribute in (
        lambda f: f,
        property,
        functools.cached_property,
        classmethod,
        lambda f: staticmethod(functools.partial(f, None)),
        functools.partialmethod,
    ):
        a, b = Process(), Process()
        thing: Any = a.define(total=0, act=as_attribute(first), gone=first)
        there = b.receive(a.send())
        there.total = 7
        changed: Any = as_attribute(second)
        if isinstance(changed, functools.cached_property):
            changed.__set_name__(thing, "act")
        thing.act, thing.more, thing.limit = changed, third, 3
        thing.__doc__, thing.__hash__ = "second", None
        del thing.gone
        assert b.receive(a.send()) is there
        found = there().act
        result = found() if callable(found) else found
        assert (result, there().more(), there.limit, there.total) == ("second", "third", 3, 7)
        assert (there.__doc__, there.__hash__, hasattr(there, "gone")) == ("second", None, False)


def test_code_that_is_changed_in_place_follows_too(a: Process, b: Process) -> None:
    function = types.FunctionType(first.__code__, globals())
    thing = a.define(act=function, held=property(function))
    there = b.receive(a.send())
    function.__code__ = second.__code__
    number, attributes = a.send()
    function.__defaults__ = (2,)
    assert a.send()[0] == number + 1  # new defaults are a new version too
    copy = types.FunctionType(function.__code__, globals())
    b.receive((number, {**attributes, "act": copy, "held": property(copy)}))
    assert (there().act(), there().held) == (thing().act(), "second")


def test_an_older_version_overwrites_nothing(a: Process, b: Process) -> None:
    thing = a.define(act=first)
    old = a.send()
    thing.act = second
    new = a.send()
    there = b.receive(new)
    b.receive(old)
    assert there().act() == "second"


def test_only_the_defining_process_raises_the_version(a: Process, b: Process) -> None:
    """Through a third process, and back."""
    c = Process()
    thing = a.define(total=0, act=first)
    there = b.receive(a.send())
    there.total = 1
    beyond = c.receive(b.send())
    assert (beyond.total, beyond().act()) == (1, "first")
    there.act = third
    c.receive(b.send())
    assert beyond().act() == "first"
    thing.act = second
    c.receive(a.send())
    b.receive(c.send())
    a.receive(c.send())
    assert there().act() == beyond().act() == thing().act() == "second"
    assert (thing.total, there.total, beyond.total) == (0, 1, 1)


def test_classes_that_are_registered_later_arrive(a: Process, b: Process) -> None:
    class Shape(abc.ABC):  # noqa: B024
        pass

    def fill(cls: Any, attributes: dict[str, Any]) -> None:
        for each in attributes.get("_abc_impl", ()):
            cls.register(each)

    def make() -> type:
        b.known[ID] = abc.ABCMeta("Shape", (), {})
        return b.known[ID]

    number = a.versions.number(Shape)
    there = b.versions.make(ID, make)
    b.versions.fill(there, number, {"_abc_impl": []}, fill)
    assert not issubclass(int, there)
    b.versions.fill(there, number, {"_abc_impl": [int]}, fill)
    assert issubclass(int, there)


def test_a_thread_waits_until_another_has_filled_a_class(a: Process, b: Process) -> None:
    a.define(total=0, act=first)
    message = a.send()
    filling, go_on = threading.Event(), threading.Event()

    def slowly(cls: type, attributes: dict[str, Any]) -> None:
        filling.set()
        assert go_on.wait(10)
        fill(cls, attributes)

    one = start_all([lambda: b.receive(message, slowly)], 10)
    assert filling.wait(10)
    other = start_all([lambda: b.receive(message)().act()], 10)
    go_on.set()
    one()
    assert (other(), b.made) == (["first"], 1)


def test_a_class_that_could_not_be_filled_is_filled_by_the_next(a: Process, b: Process) -> None:
    a.define(total=0, act=first)
    with pytest.raises(ValueError, match="metaclass"):
        b.receive(a.send(), lambda *_: fail(ValueError("metaclass")))
    assert b.receive(a.send())().act() == "first"


def test_a_class_that_nobody_uses_is_freed(a: Process, b: Process) -> None:
    kept = [a.define(act=first, held=property(second))]
    kept.append(b.receive(a.send()))
    gone = [weakref.ref(each) for each in kept]
    kept.clear()
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_a_signal_handler_may_wait_for_a_thread_that_uses_classes() -> None:
    process, numbers = Process(), []

    def wait(*_: object) -> None:
        numbers.extend(start_all([lambda: process.versions.number(int)], 10)())

    def fill_interrupted(cls: type, attributes: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGUSR1)
        fill(cls, attributes)

    with signal_handlers() as handle:
        handle(wait)
        process.receive((1, {"first": first}), fill_interrupted)
    assert len(numbers) == 1
