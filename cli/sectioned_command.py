"""A command whose `--help` shows its options in sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click


def sectioned(sections: Mapping[str, Sequence[str]]) -> type[click.Command]:
    """Returns a class of commands.

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
