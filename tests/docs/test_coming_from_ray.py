"""The lines of zrpc in the tables of docs/coming-from-ray.md are in its program, which runs."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "coming-from-ray.md"


def lines_of_tables() -> list[str]:
    rows = re.findall(r"^\| .* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    found = [code for cell in rows for code in re.findall(r"(?<!})`([^`]+)`", cell)]
    return [code for code in found if "zrpc." in code or ".rpc_" in code or code.endswith(")")]


def test_every_line_of_the_tables_is_in_the_program() -> None:
    [program] = [block.text for block in blocks(PAGE) if block.language == "python"]
    lines = [line for line in lines_of_tables() if not line.startswith("close(")]
    assert len(lines) > 40
    assert [line for line in lines if line not in program] == []
