"""How futures keep their errors: the same for all who ask, freed with them, never lost unseen."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch

import zrpc as rpc
from tests.support.waiting import until
from zrpc.calls.future_error import KeptError
from zrpc.testing import Mesh


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


def failed_in_then_of_one_that_is_done() -> rpc.Future[Any]:
    first: rpc.Future[int] = rpc.Future()
    first.set_result(1)
    return first.then(give_up)


def failed_before_then() -> rpc.Future[Any]:
    return set_by_the_program().then(lambda f: f.wait())


def failed_with_a_cause(kind: type[KeyError] = KeyError, *args: Any) -> rpc.Future[Any]:
    def callback(_: Any) -> NoReturn:
        try:
            give_up()
        except KeyError as error:
            raise kind(*args or ("given up, too",)) from error

    return failed_in_then(callback)


MAKERS = [
    set_by_the_program,
    failed_in_then,
    failed_in_then_of_one_that_is_done,
    failed_before_then,
    failed_with_a_cause,
    lambda: failed_with_a_cause(PickyError, 1, 2),
]


def test_a_failed_future_is_freed() -> None:
    def use(make: Callable[[], rpc.Future[Any]], waited_for: bool) -> weakref.ref[Any]:
        future = make()
        if waited_for:
            with pytest.raises(KeyError):
                future.wait()
        return weakref.ref(future)

    alive = [use(make, waited_for) for make in MAKERS for waited_for in (True, False)]
    gc.collect()
    assert [of() for of in alive] == [None] * len(alive)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """What refers to itself is not freed."""
    gc.disable()
    yield
    gc.enable()


WAYS: list[Callable[[rpc.Future[Any]], Any]] = [
    lambda future: future.wait(),
    lambda future: future.value(),
    lambda future: rpc.wait_all([future]),
    lambda future: rpc.collect_all([future]).wait(),
    lambda future: torch.futures.wait_all([future]),
    lambda future: future.then(lambda f: f.wait()).wait(),
    lambda future: asyncio.run(await_inside(future)),
]


async def await_inside(future: rpc.Future[Any]) -> None:
    with contextlib.suppress(KeyError):  # asyncio.run keeps what it raises
        await future


@pytest.mark.usefixtures("no_collections")
def test_the_variables_of_one_that_waits_are_freed_without_the_collector() -> None:
    class Local:
        pass

    def use(make: Callable[[], rpc.Future[Any]], ask: Any, times: int) -> weakref.ref[Any]:
        local = Local()
        future = make()
        for _ in range(times):
            with contextlib.suppress(KeyError):
                ask(future)
        return weakref.ref(local)

    for make, ask, times in itertools.product(MAKERS, WAYS, (1, 2)):
        assert use(make, ask, times)() is None, (make, times)


def test_the_first_that_asks_gets_the_error_and_the_others_get_copies_that_show_its_origin() -> (
    None
):
    for make in MAKERS:
        future, caught = make(), []
        for _ in range(3):
            with pytest.raises(KeyError) as error:
                future.wait()
            caught.append(error.value)
        *_, last = traceback.extract_tb(caught[0].__traceback__)
        assert last.name in ("give_up", "callback")
        for each in caught:
            assert (type(each), str(each)) == (type(caught[0]), str(caught[0]))
            assert "in give_up" in "".join(traceback.format_exception(each))


def test_an_error_that_nobody_waits_for_is_logged_with_its_origin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for make in MAKERS:
        caplog.clear()
        make()
        gc.collect()
        assert "nobody waited for it" in caplog.text
        assert "in give_up" in caplog.text


def test_what_collects_a_failed_future_has_its_error_when_that_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for make in MAKERS:
        collected = torch.futures.collect_all([make()])
        gc.collect()
        # The future of C++ is there, as a part of what `collected` gives.
        with pytest.raises(KeyError, match="given up") as caught:
            collected.wait()
        assert "in give_up" in "".join(traceback.format_exception(caught.value))
        del collected, caught
        gc.collect()
        assert not caplog.text


def test_the_error_that_the_program_has_set_is_raised_itself() -> None:
    error = KeyError("given up")
    future: rpc.Future[Any] = rpc.Future()
    future.set_exception(error)
    with pytest.raises(KeyError) as caught:
        torch.futures.wait_all([future])
    assert caught.value is error


class StubbornError(OSError):
    """One that can't be copied in any way."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_that_can_not_be_copied(caplog: pytest.LogCaptureFixture) -> None:
    error = StubbornError(1, 2)
    future: rpc.Future[Any] = rpc.Future()
    future.set_exception(error)
    with pytest.raises(StubbornError, match="1 and 2") as caught:
        future.wait()
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
def test_nothing_is_unpickled_at_the_end_of_a_future(
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


def test_an_error_of_a_future_that_could_not_be_kept_ends_without_another() -> None:
    """As if Ctrl-C or a full stack had ended the constructor."""
    with pytest.raises(ValueError, match="not enough values"):
        KeptError([])
    gc.collect()
