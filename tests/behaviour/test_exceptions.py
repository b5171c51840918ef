"""What a caller sees when a call fails, and that the callee goes on."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.targets import echo, fail, fail_with
from tests.support.waiting import until
from tests.support.ways import Call, ways
from zrpc.testing import Mesh


@pytest.fixture(autouse=True)
def goes_on(shared: Mesh) -> Iterator[None]:
    """Whatever a test does, the worker goes on afterwards."""
    yield
    assert rpc.rpc_sync(1, echo, ("still there",), timeout=10) == "still there"


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
    """Its args don't fit its constructor: pickle can't make it anew."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two} make a misfit")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("has a lock")
        self.lock = threading.Lock()


class UnpicklesElsewhereOnly(Exception):
    """Can be rebuilt in no thread but the one that made it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _only_in, (threading.get_ident(), *self.args)


def _only_in(thread: int, *args: Any) -> UnpicklesElsewhereOnly:
    if threading.get_ident() != thread:
        raise LookupError("not the thread that has made it")
    return UnpicklesElsewhereOnly(*args)


class ExitsWhenPickled(Exception):
    def __reduce__(self) -> Any:
        sys.exit(9)


class BadRepr(Exception):
    def __repr__(self) -> str:
        raise ValueError("no repr")

    __str__ = __repr__


# -- the callee's own ------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        TypeError("worse"),
        RuntimeError("x"),
        KeyError("k"),
        KeyError(("a", 1)),
        IndexError(),
        StopIteration(5),
        OSError(2, "No such file", "name"),
        FileNotFoundError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "reason"),
        AssertionError("a", 2),
        NotImplementedError(),
        TimeoutError("of the callee"),
        ZeroDivisionError("division by zero"),
        AttributeError("no such attribute"),
        ImportError("no module"),
        MemoryError("enough"),
        RecursionError("too deep"),
        Exception("plain", {"with": [1, 2]}),
        Exception("text that mentions __main__"),
        rpc.RpcTimeoutError("the callee's own"),
        rpc.WorkerDied("somebody else"),
    ],
    ids=lambda error: error if isinstance(error, int) else type(error).__name__,
)
def test_type_and_args_are_the_callees(shared: Mesh, call: Call, to: int, error: Exception) -> None:
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
def test_own_exception_with_attributes(shared: Mesh, call: Call) -> None:
    with pytest.raises(Own) as info:
        call(1, fail, (Own(7, detail="more"),))
    assert (info.value.code, info.value.detail) == (7, "more")


def test_attributes_and_notes_arrive(shared: Mesh) -> None:
    with pytest.raises(ValueError, match="x") as info:
        rpc.rpc_sync(1, fail_with_extras)
    assert info.value.extra == [1]  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11):
        assert info.value.__notes__ == ["a note"]


def fail_with_extras() -> None:
    error = ValueError("x")
    error.extra = [1]  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11):
        error.add_note("a note")
    raise error


def test_an_exception_that_holds_a_tensor(shared: Mesh) -> None:
    with pytest.raises(ValueError, match=r".") as info:
        rpc.rpc_sync(1, fail_with, (ValueError, "t", torch.ones(50_000)))
    assert info.value.args[1].sum() == 50_000


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no exception groups")
def test_an_exception_group(shared: Mesh) -> None:
    group = ExceptionGroup("g", [ValueError("a"), KeyError("b")])  # noqa: F821
    with pytest.raises(ExceptionGroup) as info:  # noqa: F821
        rpc.rpc_sync(1, fail, (group,))
    assert [repr(e) for e in info.value.exceptions] == ["ValueError('a')", "KeyError('b')"]


def test_an_exception_class_that_is_local(shared: Mesh) -> None:
    class Local(Exception):
        pass

    def raise_it() -> None:
        raise Local("here", 1)

    with pytest.raises(Local) as info:
        rpc.rpc_sync(1, raise_it)
    assert info.value.args == ("here", 1)


def test_a_torch_error(shared: Mesh) -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        rpc.rpc_sync(1, torch.add, (torch.ones(2), torch.ones(3)))
    with pytest.raises(torch.linalg.LinAlgError):
        rpc.rpc_sync(1, torch.linalg.inv, (torch.zeros(2, 2),))


def test_wrong_arguments_are_a_type_error_of_the_callee(shared: Mesh) -> None:
    with pytest.raises(TypeError, match="positional argument") as info:
        rpc.rpc_sync(1, fail, ())
    assert isinstance(info.value.__cause__, rpc.RemoteError)


def test_an_exception_whose_repr_fails(shared: Mesh) -> None:
    with pytest.raises(BadRepr) as info:
        rpc.rpc_sync(1, fail_with, (BadRepr,))
    assert "BadRepr" in str(info.value.__cause__)


def test_each_caller_gets_an_exception_of_its_own(shared: Mesh) -> None:
    seen = []
    for _ in range(2):
        with pytest.raises(Own) as info:
            rpc.rpc_sync(1, fail, (Own(1),))
        seen.append(info.value)
    assert seen[0] is not seen[1]


# -- what can't travel -----------------------------------------------------------------------


@ways
@pytest.mark.parametrize(
    ("kind", "args", "text"),
    [
        (Misfit, (1, 2), "1 and 2 make a misfit"),
        (Unpicklable, (), "has a lock"),
        (SystemExit, (3,), "SystemExit"),
        (KeyboardInterrupt, (), "KeyboardInterrupt"),
        (GeneratorExit, (), "GeneratorExit"),
        (asyncio.CancelledError, (), "CancelledError"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_can_not_travel_arrives_as_text(
    shared: Mesh, call: Call, kind: Any, args: Any, text: str
) -> None:
    with pytest.raises(RuntimeError, match="Original exception on remote side was") as info:
        call(1, fail_with, (kind, *args), timeout=10)
    assert isinstance(info.value, rpc.RemoteError)
    assert text in str(info.value)
    assert "On WorkerInfo(id=1, name=worker1)" in str(info.value)
    assert "fail_with" in str(info.value)


@pytest.mark.zrpc(timeout=15)
@ways
def test_an_exception_whose_pickling_would_end_the_worker(caller: Mesh, call: Call) -> None:
    with pytest.raises(rpc.RemoteError, match="ExitsWhenPickled"):
        call(1, fail_with, (ExitsWhenPickled, "x"), timeout=5)


def test_what_can_not_be_rebuilt_at_the_caller_arrives_as_text(shared: Mesh) -> None:
    with pytest.raises(rpc.RemoteError, match="not the thread that has made it"):
        rpc.rpc_sync(1, fail_with, (UnpicklesElsewhereOnly, "args"))


def test_sys_exit_in_a_handler_does_not_end_the_worker(shared: Mesh) -> None:
    for _ in range(20):  # more than it has threads
        with pytest.raises(rpc.RemoteError, match="SystemExit"):
            rpc.rpc_sync(1, sys.exit, (5,))


# -- arguments and results -------------------------------------------------------------------


class RaisesWhenPickled:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class RaisesWhenUnpickled:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return fail, (self.error,)


class RaisesWhenUnpickledTwice:
    """Arrives once, but can't come back."""

    def __init__(self, hops: int = 0) -> None:
        self.hops = hops

    def __reduce__(self) -> Any:
        return _hop, (self.hops + 1,)


