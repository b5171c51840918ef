"""Exceptions are dumped to bytes and loaded again."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from zrpc.errors import RemoteError
from zrpc.wire.exceptions import dump_exception, load_exception

WHERE = "WorkerInfo(id=1, name=w1)"


def raised(error: BaseException) -> BaseException:
    """Returns the error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def there(error: BaseException, same_main: bool = True) -> Any:
    return load_exception(dump_exception(raised(error), WHERE, same_main))


class FailsToShow(Exception):
    def __repr__(self) -> str:
        raise ValueError("no repr")

    __str__ = __repr__


@pytest.mark.parametrize("same_main", [True, False])
def test_a_type_of_main_survives(monkeypatch: pytest.MonkeyPatch, same_main: bool) -> None:
    main = types.ModuleType("__main__")
    exec("class OfMain(Exception): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    body = dump_exception(raised(main.OfMain("a", 1)), WHERE, same_main)
    if not same_main:
        del main.OfMain  # the receiver's main has no such name
    copy = load_exception(body)
    assert type(copy).__name__ == "OfMain"
    assert copy.args == ("a", 1)


def test_an_error_whose_repr_fails_arrives() -> None:
    copy = there(FailsToShow("x"))
    assert type(copy) is FailsToShow
    assert "FailsToShow whose repr fails" in str(copy.__cause__)


OUTCOMES = [
    (lambda: pytest.skip("no gpu"), pytest.skip.Exception),
    (lambda: pytest.xfail("known"), pytest.xfail.Exception),
    (lambda: pytest.fail("bad", pytrace=False), pytest.fail.Exception),
]


def test_outcome_of_a_test_arrives_as_what_it_is() -> None:
    for end, kind in OUTCOMES:
        with pytest.raises(kind) as info:
            end()
        error: BaseException = there(info.value)
        assert type(error) is kind
        assert vars(error) == vars(info.value)
        assert isinstance(error.__cause__, RemoteError)


def test_outcome_of_a_test_arrives_as_text_without_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dump_exception(raised(pytest.skip.Exception("no gpu")), WHERE, True)
    monkeypatch.delitem(sys.modules, "_pytest.outcomes")
    error = load_exception(data)
    assert type(error) is RemoteError
    assert "no gpu" in str(error)
    assert "pytest is not loaded here" in str(error)
    assert "_pytest.outcomes" not in sys.modules


def test_what_only_resembles_an_outcome_of_a_test_does_not_stop_the_caller() -> None:
    class Skipped(pytest.skip.Exception):
        pass

    assert type(there(Skipped("mine"))) is RemoteError
    assert type(there(type("Failed", (BaseException,), {})("mine"))) is RemoteError


def test_a_function_by_value_that_lacks_a_name_says_whose_globals_it_has() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def use(): return missing", names)
    with pytest.raises(NameError) as raised_there:
        names["use"]()
    loaded = load_exception(dump_exception(raised_there.value, WHERE, same_main=False))
    assert "use came by value from another worker's main script" in str(loaded.__cause__)
    found = load_exception(dump_exception(raised(NameError("x")), WHERE, same_main=False))
    assert "by value" not in str(found.__cause__)
