"""Functions that other workers run, importable there by name, and a value that none can read."""

from __future__ import annotations

from typing import Any

# What a worker keeps from call to call.
kept: list[Any] = []


def echo(*args: Any, **kwargs: Any) -> Any:
    """Returns the arguments as they arrived."""
    if kwargs:
        return args, kwargs
    return args[0] if len(args) == 1 else args


def fail(error: BaseException) -> Any:
    raise error


def fail_with(kind: type[BaseException], *args: Any) -> Any:
    raise kind(*args)


class Unreadable:
    """A value that can be sent, and not be read where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)