def _hop(hops: int) -> Any:
    if hops == 2:
        raise LookupError("one hop too many")
    return RaisesWhenUnpickledTwice(hops)


UNPICKLABLE: list[Callable[[], Any]] = [
    threading.Lock,
    lambda: (i for i in range(3)),
    lambda: sys._getframe(),
    lambda: {"deep": [threading.Lock()]},
    lambda: RaisesWhenPickled(TypeError("pickling")),
    lambda: RaisesWhenPickled(ValueError("pickling")),
    lambda: RaisesWhenPickled(RuntimeError("pickling")),
    lambda: torch.futures.Future(),
    lambda: rpc.Future(),
    socket.socket,
]
kinds = pytest.mark.parametrize(
    "make",
    UNPICKLABLE,
    ids=[
        *("lock", "generator", "frame", "deep", "TypeError", "ValueError", "RuntimeError"),
        *("future", "rpc future", "socket"),
    ],
)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@kinds
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_an_unpicklable_argument_raises_at_the_call_itself(
    shared: Mesh, call: Call, make: Callable[[], Any]
) -> None:
    with pytest.raises(rpc.SerializationError):
        call(1, echo, (make(),))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@kinds
@ways
def test_an_unpicklable_result_is_an_error_at_the_caller(
    shared: Mesh, call: Call, make: Callable[[], Any]
) -> None:
    with pytest.raises(rpc.SerializationError):
        call(1, make, timeout=10)


