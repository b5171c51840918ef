"""The table of docs/compatibility.md: each test of torch that torch passes, and what zrpc does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
PASSES = "passes"
UNEXPLAINED = "unexplained"
_SUMMARY = re.compile(r"(?<=<!-- summary -->\n).*?(?=<!-- end of summary -->)", re.DOTALL)
_ROW = re.compile(r"\| `(\w+)` \| (.*) \| (.*) \|")
_TABLES = "<!-- tables -->\n"


@dataclass(frozen=True)
class Row:
    """What the page says about one test."""

    private: tuple[str, ...]  # the private names of torch that it uses
    result: str  # "passes", or the difference that makes it fail

    @property
    def passes(self) -> bool:
        return self.result == PASSES


Rows = Mapping[str, Row]  # by ``Suite.test``


def read(page: str) -> dict[str, Row]:
    """Returns the rows of a page."""
    rows: dict[str, Row] = {}
    suite = ""
    for line in page.partition(_TABLES)[2].splitlines():
        if line.startswith("## "):
            suite = line[3:]
        elif found := _ROW.fullmatch(line):
            rows[f"{suite}.{found[1]}"] = Row(tuple(re.findall(r"\w+", found[2])), found[3])
    return rows


def write(page: str, rows: Rows) -> str:
    """Returns the page with these rows, and a summary that counts them."""
    lines = []
    suite = ""
    for name, row in rows.items():
        before, suite = suite, name.partition(".")[0]
        if suite != before:
            lines += ["", f"## {suite}", "", "| Test | Private names | On zrpc |"]
            lines += ["| --- | --- | --- |"]
        names = ", ".join(f"`{private}`" for private in row.private)
        lines.append(f"| `{name.partition('.')[2]}` | {names} | {row.result} |")
    head = page.partition(_TABLES)[0] + _TABLES
    return _SUMMARY.sub(summary(rows), head) + "\n".join(lines) + "\n"


def share_of_public(rows: Rows) -> float:
    """Returns how many of the tests pass that use public names only, as a fraction."""
    public = [row.passes for row in rows.values() if not row.private]
    return sum(public) / len(public)


def summary(rows: Rows) -> str:
    """Returns the sentences that count the rows."""
    public = [row.passes for row in rows.values() if not row.private]
    private = [row.passes for row in rows.values() if row.private]
    return (
        f"Of the {len(public)} tests that use public names only, {sum(public)} pass, that is "
        f"{100 * share_of_public(rows):.1f} %.\n"
        f"Of the {len(private)} others, {sum(private)} pass.\n"
    )
