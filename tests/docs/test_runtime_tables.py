"""The tables of loggers and exit codes name those that the code has."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

TABLES: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "runtime_tables.py"))
COMMANDS = dict(TABLES["commands"]())


@pytest.mark.system
def test_every_module_that_logs_has_its_logger_in_the_table() -> None:
    table = TABLES["logger_table"]()
    sources = {path: path.read_text() for path in (ROOT / "zrpc").rglob("*.py")}
    logging = [path for path, text in sources.items() if "\nlogger = logging.getL" in text]
    assert len(logging) > 10
    for path in logging:
        own = re.search(r'getLogger\("([\w.]+)"\)', sources[path])
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        name = own[1] if own else module
        calls = re.findall(r"\blogger\.(?!is)\w+\(", sources[path])
        assert table.count(f"`{name}` |") == len(calls), name
    assert "| `zrpc.futures` | error | `A call failed, and nobody waited for it` |" in table


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_exit_codes_of_a_command_are_in_the_table(name: str) -> None:
    [row] = re.findall(rf"^\| `{name}` \| (.+) \|$", TABLES["exit_code_table"](), re.MULTILINE)
    module = importlib.import_module(COMMANDS[name].callback.__module__)
    source = Path(str(module.__file__)).read_text()
    codes = set(re.findall(r"sys\.exit\((\d+)", source))
    if "sys.exit(INTERRUPTED)" in source:
        codes.add("130")
    assert [code for code in codes if not re.search(rf"\b{code}\b", row)] == []


def test_the_exit_codes_of_the_launcher_are_in_the_table() -> None:
    row = TABLES["exit_code_table"]()
    assert "124 after the timeout" in row
    assert "141 if the output" in row