def test_the_error_of_a_future_that_was_sent(shared: Mesh) -> None:
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        rpc.rpc_sync(1, echo, (rpc.Future(),))
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        rpc.rpc_sync(1, rpc.rpc_async, (0, max, (1, 2)))


@pytest.mark.zrpc(timeout=15)
@ways
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_result_whose_pickling_would_end_the_worker(
    caller: Mesh, call: Call, error: BaseException
) -> None:
    with pytest.raises(RuntimeError, match=type(error).__name__):
        call(1, RaisesWhenPickled, (_Plain(error),), timeout=5)


class _Plain:
    """Carries an exception in a message without being one."""

    def __init__(self, error: BaseException) -> None:
        self.what = (type(error), *error.args)

    def __reduce__(self) -> Any:
        return _make_exception, self.what


def _make_exception(kind: type[BaseException], *args: Any) -> BaseException:
    return kind(*args)


@ways
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)], ids=repr)
def test_an_argument_that_can_not_be_unpickled_at_the_callee(
    shared: Mesh, call: Call, error: BaseException
) -> None:
    with Gate() as gate:
        other = rpc.rpc_async(1, gate.wait_inside, ("other",))
        gate.await_entry()
        with pytest.raises(RuntimeError, match=type(error).__name__):
            call(1, echo, (RaisesWhenUnpickled(error),), timeout=10)
        gate.open()
        assert other.wait() == "other"


@ways
def test_a_result_that_can_not_be_unpickled_at_the_caller(shared: Mesh, call: Call) -> None:
    with pytest.raises(rpc.SerializationError, match="one hop too many"):
        call(1, echo, (RaisesWhenUnpickledTwice(),), timeout=10)


@pytest.mark.zrpc(timeout=15)
@pytest.mark.parametrize("error", [SystemExit(3)], ids=repr)
@ways
def test_a_result_that_would_end_the_caller(caller: Mesh, call: Call, error: BaseException) -> None:
    with pytest.raises(rpc.SerializationError, match=type(error).__name__):
        call(1, RaisesWhenUnpickled, (_Plain(error),), timeout=5)


@pytest.mark.zrpc(timeout=15)
def test_a_future_whose_result_would_end_a_thread_still_completes(caller: Mesh) -> None:
    future = rpc.rpc_async(1, RaisesWhenUnpickled, (_Plain(SystemExit(3)),))
    done = threading.Event()
    future.add_done_callback(lambda f: done.set())
    assert done.wait(10)
    with pytest.raises(rpc.SerializationError, match="SystemExit"):
        future.wait()


def test_arguments_nested_too_deep_for_pickle(shared: Mesh) -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    try:
        with pytest.raises(rpc.SerializationError):
            rpc.rpc_sync(1, len, (value,))
    finally:
        while value:  # else the interpreter frees it recursively
            value = value[0]


# -- logs ------------------------------------------------------------------------------------


_format = logging.Formatter("%(message)s").format


def _records(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.levelno >= logging.ERROR and text in _format(r)]


