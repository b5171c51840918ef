"""What zrpc sends the program's values in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Envelope:
    """Something of zrpc's own, in which the program's values are sent."""

    __slots__ = ()

    @property
    def contents(self) -> Sequence[Any]:
        """The program's values."""
        raise NotImplementedError
