"""Which errors are logged: once at the callee, and at the caller if nobody waits."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.failing_log import failing_log
from tests.support.targets import echo, fail
from tests.support.waiting import until
from tests.support.ways import WAYS
from zrpc.testing import Mesh

pytestmark = pytest.mark.usefixtures("goes_on")

_format = logging.Formatter("%(message)s").format


def _records(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [r for r in caplog.records if text in _format(r)]


def test_the_callee_logs_a_failed_handler_once(
    shared: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "zrpc.calls.callee")
    for call in WAYS:
        text = f"of its own {id(call)}"
        with pytest.raises(ValueError, match="of its own"):
            call(1, fail, (ValueError(text),))
        (record,) = _records(caplog, text)
        assert "On WorkerInfo(id=1, name=worker1): a call of fail failed" in record.getMessage()
        assert record.name.startswith("zrpc")
        # Perhaps nobody uses the value of an RRef, and learns of the error.
        told = call is not WAYS[-1]
        assert record.levelno == (logging.DEBUG if told else logging.ERROR)


def _fail_when_cancelled() -> None:
    call = rpc.current_call()
    assert call is not None
    call.wait_cancelled(30)
    raise KeyError("after the caller has gone")


def test_an_error_that_nobody_can_be_told_is_logged_as_one(
    shared: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    future = rpc.rpc_async(1, _fail_when_cancelled)
    until(lambda: shared.agent(1).pool.active)
    future.cancel()
    until(lambda: bool(_records(caplog, "after the caller has gone")))
    (record,) = _records(caplog, "after the caller has gone")
    assert record.levelno == logging.ERROR
    assert "a call of _fail_when_cancelled failed" in record.getMessage()


def test_a_log_that_fails_costs_no_answer_and_no_thread(
    shared: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    with failing_log():
        for number, call in itertools.product(range(20), WAYS):  # more than there are threads
            with pytest.raises(KeyError, match=f"{number}"):
                call(1, fail, (KeyError(number),), timeout=5)
        until(lambda: not shared.agent(1).pool.active)
    assert "ConnectionError: no log server" in capfd.readouterr().err


def _settle(future: Any) -> None:
    """Waits until a future is complete without asking for its outcome."""
    done = threading.Event()
    future.add_done_callback(lambda f: done.set())
    assert done.wait(10)


async def _await(future: Any) -> None:
    await future


ASKS: list[Callable[[Any], Any]] = [
    lambda future: future.wait(),
    lambda future: (_settle(future), future.value()),
    lambda future: torch.futures.wait_all([future]),
    lambda future: [f.wait() for f in torch.futures.collect_all([future]).wait()],
    lambda future: future.then(lambda f: f.wait()).wait(),
    lambda future: future.then(lambda f: f.value()).wait(),
    lambda future: asyncio.run(_await(future)),
]


def test_an_error_that_was_raised_is_not_logged(
    shared: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    for ask in ASKS:
        future = rpc.rpc_async(1, fail, (ValueError("asked for"),))
        with pytest.raises(ValueError, match="asked for"):
            ask(future)
        del future
    rpc.rpc_sync(1, echo, (1,))
    assert "nobody waited" not in caplog.text


def test_the_other_errors_of_a_wait_for_all_are_not_logged(
    shared: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    futures = [rpc.rpc_async(1, fail, (ValueError("one of many"),)) for _ in range(5)]
    with pytest.raises(ValueError, match="one of many"):
        rpc.wait_all(futures)
    for future in futures:
        _settle(future)
    del futures, future
    assert gc.collect() >= 0
    assert "nobody waited" not in caplog.text


def test_a_group_of_errors_that_this_worker_has_caused_is_not_logged(
    shared: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    for second in (rpc.RpcCancelledError("cancelled"), ValueError("a bug")):
        errors = {0: rpc.NotInitializedError("it has shut down"), 1: second}
        future: rpc.Future[Any] = rpc.Future()
        future.set_exception(rpc.GroupError("2 of 2 have failed", list(errors.values())))
        del future
    assert caplog.text.count("nobody waited") == 1
    assert "a bug" in caplog.text


class _Argument:
    def __reduce__(self) -> Any:
        return _new_argument, ()


_arguments: list[Any] = []


def _new_argument() -> _Argument:
    argument = _Argument()
    _arguments.append(weakref.ref(argument))
    return argument


def _fail_with_argument(argument: _Argument) -> None:
    raise ValueError("x")


def test_no_cycle_keeps_the_arguments_of_a_failed_handler_alive(shared: Mesh) -> None:
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="x"):
            rpc.rpc_sync(1, _fail_with_argument, (_Argument(),))
        until(lambda: _arguments[-1]() is None)
    finally:
        gc.enable()
