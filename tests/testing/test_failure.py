"""How the failure of a worker is shown in the test."""

from __future__ import annotations

from dataclasses import dataclass

from zrpc.testing.failure import attribute


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def test_the_traceback_is_added_to_an_exception_that_refuses_attributes() -> None:
    assert "worker1" in str(attribute(Frozen(7), "worker1", "Traceback").__cause__)
