"""Classes of all forms as actors."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

import pytest
import torch

import zrpc
from zrpc.actors import options_of

T = TypeVar("T")

pytestmark = [
    pytest.mark.zrpc(workers=2, options={"rpc_timeout": 20}),
    pytest.mark.usefixtures("caller"),
]

SIZES = [10, 300_000]


@zrpc.actor
class Box(Generic[T]):
    def __init__(self) -> None:
        self.items: list[T] = []

    def add(self, item: T, *_: torch.Tensor) -> None:
        self.items.append(item)

    def all(self) -> list[T]:
        return self.items


def test_a_generic_class_with_parameters_makes_actors() -> None:
    assert options_of(Box[int]) == options_of(Box)  # so the maker numbers its calls
    box = zrpc.remote(1, Box[int])
    # In order, though small messages overtake large ones.
    futures = [box.rpc_async().add(n, torch.ones(SIZES[n % 2])) for n in range(20)]
    zrpc.wait_all(futures)
    assert box.rpc_sync().all() == list(range(20))
    box.stop()
    with pytest.raises(zrpc.RpcError, match="the actor Box on worker1 was stopped"):
        box.rpc_sync().all()


@zrpc.actor
class Base:
    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def size(self) -> int:
        return 1

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    def __call__(self, number: int) -> int:
        return -number


class Derived(Base):
    def add(self, number: int) -> int:
        return 10 * super().add(number)

    @zrpc.concurrent
    def size(self) -> int:
        return 10 * super().size()


@zrpc.actor(concurrency=2)
class Wide(Derived):
    """Has another concurrency than its bases."""


def test_methods_of_all_kinds_and_of_bases_are_called() -> None:
    for cls, factor in ((Base, 1), (Derived, 10), (Wide, 10)):
        proxy = zrpc.remote(1, cls).rpc_sync()
        assert [proxy.add(2), proxy.add(3)] == [2 * factor, 5 * factor]
        assert (proxy.size(), proxy.name()) == (factor, cls.__name__)
        assert (proxy.double(4), proxy(5)) == (8, -5)
    found = [options_of(cls) for cls in (Base, Derived, Wide)]
    assert [each and each.concurrency for each in found] == [1, 1, 2]
    assert [each and dict(each.beside) for each in found] == [{}, {"size": 0}, {"size": 0}]


@zrpc.actor
@dataclasses.dataclass(slots=True)
class Inside:
    count: int = 1

    def step(self) -> int:
        return self.count


@dataclasses.dataclass(slots=True)
@zrpc.actor
class Outside(Inside):
    pass


@zrpc.actor
class Incomparable:
    """What zrpc must not ask."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __bool__(self) -> bool:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError

    def step(self) -> int:
        return 1


def test_slots_and_special_methods_of_the_class_change_nothing() -> None:
    for cls in (Inside, Outside, Incomparable):
        rref = zrpc.remote(1, cls)
        assert rref.rpc_sync().step() == 1
        rref.stop()
        with pytest.raises(zrpc.RpcError, match=f"the actor {cls.__name__} on worker1 was stopped"):
            rref.rpc_sync().step()


@zrpc.actor
class Exits:
    """Whose constructor or method ends as a program does."""

    def __init__(self, error: type[BaseException] | None) -> None:
        if error is not None:
            raise error

    def leave(self, error: type[BaseException]) -> None:
        raise error

    def answer(self) -> int:
        return 42


def test_an_actor_that_exits_ends_neither_its_worker_nor_itself() -> None:
    for error in (SystemExit, KeyboardInterrupt):
        broken = zrpc.remote(1, Exits, args=(error,), name=error.__name__)
        with pytest.raises(zrpc.RemoteError, match=error.__name__):
            broken.ready()
        works = zrpc.remote(1, Exits, args=(None,), name=error.__name__)  # the name is free
        with pytest.raises(zrpc.RemoteError, match=error.__name__):
            works.rpc_sync().leave(error)
        assert works.rpc_sync().answer() == 42
