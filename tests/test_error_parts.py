"""Exceptions keep their class, text, args and attributes when they are pickled or copied."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.handled import signal_handlers
from zrpc.error_parts import copy_of_error, pickle_can_make
from zrpc.wire.exceptions import dump_exception, load_exception
from zrpc.wire.pickling import dumps


class Formats(Exception):
    def __init__(self, wanted: object, have: object = 0) -> None:
        super().__init__(f"wanted {wanted}, have {have}")


class OfTwo(Exception):
    def __init__(self, a: object, b: object) -> None:
        super().__init__(f"{a} and {b}")
        self.a = a


class OfKeywords(Exception):
    """Python keeps no keyword arguments in args."""

    def __init__(self, *, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class MadeByNew(Exception):
    def __new__(cls, a: str, b: str) -> MadeByNew:
        return super().__new__(cls, a + b)

    def __init__(self, a: str, b: str) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int
    why: str = "because"


class WithSlots(Exception):
    __slots__ = ("__hidden", "code", "unset")

    def __init__(self, code: int) -> None:
        super().__init__("slots")
        self.code = code
        self.__hidden = None

    def __str__(self) -> str:
        return f"{self.code} {self.__hidden}"


class OfBytes(UnicodeDecodeError):
    def __init__(self, position: int) -> None:
        super().__init__("utf8", b"abc\xff", position, position + 1, "here")


class OfSyntax(SyntaxError):
    def __init__(self, line: int) -> None:
        super().__init__("bad", ("file.py", line, 1, "text"))


class OfModule(ImportError):
    def __init__(self, module: str) -> None:
        super().__init__(f"no {module}", name=module, path="there")


class OfTwoBases(LookupError, OSError):
    def __init__(self, code: int) -> None:
        super().__init__(code, "of two", "file")


class Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("call make")

    def make(cls, text: str) -> Any:
        return super().__call__(text)


class OfMeta(Exception, metaclass=Meta):
    pass


class RefusesAttributes(Exception):
    def __init__(self, a: object, b: object) -> None:
        super().__init__(f"{a}{b}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class OfItself(Exception):
    def __init__(self, a: object, b: object) -> None:
        super().__init__(f"{a}{b}")
        self.others = [ValueError(self)]


class Reduces(Exception):
    """Says how to pickle it, which a subclass may not know of."""

    def __init__(self, a: object) -> None:
        super().__init__(f"reduces {a}")
        self.a = a

    def __reduce__(self) -> Any:
        return type(self), (self.a,)


class ReducesToOneArgument(Reduces):
    def __init__(self, a: object, b: object) -> None:
        super().__init__(f"{a} {b}")


def renamed() -> SyntaxError:
    error = SyntaxError("bad", ("file.py", 1, 1, "text"))
    error.filename, error.lineno = "other.py", 9
    return error


ERRORS: list[Callable[[], BaseException]] = [
    lambda: Formats(7, 3),
    lambda: OfTwo(1, 2),
    lambda: OfKeywords(code=3),
    lambda: MadeByNew("a", "b"),
    lambda: Frozen(code=2),
    lambda: WithSlots(4),
    lambda: OfBytes(3),
    lambda: OfSyntax(7),
    lambda: OfModule("module"),
    lambda: OfTwoBases(3),
    lambda: OfMeta.make("made"),
    lambda: RefusesAttributes(1, 2),
    lambda: ReducesToOneArgument(1, 2),
    lambda: NameError("text", name="missing"),
    lambda: FileNotFoundError(2, "no such file", "from", None, "to"),
    lambda: BlockingIOError(11, "later", 3),
    lambda: ValueError("plain", {"with": [1]}),
    renamed,
]


def dumped(error: Any) -> Any:
    return load_exception(dump_exception(error, "w1", True))


def dumped_for_another_main(error: Any) -> Any:
    return load_exception(dump_exception(error, "w1", False))


def dumped_in_graph(error: Any) -> Any:
    return load_exception(dump_exception(error, "w1", True, in_graph=True))


def by_value(error: Any) -> Any:
    return pickle.loads(dumps(error))


WAYS = [dumped, dumped_for_another_main, dumped_in_graph, by_value, copy_of_error]


def content(error: Any) -> Any:
    names = "errno filename filename2 lineno name path value start object characters_written code"
    fields = [repr(getattr(error, name, None)) for name in names.split()]
    return type(error), str(error), repr(error.args), repr(vars(error)), fields


def test_an_exception_is_the_same_again() -> None:
    for way, make in itertools.product(WAYS, ERRORS):
        error = make()
        again = way(error)
        assert again is not error
        assert content(again) == content(error), way


def test_odd_exceptions_arrive() -> None:
    again = dumped(OfItself(1, 2))
    assert str(again) == "12"
    assert again.others[0].args == (again,)
    assert not hasattr(dumped(WithSlots(1)), "unset")  # a slot without a value
    again = dumped(AttributeError("none", name="missing", obj=[1]))
    assert (again.name, again.obj) == ("missing", None)  # without its object


class Counted(Exception):
    made = 0

    def __init__(self, text: str) -> None:
        if type(self).made:
            sys.exit(3)
        type(self).made += 1
        super().__init__(text)


def test_no_constructor_runs_again() -> None:
    """It might exit."""
    error = Counted("text")
    assert str(dumped(error)) == str(copy_of_error(error)) == "text"
    assert Counted.made == 1


def test_the_exceptions_of_a_group_are_the_same_again() -> None:
    class Group(ExceptionGroup):  # type: ignore[type-arg]
        def __new__(cls, errors: Any, *, code: int) -> Any:
            self = super().__new__(cls, f"group {code}", errors)
            self.code = code
            return self

        def __init__(self, errors: Any, *, code: int) -> None:
            pass

    error = OfTwo(1, 2)
    error.add_note("a note")
    group = ExceptionGroup("outer", [Group([error, Formats(7, 3)], code=5), error])
    again = dumped(group)
    assert str(again) == str(group)
    inner, other = again.exceptions
    assert (str(inner), inner.code) == ("group 5 (2 sub-exceptions)", 5)
    assert [str(each) for each in inner.exceptions] == ["1 and 2", "wanted 7, have 3"]
    assert inner.exceptions[0] is other
    assert other.__notes__ == ["a note"]


class Interrupted(Exception):
    """A signal arrives while it is copied."""

    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return super().__reduce__()


class Alarm(Exception):
    """What the signal's handler raises."""


def test_what_a_signal_handler_raises_passes_through() -> None:
    def alarm(*_: object) -> None:
        raise Alarm

    with signal_handlers() as handle:
        handle(alarm)
        for act in (copy_of_error, dumps, pickle_can_make):
            with pytest.raises(Alarm):
                act(Interrupted())
