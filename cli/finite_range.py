"""The type of options that take a number of seconds or minutes."""

from __future__ import annotations

import math
from typing import Any

import click

__all__ = ["POSITIVE", "FiniteRange"]


class FiniteRange(click.FloatRange):
    """As click's, but nan and infinity are in no range: nothing can wait for so long."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number that was given."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, but got {number}.", param, ctx)
        return number


POSITIVE = FiniteRange(min=0, min_open=True)
