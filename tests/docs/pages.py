"""The code blocks and links of a Markdown page, and how its programs are run.

A ``python`` block whose first line names a file (``# hello.py``) becomes that file, or is added to
its end (``# hello.py, continued``); any other is a program of its own. A ``console`` block is one
shell session: lines after ``$`` are commands, the others are lines that their output has to
contain, in which ``...`` stands for anything. Blocks in other languages are only to be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.py)(, continued)?\n")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that the block is to be saved as."""
        named = _FILE.match(self.text)
        return named[1] if named and self.language == "python" else None

    @property
    def continues(self) -> bool:
        """Whether the block is added to the end of its file."""
        named = _FILE.match(self.text)
        return named is not None and named[2] is not None

    def save(self, directory: Path) -> None:
        """Writes the file, or adds to it."""
        assert self.file
        with (directory / self.file).open("a" if self.continues else "w") as file:
            file.write(self.text)

    @property
    def commands(self) -> list[str]:
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]

    @property
    def expected(self) -> list[re.Pattern[str]]:
        """What lines of the output have to match."""
        lines = [line for line in self.text.splitlines() if not line.startswith("$ ")]
        return [
            re.compile(re.escape(line.rstrip()).replace(re.escape("..."), ".*")) for line in lines
        ]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start()) + 1)
        for found in _FENCE.finditer(text)
    ]


def links(page: Path) -> list[str]:
    """The targets of the page's links, those in code left out."""
    text = re.sub(r"```.*?```|`[^`\n]*`(?!\])", "", page.read_text(), flags=re.DOTALL)
    return _LINK.findall(text)


def pages() -> list[Path]:
    docs = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    return [*sorted(ROOT.glob("*.md")), *sorted(docs)]
