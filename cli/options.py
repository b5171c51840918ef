"""Options: the types of those that take seconds or minutes, and their sections in `--help`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range of floats without nan and infinity: nothing can wait that long."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Returns the number, or fails if it isn't finite."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, but got {number}.", param, ctx)
        return number


POSITIVE = FiniteRange(min=0, min_open=True)
NOT_NEGATIVE = FiniteRange(min=0)


def sectioned(sections: Mapping[str, Sequence[str]]) -> type[click.Command]:
    """Returns a class of commands whose `--help` shows their options in sections.

    Args:
        sections: for each heading, the names of its options' parameters, in the order in which they
            are shown. Options that are in none of them come last.
    """

    class SectionedCommand(click.Command):
        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
            rest = {param.name: param for param in options}
            for heading, names in [*sections.items(), ("Other options", list(rest))]:
                found = [param for name in names if (param := rest.pop(name, None)) is not None]
                records = [record for param in found if (record := param.get_help_record(ctx))]
                if records:
                    with formatter.section(heading):
                        formatter.write_dl(records)

    return SectionedCommand
