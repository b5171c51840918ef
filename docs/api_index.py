"""Writes ``reference/index.md``: all public names in one table, from the code and its docstrings.

Run it after a public name, a signature or an option has changed: ``python docs/api_index.py``.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for runtime_tables

from runtime_tables import exit_code_table, logger_table

import zrpc
from zrpc.options import ZmqRpcBackendOptions

PAGE = Path(__file__).parent / "reference" / "index.md"

_MODULES = ("autograd", "optim", "nn", "functions", "backend_registry", "constants", "drop_in")
_TESTING = ("testing",)
# What other modules of zrpc call: public in Python only.
_INTERNAL = {"Future.of_call", "Future.on_settled", "RRef.fail"}
_INTERNAL |= {"Queue.ask", "Queue.give_back", "Queue.leave"}
# Names of torch's that are the same object under a second name.
_ALIASES = {
    "PyRRef": "RRef",
    "ProcessGroupRpcBackendOptions": "ZmqRpcBackendOptions",
    "TensorPipeRpcBackendOptions": "ZmqRpcBackendOptions",
}
_HEAD = """\
# All names

<!-- Written by docs/api_index.py: don't edit it. -->

Every public name with its signature and the first sentence of its documentation.
`import zrpc as rpc` gives the names of the first two tables. The pages
[functions and classes](api.md), [autograd, optimizers, modules](autograd.md), [errors](errors.md)
and [`zrpc.testing`](testing.md) have the whole documentation. [Command line](command-line.md) has
the commands, their options and the environment variables.
"""


def page() -> str:
    """Returns the text of the page."""
    names = {name: getattr(zrpc, name) for name in zrpc._PUBLIC}
    errors = {name: value for name, value in names.items() if _is_error(value)}
    others = {name: value for name, value in names.items() if name not in errors}
    parts = [
        _HEAD,
        _table("Functions and classes", "zrpc", others),
        _error_table(errors, names),
        *(_module_table(module) for module in _MODULES + _TESTING),
        _option_table(),
        exit_code_table(),
        logger_table(),
    ]
    return "\n".join(parts)


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _module_table(name: str) -> str:
    module = importlib.import_module(f"zrpc.{name}")
    values = {public: getattr(module, public) for public in sorted(module.__all__)}
    return _table(f"zrpc.{name}", f"zrpc.{name}", values)


def _table(title: str, module: str, values: dict[str, Any]) -> str:
    lines = [f"## {title}", "", "| Name | |", "| --- | --- |"]
    for name, value in values.items():
        for label, text in _rows(f"{module}.{name}", value, _ALIASES.get(name)):
            lines.append(f"| `{label}` | {text} |")
    return "\n".join(lines) + "\n"


def _rows(name: str, value: Any, alias_of: str | None) -> Iterator[tuple[str, str]]:
    if alias_of is not None:
        yield name, f"Another name of `{alias_of}`."
    elif inspect.isclass(value):
        yield name + _signature(value), _first_sentence(value)
        for member in vars(value):
            method = getattr(value, member)
            text = _first_sentence(method)
            if member.startswith("_") or f"{value.__name__}.{member}" in _INTERNAL:
                continue
            if isinstance(method, property):
                yield f"{name}.{member}", text
            elif inspect.isroutine(method) and text and not text.startswith("Not supported: the"):
                yield f"{name}.{member}" + _signature(method), text
    elif callable(value):
        yield name + _signature(value), _first_sentence(value)
    else:
        yield f"{name} = {value!r}", ""


def _signature(value: Any) -> str:
    if _is_error(value) or (inspect.isclass(value) and issubclass(value, enum.Enum)):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    texts = []
    for parameter in parameters:
        if parameter.name == "self" or parameter.name.startswith("_"):
            continue
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not any(t.startswith("*") for t in texts):
            texts.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        texts.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(texts)})"


def _first_sentence(value: Any) -> str:
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s(?=[A-Z`])", paragraph)[0]
    return _markdown(sentence)


def _markdown(text: str) -> str:
    return re.sub(r"``([^`]*)``", r"`\1`", text).replace("|", "\\|")


def _error_table(errors: dict[str, Any], names: dict[str, Any]) -> str:
    lines = ["## Errors", "", "| Error | Also a | | Raised by |", "| --- | --- | --- | --- |"]
    for name, error in errors.items():
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        raised_by = ", ".join(
            f"`{other}`"
            for other, value in names.items()
            if re.search(rf"\n\s+{name}: ", inspect.getdoc(value) or "")
        )
        lines.append(f"| `zrpc.{name}` | {bases} | {_first_sentence(error)} | {raised_by} |")
    return "\n".join(lines) + "\n"


def _option_table() -> str:
    """The options, from the signature of the class and the ``Args`` of its docstring."""
    lines = [
        "## Options of ZmqRpcBackendOptions",
        "",
        "| Option | Type | Default | |",
        "| --- | --- | --- | --- |",
    ]
    described = _described_arguments(inspect.getdoc(ZmqRpcBackendOptions) or "")
    for parameter in inspect.signature(ZmqRpcBackendOptions).parameters.values():
        if not parameter.name.startswith("_"):
            kind = str(parameter.annotation).replace("|", "\\|")
            text = _markdown(described[parameter.name])
            lines.append(f"| `{parameter.name}` | `{kind}` | `{parameter.default!r}` | {text} |")
    return "\n".join(lines) + "\n"


def _described_arguments(docstring: str) -> dict[str, str]:
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    _, *found = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
    pairs = zip(found[::2], found[1::2], strict=True)
    return {name: " ".join(text.split()) for name, text in pairs}


if __name__ == "__main__":
    PAGE.write_text(page())
