"""What is left out of a part of messages, and how it is found again; see `zrpc.wire.parts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zrpc.wire.unpickling import decoder


class Holes(list[Any]):
    """The values that are left out of a part, in the order of their fills."""

    def leave_out(self, value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
        """Returns how a value is pickled that each message has a fill for."""
        self.append(value)
        return _fill, (len(self) - 1,)


def _fill(index: int) -> Any:
    return decoder().fills[index]
