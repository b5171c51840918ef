"""Writes ``reference/index.md``: all public names by task, from the code and its docstrings.

Run it after a public name, a signature or an option has changed: ``python docs/api_index.py``.
"""

from __future__ import annotations

import enum
import functools
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

# What a program looks for, and the names that it then needs; those used most come first.
_TASKS = {
    "Start and leave": """start_mesh connect DriverMesh session init_rpc shutdown is_initialized
        get_worker_info get_worker_infos world_size WorkerInfo spawn ZmqRpcBackendOptions""",
    "Call a function": """rpc_sync rpc_async Future wait_all collect_all as_completed
        get_rpc_timeout set_rpc_timeout""",
    "Keep an object on a worker": "remote RRef actor concurrent get_actor",
    "Stream, queue and publish": """rpc_stream Stream Queue nn.publish nn.Publisher nn.subscribe
        nn.Subscriber""",
    "Call several workers as one": "group split each share barrier all_gather",
    "Answer calls": "current_call Call batched functions.async_execution",
    "Train across workers": """autograd.context autograd.backward autograd.get_gradients
        optim.DistributedOptimizer optim.clip_grad_norm_ nn.RemoteModule""",
    "See what happens": "stats trace span breakpoint CallFilter on_worker_lost on_worker_joined",
    "Test": """local_mesh testing.Mesh testing.MeshSpec testing.no_leaks testing.fake_device
        testing.FakeDevice testing.Operation testing.LeakError testing.MeshTimeout
        testing.WorkerExited testing.WorkerFailed testing.WorkerTraceback""",
    "Run programs for torch.distributed.rpc": """drop_in.install drop_in.child_environment
        RpcBackendOptions TensorPipeRpcBackendOptions ProcessGroupRpcBackendOptions PyRRef
        BackendType backend_registry.construct_rpc_backend_options is_available
        autograd.is_available UNSET_RPC_TIMEOUT constants.DEFAULT_INIT_METHOD
        constants.DEFAULT_NUM_WORKER_THREADS constants.DEFAULT_PREFETCH
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT constants.DEFAULT_RPC_TIMEOUT_SEC
        constants.DEFAULT_SHUTDOWN_TIMEOUT""",
}
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

Every public name by what it is for, with its arguments and the first sentence of its documentation.
A link leads to the rest. The [command line](command-line.md) has a page of its own.
"""


def page() -> str:
    """Returns the text of the page.

    Raises:
        ValueError: a public name has no task.
    """
    values = _public()
    errors = {name: value for name, value in values.items() if _is_zrpc_error(name, value)}
    tasks = {task: names.split() for task, names in _TASKS.items()}
    placed = {name for names in tasks.values() for name in names}
    if unplaced := set(values) - placed - set(errors):
        raise ValueError(f"docs/api_index.py: give {sorted(unplaced)} a task in _TASKS")
    parts = [_HEAD]
    for task, names in tasks.items():
        parts += [f"## {task}", *(_entry(name, values[name]) for name in names)]
    parts += [
        "## Errors",
        *(_error(name, error, values) for name, error in errors.items()),
        _options(),
        exit_code_table(),
        logger_table(),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _public() -> dict[str, Any]:
    """Returns all public names below `zrpc`; an object with two names has the shorter one only."""
    values = {name: getattr(zrpc, name) for name in zrpc._PUBLIC}
    for module in _MODULES + _TESTING:
        found = importlib.import_module(f"zrpc.{module}")
        for name in sorted(found.__all__):
            value = getattr(found, name)
            if getattr(zrpc, name, None) is not value:
                values[f"{module}.{name}"] = value
    return values


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _is_zrpc_error(name: str, value: Any) -> bool:
    return _is_error(value) and "." not in name


def _entry(name: str, value: Any) -> str:
    """Returns a name, its arguments and what it is; below, what a class has."""
    if alias_of := _ALIASES.get(name):
        return f"{_link(name)}\n: Another name of `{alias_of}`."
    if not callable(value):
        return f"{_link(name)} `= {value!r}`\n: A constant."
    made_by_zrpc = f":: zrpc.{name}()" in _reference()
    arguments = "" if made_by_zrpc or name == "ZmqRpcBackendOptions" else _signature(value)
    title = f"{_link(name)} `{arguments}`" if arguments else _link(name)
    lines = [title, f": {_first_sentence(value)}", ""]
    if inspect.isclass(value) and not _is_error(value):
        lines += [f"  - {row}" for row in _members(value)]
    return "\n".join(lines).rstrip()


def _link(name: str) -> str:
    """Returns a name, as a link if the reference documents it."""
    documented = re.search(rf"(auto|py:)\w+:: zrpc\.{re.escape(name)}\b(?!\.)", _reference())
    return f"{{py:obj}}`zrpc.{name}`" if documented else f"`zrpc.{name}`"


@functools.cache
def _reference() -> str:
    return "".join(path.read_text() for path in PAGE.parent.glob("*.md") if path != PAGE)


def _members(value: Any) -> Iterator[str]:
    for member in vars(value):
        method = getattr(value, member, None)  # an option has a value only in an instance
        text = _first_sentence(method)
        if member.startswith("_") or f"{value.__name__}.{member}" in _INTERNAL:
            continue
        if isinstance(method, property):
            yield f"`{member}`: {text}"
        elif inspect.isroutine(method) and text and not text.startswith("Not supported:"):
            yield f"`{member}{_signature(method)}`: {text}"


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
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def _error(name: str, error: Any, values: dict[str, Any]) -> str:
    bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
    raised_by = ", ".join(
        f"`{other}`"
        for other, value in values.items()
        if re.search(rf"\n\s+{name}: ", inspect.getdoc(value) or "")
    )
    by = f" Raised by {raised_by}." if raised_by else ""
    return f"{_link(name)}, also a {bases}\n: {_first_sentence(error)}{by}"


def _options() -> str:
    """The options, from the signature of the class and the ``Args`` of its docstring."""
    described = _described_arguments(inspect.getdoc(ZmqRpcBackendOptions) or "")
    entries = ["## Options of ZmqRpcBackendOptions"]
    for parameter in inspect.signature(ZmqRpcBackendOptions).parameters.values():
        if not parameter.name.startswith("_"):
            kind, text = str(parameter.annotation), _markdown(described[parameter.name])
            entries.append(f"`{parameter.name}: {kind} = {parameter.default!r}`\n: {text}")
    return "\n\n".join(entries)


def _described_arguments(docstring: str) -> dict[str, str]:
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    _, *found = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
    pairs = zip(found[::2], found[1::2], strict=True)
    return {name: " ".join(text.split()) for name, text in pairs}


if __name__ == "__main__":
    PAGE.write_text(page())
