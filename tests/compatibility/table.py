"""The table of docs/compatibility.md: each test of torch that torch passes, and what zrpc does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
PASSES = "passes"
# How the text of a row begins if the test needs names that are private to torch.
PRIVATE = "private:"
UNEXPLAINED = "unexplained"
_SUMMARY = re.compile(r"(?<=<!-- summary -->\n).*?(?=<!-- end of summary -->)", re.DOTALL)
_TABLES = "<!-- tables -->\n"


def read(page: str) -> dict[str, str]:
    """Returns what each row of a page says about its test, by ``Suite.test``."""
    rows: dict[str, str] = {}
    suite = ""
    for line in page.partition(_TABLES)[2].splitlines():
        if line.startswith("## "):
            suite = line[3:]
        elif found := re.fullmatch(r"\| `(\w+)` \| (.*) \|", line):
            rows[f"{suite}.{found[1]}"] = found[2]
    return rows


def write(page: str, rows: Mapping[str, str]) -> str:
    """Returns the page with these rows, and a summary that counts them."""
    lines = []
    suite = ""
    for name, text in rows.items():
        before, suite = suite, name.partition(".")[0]
        if suite != before:
            lines += ["", f"## {suite}", "", "| Test | On zrpc |", "| --- | --- |"]
        lines.append(f"| `{name.partition('.')[2]}` | {text} |")
    head = page.partition(_TABLES)[0] + _TABLES
    return _SUMMARY.sub(summary(rows), head) + "\n".join(lines) + "\n"


def summary(rows: Mapping[str, str]) -> str:
    """Returns the sentences that count the rows."""
    public = [text for text in rows.values() if not text.startswith(PRIVATE)]
    passing = public.count(PASSES)
    share = 100 * passing / len(public)
    return (
        f"Of {len(rows)} tests that torch passes, {len(rows) - len(public)} fail as they need\n"
        f"private names of torch that zrpc doesn't have. Of the other {len(public)}, {passing} "
        f"pass, that is {share:.1f} %.\n"
    )