@ways
def test_the_callee_logs_a_failed_handler_once(
    shared: Mesh, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"of its own {id(call)}"
    with pytest.raises(ValueError, match="of its own"):
        call(1, fail, (ValueError(text),))
    (record,) = _records(caplog, text)
    assert "WorkerInfo(id=1, name=worker1)" in record.getMessage()
    assert record.name.startswith("zrpc")


class _Log:
    """Waits for the records of one logger, whichever thread makes them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.records: list[logging.LogRecord] = []
        self.came = threading.Event()
        self.handler = logging.Handler()
        self.handler.emit = self._emit  # type: ignore[method-assign]

    def _emit(self, record: logging.LogRecord) -> None:
        of_callee = "WorkerInfo" in record.getMessage().split("\n")[0]
        if not of_callee and self.text in _format(record):
            self.records.append(record)
            self.came.set()

    def __enter__(self) -> _Log:
        logging.getLogger("zrpc").addHandler(self.handler)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("zrpc").removeHandler(self.handler)


def _settle(future: Any) -> None:
    """Waits until a future is complete without asking for its outcome."""
    done = threading.Event()
    future.add_done_callback(lambda f: done.set())
    assert done.wait(10)


def test_an_error_that_nobody_waits_for_is_logged_once(shared: Mesh) -> None:
    with _Log("nobody") as log:
        future = rpc.rpc_async(1, fail, (ValueError("nobody"),))
        _settle(future)
        assert not log.records  # there is still somebody who may ask
        del future
        gc.collect()
        assert log.came.wait(10)
        rpc.rpc_sync(1, echo, (1,))
        assert len(log.records) == 1


def test_an_error_of_a_call_whose_future_is_dropped_at_once_is_logged(shared: Mesh) -> None:
    with _Log("dropped") as log:
        rpc.rpc_async(1, fail, (ValueError("dropped"),))
        assert log.came.wait(10)
    assert len(log.records) == 1


class _Ways:
    """The ways to ask a future for its outcome."""

    @staticmethod
    def wait(future: Any) -> None:
        future.wait()

    @staticmethod
    def value(future: Any) -> None:
        _settle(future)
        future.value()

    @staticmethod
    def wait_all(future: Any) -> None:
        torch.futures.wait_all([future])

    @staticmethod
    def collect_all(future: Any) -> None:
        for each in torch.futures.collect_all([future]).wait():
            each.wait()

    @staticmethod
    def then(future: Any) -> None:
        future.then(lambda f: f.wait()).wait()

    @staticmethod
    def then_value(future: Any) -> None:
        future.then(lambda f: f.value()).wait()

    @staticmethod
    def awaited(future: Any) -> None:
        async def main() -> None:
            await future

        asyncio.run(main())

    all: ClassVar[list[str]] = [
        "wait",
        "value",
        "wait_all",
        "collect_all",
        "then",
        "then_value",
        "awaited",
    ]


@pytest.mark.parametrize("way", _Ways.all)
def test_an_error_that_was_raised_is_not_logged(shared: Mesh, way: str) -> None:
    with _Log("asked for") as log:
        future = rpc.rpc_async(1, fail, (ValueError("asked for"),))
        with pytest.raises(ValueError, match="asked for"):
            getattr(_Ways, way)(future)
        del future
        rpc.rpc_sync(1, echo, (1,))
        assert log.records == []


def test_an_error_in_then_that_nobody_waits_for_is_logged(shared: Mesh) -> None:
    with _Log("later") as log:
        rpc.rpc_async(1, echo, (1,)).then(lambda f: fail(ValueError("later")))
        assert log.came.wait(10)
    assert len(log.records) == 1


def test_an_error_in_then_of_a_future_that_is_done_is_logged() -> None:
    future = rpc.Future()
    future.set_result(1)
    with _Log("at once") as log:
        future.then(lambda f: fail(ValueError("at once")))
        assert len(log.records) == 1


def test_a_success_is_not_logged(shared: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    future = rpc.rpc_async(1, echo, (1,))
    _settle(future)
    del future
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_no_cycle_keeps_a_failed_future_alive(shared: Mesh) -> None:
    import weakref

    gc.collect()
    gc.disable()
    try:
        future = rpc.rpc_async(1, fail, (ValueError("x"),))
        with pytest.raises(ValueError, match="x"):
            future.wait()
        dropped = weakref.ref(future)
        del future
        sys.last_value = None  # type: ignore[assignment]
        # The agent's thread that would have completed it may hold it a while longer.
        until(lambda: dropped() is None)
    finally:
        gc.enable()
