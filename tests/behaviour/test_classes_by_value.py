"""Classes that workers have only by value: their state, and what changes in them."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import zrpc
from tests.support import targets
from zrpc.testing import Mesh

pytestmark = [pytest.mark.system, pytest.mark.zrpc(workers=3, processes=True)]


class Counter:
    total = 0

    def add(self) -> int:
        type(self).total += 1
        return self.total


class Sub(Counter):
    def add(self) -> int:
        return super().add() * 10


class Slotted:
    __slots__ = ("x",)
    total = 0

    def add(self) -> int:
        Slotted.total += 1
        return self.total


@dataclass
class Data:
    x: int = 0

    def add(self) -> int:
        Data.total = getattr(Data, "total", 0) + 1  # type: ignore[attr-defined]
        return Data.total  # type: ignore[attr-defined,no-any-return]


class Color(enum.Enum):
    RED = 1

    def add(self) -> int:
        Color.total = getattr(Color, "total", 0) + 1  # type: ignore[attr-defined]
        return Color.total  # type: ignore[attr-defined,no-any-return]


class Shape(abc.ABC):
    total = 0

    @abc.abstractmethod
    def area(self) -> float: ...

    def add(self) -> int:
        Shape.total += 1
        return self.total


class Square(Shape):
    def area(self) -> float:
        return 1.0


class Registry:
    names: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls) -> None:
        Registry.names.append(cls.__name__)


class Registered(Registry):
    def add(self) -> int:
        Registry.names.append("call")
        return Registry.names.count("call")


def call(to: str, value: Any) -> Any:
    return zrpc.rpc_sync(to, add, args=(value,))


def add(value: Any) -> Any:
    targets.kept.append(value)  # or its class would end with it
    return value.add()


MAKERS: list[Callable[[], Any]] = [Counter, Slotted, Data, lambda: Color.RED, Square, Registered]


def test_a_class_keeps_its_state_from_call_to_call(mesh: Mesh) -> None:
    """From two callers; one has the class itself by value."""
    for make in MAKERS:
        calls = [mesh.run(1, add, make()), mesh.run(1, add, make())]
        calls += [mesh.run(0, call, "worker1", make()), mesh.run(0, call, "worker1", make())]
        assert calls == [1, 2, 3, 4]
    assert mesh.run(1, add, Sub()) == 50  # it has its base class's state


def test_a_redefined_method_reaches_the_workers(mesh: Mesh) -> None:
    class Redefined(Counter):
        total = 0

        def version(self) -> str:
            return "first"

    def version(value: Any) -> Any:
        return value.version()

    assert mesh.run(1, add, Redefined()) == 1
    assert mesh.run(1, version, Redefined()) == "first"
    Redefined.version = lambda self: "second"  # type: ignore[method-assign]
    assert mesh.run(1, version, Redefined()) == "second"
    assert mesh.run(0, zrpc.rpc_sync, "worker2", version, (Redefined(),)) == "second"
    assert mesh.run(1, add, Redefined()) == 2
