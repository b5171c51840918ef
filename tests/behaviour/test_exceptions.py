"""What a caller sees when a call fails, and that the callee goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
import traceback
from typing import Any

import pytest

import zrpc as rpc
from tests.support.targets import fail, fail_with
from tests.support.ways import Call, ways
from zrpc.testing import Mesh

pytestmark = pytest.mark.usefixtures("goes_on")


class Own(Exception):
    """An exception of the program's own, with what a constructor can do."""

    def __init__(self, code: int, *, detail: str = "") -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_own, (self.code, self.detail)


def _make_own(code: int, detail: str) -> Own:
    return Own(code, detail=detail)


class Misfit(Exception):
    """Its args don't fit its constructor: pickle can't make it again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two} make a misfit")


class Short(Exception):
    """Its args fit its constructor, but then its text is another."""

    def __init__(self, wanted: object, have: int = 0) -> None:
        super().__init__(f"wanted {wanted}, have {have}")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("has a lock")
        self.lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses to have attributes set, its cause and its traceback too."""

    code: int

    def __reduce__(self) -> tuple[Any, ...]:
        return Frozen, (self.code,)


# -- the callee's own ------------------------------------------------------------------------

ERRORS = [
    *(ValueError("bad"), KeyError(("a", 1)), StopIteration(5), AssertionError("a", 2)),
    *(FileNotFoundError(2, "No such file", "name"), TimeoutError("of the callee")),
    *(Exception("plain", {"with": [1, 2]}), Exception("text that mentions __main__")),
    *(rpc.RpcTimeoutError("the callee's own"), rpc.WorkerDied("somebody else")),
]


@ways
def test_type_and_args_are_the_callees(shared: Mesh, call: Call) -> None:
    for to in (0, 1):
        for error in ERRORS:
            with pytest.raises(type(error)) as info:
                call(to, fail, (error,))
            assert type(info.value) is type(error)
            assert info.value.args == error.args
            if isinstance(error, OSError):
                assert (info.value.errno, info.value.filename) == (error.errno, error.filename)


@ways
def test_the_remote_traceback_is_the_cause(shared: Mesh, call: Call) -> None:
    with pytest.raises(ValueError, match=r"^bad$") as info:
        call(1, fail, (ValueError("bad"),))
    cause = info.value.__cause__
    assert isinstance(cause, rpc.RemoteError)
    text = str(cause)
    assert "On WorkerInfo(id=1, name=worker1)" in text
    assert "Traceback (most recent call last)" in text
    assert "raise error" in text
    assert "targets.py" in text
    # And so Python shows it where nobody catches it.
    assert "On WorkerInfo(id=1, name=worker1)" in "".join(traceback.format_exception(info.value))


def test_the_remote_traceback_shows_the_remote_causes(shared: Mesh) -> None:
    with pytest.raises(ValueError, match="outer") as info:
        rpc.rpc_sync(1, fail_from)
    assert "KeyError: 'inner'" in str(info.value.__cause__)


def fail_from() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error


def test_an_error_through_two_workers(shared: Mesh) -> None:
    with pytest.raises(KeyError, match="deep") as info:
        rpc.rpc_sync(1, rpc.rpc_sync, (0, fail, (KeyError("deep"),)))
    text = str(info.value.__cause__)
    assert "name=worker1" in text
    assert "name=worker0" in text


@ways
def test_exceptions_of_unusual_classes_arrive(shared: Mesh, call: Call) -> None:
    not_a_line: Any = 5
    for to in (0, 1):
        for kind, args, text in (
            (Own, (7,), "code 7"),
            (Short, (7, 3), "wanted 7, have 3"),
            (Misfit, (7, 3), "7 and 3 make"),
            (Frozen, (7,), ""),
            # Python's traceback module fails to show it.
            (SyntaxError, ("bad", ("file", 1, 1, not_a_line)), "bad"),
        ):
            with pytest.raises(kind, match=f"^{text}") as info:
                call(to, fail_with, (kind, *args), timeout=5)
            if kind in (Own, Frozen):
                assert info.value.code == 7  # type: ignore[attr-defined]
                assert "in fail_with" in str(info.value.__cause__)


# -- what can't travel -----------------------------------------------------------------------


@ways
def test_what_can_not_travel_arrives_as_text(shared: Mesh, call: Call) -> None:
    for kind, text in (
        (Unpicklable, "has a lock"),
        *((kind, kind.__name__) for kind in (SystemExit, KeyboardInterrupt, GeneratorExit)),
        (asyncio.CancelledError, "CancelledError"),
    ):
        with pytest.raises(rpc.RemoteError, match="Original exception on remote side was") as info:
            call(1, fail_with, (kind,), timeout=10)
        for part in (text, "On WorkerInfo(id=1, name=worker1)", "fail_with"):
            assert part in str(info.value)


@ways
def test_skip_of_a_test_in_a_handler_skips_it(caller: Mesh, call: Call) -> None:
    with pytest.raises(pytest.skip.Exception, match="no gpu"):
        call(1, pytest.skip, ("no gpu",), timeout=10)


def test_sys_exit_in_a_handler_does_not_end_the_worker(shared: Mesh) -> None:
    for _ in range(20):  # more than it has threads
        with pytest.raises(rpc.RemoteError, match="SystemExit"):
            rpc.rpc_sync(1, sys.exit, (5,))
