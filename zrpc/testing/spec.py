"""The specification of a mesh for a test: the marker's arguments, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from zrpc.errors import OptionError

if TYPE_CHECKING:
    import pytest

DEFAULT_WORKERS = 2
DEFAULT_TIMEOUT = 30.0
# Stands for no deadline: a year. What is longer overflows in waits in C.
NO_DEADLINE_SECONDS = 3e7


@dataclass(frozen=True)
class MeshSpec:
    """The specification of a mesh, and the timeout of the test that uses it.

    Args:
        workers: the number of workers; they are named ``worker0``, ``worker1``, …
        processes: whether each worker is a process; otherwise it is a thread of this process.
        timeout: seconds that the whole test may take, including the mesh's start and shutdown, or a
            ``timedelta``; 0 means no limit.
        options: keyword arguments for `zrpc.ZmqRpcBackendOptions`.
        leaks: whether it is an error if a passing test leaves something behind.
        restarts: whether killed workers can be restarted, see ``Mesh.restart``.
        elastic: whether workers may join and leave, as in a mesh that `zrpc.init_rpc` makes
            without a world size.
        faults: whether the workers' connections go through relays, for `zrpc.testing.faults`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range.

    Immutable, and so safe in any thread.
    """

    workers: int = DEFAULT_WORKERS
    processes: bool = False
    timeout: float = DEFAULT_TIMEOUT
    options: Mapping[str, Any] = field(default_factory=dict)
    leaks: bool = True
    faults: bool = False
    restarts: bool = False
    elastic: bool = False

    def __post_init__(self) -> None:
        expected: dict[str, tuple[type | tuple[type, ...], str]] = {
            "workers": (int, "an int"),
            "timeout": ((int, float, timedelta), "a number of seconds"),
            "options": (Mapping, "a mapping"),
        }
        for name, value in vars(self).items():
            types, wanted = expected.get(name, (bool, "a bool"))
            if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
                raise TypeError(f"{name} must be {wanted}, but got {value!r}")
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, but got {self.workers}")
        limit: Any = self.timeout
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
        if not 0 <= seconds <= NO_DEADLINE_SECONDS:
            raise OptionError(
                f"timeout must be 0 (no limit) to {NO_DEADLINE_SECONDS:g} seconds, but got {limit}"
            )
        object.__setattr__(self, "timeout", seconds or NO_DEADLINE_SECONDS)

    @classmethod
    def from_marks(cls, marks: Iterable[pytest.Mark]) -> MeshSpec:
        """Returns the specification that a test's markers give, the nearest marker first.

        An argument that the nearest marker does not set is taken from the next one. So a class
        or module can set a timeout for tests that set their own number of workers.

        Raises:
            TypeError: an argument is positional, unknown or of the wrong type.
            ValueError: a number is out of its range.
        """
        asked: dict[str, Any] = {}
        known = [f.name for f in fields(cls)]
        for mark in marks:
            if mark.args:
                raise TypeError(f"expected keyword arguments only, but got {mark.args!r}")
            for name, value in mark.kwargs.items():
                if name not in known:
                    raise TypeError(f"expected one of {', '.join(known)}, but got {name!r}")
                asked.setdefault(name, value)
        return cls(**asked)

    def replace(
        self,
        workers: int | None = None,
        processes: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> MeshSpec:
        """Returns a copy with the values that aren't None; ``options`` are merged."""
        return replace(
            self,
            workers=self.workers if workers is None else workers,
            processes=self.processes if processes is None else processes,
            options={**self.options, **(options or {})},
        )

    @property
    def names(self) -> list[str]:
        """The workers' names, by rank."""
        return [f"worker{rank}" for rank in range(self.workers)]
