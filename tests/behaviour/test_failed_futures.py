"""Errors of futures and of handlers: the same for all who ask, freed with them, never lost unseen.

They are logged once at the callee, and at the caller if nobody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

import zrpc as rpc
from tests.support.failing_log import failing_log
from tests.support.gates import Gate
from tests.support.targets import fail
from tests.support.waiting import until
from tests.support.ways import WAYS
from zrpc.testing import Mesh

pytestmark = pytest.mark.usefixtures("goes_on")


class PickyError(KeyError):
    """One that can't be made anew from its args, which do not tell what it was made of."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"given up: {one} and {two}")
        self.two = two


def give_up(_: Any = None) -> NoReturn:
    raise KeyError("given up")


def set_by_the_program() -> rpc.Future[Any]:
    future: rpc.Future[Any] = rpc.Future()
    try:
        give_up()
    except KeyError as error:
        future.set_exception(error)
    return future


def failed_in_then(callback: Callable[[Any], NoReturn] = give_up) -> rpc.Future[Any]:
    first: rpc.Future[int] = rpc.Future()
    last = first.then(callback)
    first.set_result(1)
    return last


def failed_with_a_cause(kind: type[KeyError] = KeyError, *args: Any) -> rpc.Future[Any]:
    def callback(_: Any) -> NoReturn:
        try:
            give_up()
        except KeyError as error:
            raise kind(*args or ("given up, too",)) from error

    return failed_in_then(callback)


def failed_at_the_callee() -> rpc.Future[Any]:
    future = rpc.rpc_async(1, give_up)
    until(future.done)
    return future


MAKERS = [
    set_by_the_program,
    failed_in_then,
    lambda: set_by_the_program().then(lambda f: f.wait()),  # it is done already
    failed_with_a_cause,
    lambda: failed_with_a_cause(PickyError, 1, 2),
    failed_at_the_callee,
]


async def await_inside(future: rpc.Future[Any]) -> None:
    with contextlib.suppress(KeyError):  # asyncio.run keeps what it raises
        await future


ASKS: list[Callable[[rpc.Future[Any]], Any]] = [
    lambda future: future.wait(),
    lambda future: future.value(),
    lambda future: rpc.wait_all([future]),
    lambda future: rpc.collect_all([future]).wait(),
    lambda future: torch.futures.wait_all([future]),
    lambda future: future.then(lambda f: f.wait()).wait(),
    lambda future: future.then(lambda f: f.value()).wait(),
    lambda future: asyncio.run(await_inside(future)),
]


