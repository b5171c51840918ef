"""What the tests of published weights share: models, and the memory that versions take."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from tests.services.shm.sharing import segments_mapped, segments_open
from tests.support.waiting import until
from zrpc.nn import Publisher, Subscriber, publish, subscribe
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing import Mesh

T = TypeVar("T")

# Elements of a tensor of 512 KiB, which goes by shared memory.
LARGE = 1 << 17

# A patient load: for what is expected to come.
SOON = 30.0


def weights(value: float = 0.0, count: int = LARGE) -> dict[str, torch.Tensor]:
    """A model of two dtypes, all of whose elements have one value."""
    return {"a": torch.full((count,), float(value)), "b": torch.full((3,), int(value))}


def value_of(model: dict[str, torch.Tensor]) -> float:
    """The value of all elements; fails if they differ."""
    (value,) = {each for tensor in model.values() for each in torch.unique(tensor).tolist()}
    return float(value)


def set_to(model: dict[str, torch.Tensor], value: float) -> None:
    for tensor in model.values():
        tensor.fill_(value)


class Learner:
    """A publisher on a worker of a mesh of threads, and its model, with some versions."""

    def __init__(
        self, mesh: Mesh, worker: int = 0, name: str = "p", count: int = LARGE, versions: int = 0
    ) -> None:
        self.model = weights(count=count)
        self.published: Publisher = mesh.run(worker, publish, name, self.model)
        for _ in range(versions):
            self.push()

    def push(self, value: float | None = None) -> int:
        """Pushes a model with this value: by default the number of the version."""
        set_to(self.model, self.published.version + 1 if value is None else value)
        return self.published.push()


class Rollout:
    """A subscriber on a worker of a mesh of threads, and its model."""

    def __init__(self, mesh: Mesh, worker: int, name: str = "p", count: int = LARGE) -> None:
        self.mesh, self.worker = mesh, worker
        self.model = weights(-1, count)
        self.subscriber: Subscriber = mesh.run(worker, subscribe, name)

    def load(self, at_least: int | None = None, timeout: float = SOON) -> int:
        return self.begin_to_load(at_least, timeout).result(SOON + timeout)

    def begin_to_load(self, at_least: int | None = None, timeout: float = SOON) -> Future[int]:
        return self.mesh.submit(
            self.worker, self.subscriber.load_into, self.model, at_least, timeout
        )

    def read(self, at_least: int | None = None) -> tuple[int, float]:
        """Loads; returns the version, and the value of its elements."""
        return self.load(at_least), self.value

    @property
    def value(self) -> float:
        return value_of(self.model)


def pool_of(mesh: Mesh, worker: int = 0) -> Any:
    return mesh.agent(worker).service(SharedMemoryService).pool


def until_mapped(count: int) -> None:
    """Waits until this process has this number of segments open, and mapped."""

    def found() -> tuple[int, int]:
        return len(segments_open()), len(segments_mapped())

    until(lambda: found() == (count, count), lambda: f"{found()}", collect=True)


def raised_by(function: Callable[..., Any], *args: Any) -> Exception:
    """Calls a function, and returns what it raises, without the frames that refer to tensors."""
    try:
        function(*args)
    except Exception as error:
        found = error.with_traceback(None)
        found.__cause__ = found.__context__ = None
        gc.collect()
        return found
    raise AssertionError("it raised nothing")
