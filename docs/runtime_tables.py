"""The tables of what a running program shows: the exit codes of commands, and the loggers.

`api_index` puts them on the page of all names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from zrpc.cli import main

ROOT = Path(__file__).parents[1]

_LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
}
_EXIT_CODES = """\
## Exit codes

Every command exits with 2 for a wrong command line, and with 1 if it fails with a message.

| Command | |
| --- | --- |
"""
_LOGGERS = """\
## Loggers

zrpc logs by Python's `logging`, and sets no handler and no level. All loggers are below `zrpc`.
`logging.basicConfig(level=logging.DEBUG)` shows all of it. `…` stands for a value.

| Logger | Level | What it logs |
| --- | --- | --- |
"""


def exit_code_table() -> str:
    """Returns the exit codes, from the help texts of the commands."""
    rows = [f"| `{name}` | {_exit_codes(command)} |" for name, command in commands()]
    return _EXIT_CODES + "\n".join(rows) + "\n"


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yields all commands with their names."""
    yield from _commands("zrpc", main)


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    if command.invoke_without_command:
        yield name, command
    context = click.Context(command)
    for each in command.list_commands(context):
        member = command.get_command(context, each)
        assert member is not None
        yield from _commands(f"{name} {each}", member)


def _exit_codes(command: click.Command) -> str:
    text = " ".join(f"{command.help}\n{command.epilog or ''}".split())
    found = re.search(r"(?:The exit code is|Exit codes:) (.+?)\.(?= |$)", text)
    assert found, f"{command.name}: its help text must say what 'The exit code is'"
    return found[1]


def logger_table() -> str:
    """Returns what each logger logs, from the calls in the code."""
    rows = set()
    for path in sorted((ROOT / "zrpc").rglob("*.py")):
        rows |= set(_log_rows(path))
    return _LOGGERS + "\n".join(" ".join(row) for row in sorted(rows)) + "\n"


def _log_rows(path: Path) -> Iterator[tuple[str, str, str]]:
    tree = ast.parse(path.read_text())
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    name = None
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name("logger")],
                value=ast.Call(func=ast.Attribute(attr="getLogger"), args=[argument]),
            ):
                name = argument.value if isinstance(argument, ast.Constant) else module
    if name is None:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name("logger"), attr=level), args=[text, *_]
            ) if level in _LEVELS:
                yield f"| `{name}`", f"| {_LEVELS[level]}", f"| {_text(text, tree)} |"


def _text(node: ast.expr, tree: ast.Module) -> str:
    """Returns a message with dots for its values; what the module does if it is all values."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [part.value if isinstance(part, ast.Constant) else "…" for part in parts]
    text = re.sub(r"%[srd]", "…", "".join(map(str, texts))).replace("\n", " ")
    if re.search(r"\w", text):
        return f"`{text}`" if "`" not in text else f"`` {text} ``"
    return (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