@pytest.mark.usefixtures("no_collections")
def test_what_has_waited_is_freed(shared: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    class Local:
        pass

    def use(make: Any, ask: Any, times: int) -> tuple[weakref.ref[Any], ...]:
        local, future = Local(), make()
        for _ in range(times):
            with contextlib.suppress(KeyError):
                ask(future)
        return weakref.ref(local), weakref.ref(future)

    futures = []
    for make, ask, times in itertools.product(MAKERS, ASKS, (1, 2)):
        local, future = use(make, ask, times)
        assert local() is None, (make, times)
        futures.append(future)
    # The thread that has settled a call may have its future for a moment.
    until(lambda: not any(future() for future in futures), collect=True)
    assert "nobody waited" not in caplog.text


def test_errors_without_waiters_are_logged(shared: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    for make in [*MAKERS, lambda: failed_in_then(lambda _: fail(SystemExit(give_up.__name__)))]:
        caplog.clear()
        alive = weakref.ref(make())
        until(lambda alive=alive: alive() is None, collect=True)  # type: ignore[misc]
        assert caplog.text.count("nobody waited for it") == 1
        assert "give_up" in caplog.text


def test_calls_that_fail_by_one_loss_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for loss in ("worker1 is gone", "worker1 is gone", "worker2 is gone"):
        rpc.Future[None]().set_exception(rpc.WorkerDied(loss))
    until(lambda: "worker2 is gone" in caplog.text, collect=True)
    assert caplog.text.count("nobody waited for it") == 2


def test_each_that_asks_gets_an_error_that_shows_its_origin(
    shared: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(future: Any) -> tuple[type[BaseException], str]:
        with pytest.raises(KeyError, match="given up") as caught:
            future.wait()
        assert "in give_up" in "".join(traceback.format_exception(caught.value))
        return caught.type, str(caught.value)

    for make in MAKERS:
        future, collected = make(), torch.futures.collect_all([make()])
        gc.collect()  # the future of C++ is there, as a part of what `collected` gives
        ask(collected)
        assert len({ask(future) for _ in range(3)}) == 1
    del future, collected
    gc.collect()
    assert "nobody waited" not in caplog.text


class StubbornError(OSError):
    """One that can't be copied in any way."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_the_error_that_was_set_is_raised_itself(caplog: pytest.LogCaptureFixture) -> None:
    for error in (KeyError("given up"), StubbornError(1, 2)):
        for ask in (rpc.Future.wait, lambda future: torch.futures.wait_all([future])):
            future: rpc.Future[Any] = rpc.Future()
            future.set_exception(error)
            with pytest.raises(type(error)) as caught:
                ask(future)
            assert caught.value is error
    rpc.Future().set_exception(StubbornError(3, 4))
    assert "3 and 4" in caplog.text


_made: list[BaseException] = []


class CountedError(Exception):
    """One that notes where it is made."""

    def __init__(self, text: str = "counted") -> None:
        super().__init__(text)
        _made.append(self)


def raise_counted() -> NoReturn:
    raise CountedError


class Unreadable:
    """A value that can't be unpickled."""

    def __reduce__(self) -> Any:
        return raise_counted, ()


@pytest.mark.parametrize("what", [raise_counted, Unreadable], ids=["raised", "unreadable"])
def test_the_end_unpickles_nothing(
    shared: Mesh, caplog: pytest.LogCaptureFixture, what: Any
) -> None:
    """It may come in any thread at any moment, and what a user wrote may do anything."""
    future = rpc.rpc_async(1, what)
    until(future.done)
    _made.clear()
    caplog.clear()
    del future
    until(lambda: gc.collect() >= 0 and "nobody waited for it" in caplog.text)
    assert _made == []
    assert "in raise_counted" in caplog.text


_obstacles: list[Exception] = []


def load_without_obstacles() -> int:
    if _obstacles:
        raise _obstacles.pop()
    return 1


class ReadableLater:
    """A value that can be unpickled at the second attempt, as if it called a busy worker then."""

    def __reduce__(self) -> Any:
        return load_without_obstacles, ()


def test_a_future_whose_value_can_be_unpickled_later_keeps_its_error(shared: Mesh) -> None:
    _obstacles.append(LookupError("not yet"))
    future = rpc.rpc_async(1, ReadableLater)
    for ask in (future.wait, future.wait, future.value, future.then(lambda f: f.value()).wait):
        with pytest.raises(rpc.SerializationError, match="LookupError: not yet"):
            ask()


def test_other_errors_are_not_logged(shared: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    futures = [failed_at_the_callee() for _ in range(5)]
    with pytest.raises(KeyError, match="given up"):
        rpc.wait_all(futures)
    del futures
    gc.collect()
    assert "nobody waited" not in caplog.text
    for second in (rpc.RpcCancelledError("cancelled"), ValueError("a bug")):
        errors = [rpc.NotInitializedError("it has shut down"), second]
        rpc.Future[Any]().set_exception(rpc.GroupError("2 of 2 have failed", errors))
    assert caplog.text.count("nobody waited") == 1
    assert "a bug" in caplog.text


def test_the_error_of_a_call_is_not_logged_if_its_task_is_cancelled_then(
    shared: Mesh, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    async def main() -> None:
        future = rpc.rpc_async(1, lambda: give_up(gate.wait_inside()))
        task = asyncio.ensure_future(await_inside(future))
        await asyncio.sleep(0)
        gate.open()
        until(future.done)  # the loop can't tell the task before it is cancelled
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    assert "nobody waited" not in caplog.text


# -- at the callee -------------------------------------------------------------------------------


def records_of(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    shown = logging.Formatter("%(message)s").format
    return [r for r in caplog.records if text in shown(r)]


def test_the_callee_logs_errors_once(shared: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "zrpc.calls.callee")
    for call in WAYS:
        text = f"of its own {id(call)}"
        with pytest.raises(ValueError, match="of its own"):
            call(1, fail, (ValueError(text),))
        (record,) = records_of(caplog, text)
        assert "On WorkerInfo(id=1, name=worker1): a call of fail failed" in record.getMessage()
        # Perhaps nobody uses the value of an RRef, and learns of the error.
        told = call is not WAYS[-1]
        assert record.levelno == (logging.DEBUG if told else logging.ERROR)


def fail_when_cancelled(gate: Gate) -> None:
    gate.entered.release()
    rpc.current_call().wait_cancelled(30)
    raise KeyError("after the caller has gone")


def test_late_errors_are_logged(shared: Mesh, caplog: pytest.LogCaptureFixture, gate: Gate) -> None:
    future = rpc.rpc_async(1, fail_when_cancelled, (gate,))
    gate.await_entry()
    future.cancel()
    (record,) = until(lambda: records_of(caplog, "after the caller has gone"))
    assert record.levelno == logging.ERROR
    assert "a call of fail_when_cancelled failed" in record.getMessage()


def test_a_failing_log_costs_no_answer(shared: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    with failing_log():
        for number, call in itertools.product(range(20), WAYS):  # more than there are threads
            with pytest.raises(KeyError, match=f"{number}"):
                call(1, fail, (KeyError(number),), timeout=5)
        until(lambda: not shared.agent(1).pool.active)
    assert "ConnectionError: no log server" in capfd.readouterr().err


class Argument:
    """Notes each that is made."""

    made: list[weakref.ref[Any]] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.made.append(weakref.ref(self))

    def __reduce__(self) -> Any:
        return Argument, ()


@pytest.mark.usefixtures("no_collections")
def test_no_cycle_keeps_the_arguments_of_a_failed_handler_alive(shared: Mesh) -> None:
    with pytest.raises(TypeError):
        rpc.rpc_sync(1, len, (Argument(),))
    until(lambda: not any(argument() for argument in Argument.made))
