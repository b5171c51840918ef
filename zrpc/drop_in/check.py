"""Which names of torch's RPC a program and its imports use; found by reading, not by running."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder

from zrpc.drop_in.finder import install
from zrpc.drop_in.names import MODULES, advice
from zrpc.drop_in.replacement import is_supported

# Names that torch also offers in packages that have nothing else to do with RPC.
_SHORT_NAMES = ("torch.distributed.nn.RemoteModule", "torch.distributed.optim.DistributedOptimizer")
_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+([^\n#;]+)"
    r"|from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]+))",
    re.MULTILINE,
)
_NOT_READ = {"torch", "zrpc", *sys.stdlib_module_names}


@dataclass(frozen=True, order=True)
class Use:
    """One place in which a program names something of torch's RPC."""

    name: str  # in full, such as torch.distributed.rpc.rpc_sync
    path: str
    line: int

    def problem(self) -> str | None:
        """Returns why zrpc doesn't support it and what to do; None if it does.

        Imports torch and installs the drop-in in this process.
        """
        install()
        module, _, attribute = self.name.rpartition(".")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            return "this version of torch doesn't have it either"
        return None if is_supported(value) else advice(self.name)


def uses_in_program(target: str, module: bool = False) -> tuple[list[Use], list[str]]:
    """Returns the uses in a script, or a module, and in all modules that it imports.

    Beside them, it returns which of the imported modules can't be read, and why. The standard
    library, torch and zrpc are not read. What a program imports by a computed name isn't found.

    Raises:
        FileNotFoundError: there is no such script or module.
        OSError, SyntaxError, ValueError: it can't be read, or this Python can't parse it.
    """
    if module:
        sys.path.insert(0, os.getcwd())
        package = _find(target)
        name = f"{target}.__main__" if package and package.submodule_search_locations else target
        spec = _find(name)
        if spec is None or not spec.origin:
            raise FileNotFoundError(f"there is no module {target!r}")
        path = spec.origin
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
        name, path = "__main__", target
        if not os.path.isfile(path):
            raise FileNotFoundError(f"there is no script {target!r}")
    found, unread = _uses(name, path)
    return sorted(found), sorted(unread)


def _uses(program: str, path: str) -> tuple[set[Use], list[str]]:
    found: set[Use] = set()
    unread = []
    seen = {program}
    to_read = [(program, path)]
    while to_read:
        name, path = to_read.pop()
        try:
            with tokenize.open(path) as file:  # in the encoding that the file declares
                source = file.read()
            found |= set(uses_in_source(source, path))
        except (OSError, SyntaxError, ValueError) as error:  # maybe for another version of Python
            if name == program:
                raise
            unread.append(f"{path}: {error}")
            continue
        is_package = os.path.basename(path) == "__init__.py"
        for imported in _imports(source, name if is_package else name.rpartition(".")[0]):
            for part in _with_parents(imported):
                if part not in seen:
                    seen.add(part)
                    spec = _find(part)
                    if spec is not None and spec.origin and spec.origin.endswith(".py"):
                        to_read.append((part, spec.origin))
    return found, unread


def uses_in_source(source: str, path: str) -> Iterator[Use]:
    """Yields the uses in one file, by what its imports call the modules.

    Raises:
        SyntaxError, ValueError: this Python can't parse it.
    """
    if "torch" not in source or "distributed" not in source:
        return
    tree = ast.parse(source, path)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = full
                if name := _name_of_rpc(full):
                    yield Use(name, path, node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
            first, _, rest = dotted.partition(".")
            if first in bound and (name := _name_of_rpc(f"{bound[first]}.{rest}")):
                yield Use(name, path, node.lineno)


def _name_of_rpc(full: str) -> str | None:
    """Returns the module of torch's RPC and one name in it, or None if it is neither."""
    for short in _SHORT_NAMES:
        if full == short or full.startswith(f"{short}."):
            return short
    module = max((m for m in MODULES if full.startswith(f"{m}.")), key=len, default=None)
    if module is None or full in MODULES:
        return None
    name = full[len(module) + 1 :].partition(".")[0]
    return None if name == "*" else f"{module}.{name}"


def _dotted(node: ast.Attribute) -> str | None:
    parts = [node.attr]
    value = node.value
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    return ".".join([value.id, *reversed(parts)]) if isinstance(value, ast.Name) else None


def _imports(source: str, package: str) -> Iterator[str]:
    """Yields the modules that a file may import. A file is parsed only if that isn't enough."""
    for match in _IMPORT.finditer(source.replace("\\\n", " ")):
        modules, dots, base, items = match.groups()
        if modules:
            yield from _first_words(modules)
            continue
        if dots:
            above = package.rsplit(".", len(dots) - 1)[0] if len(dots) > 1 else package
            base = ".".join(part for part in (above, base) if part)
        yield from (f"{base}.{item}" for item in _first_words(items))


def _first_words(items: str) -> Iterator[str]:
    for item in re.sub("#.*", "", items).strip("() \t\n").split(","):
        if item.strip():
            yield item.split()[0]


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))] if parts[0] else []


def _find(name: str) -> ModuleSpec | None:
    """Returns where a module is, without importing its parents as ``importlib`` would."""
    first, *others = name.split(".")
    if first in _NOT_READ:
        return None
    try:
        spec = importlib.util.find_spec(first)
        for other in others:
            if spec is None or spec.submodule_search_locations is None:
                return None
            # By its last name: a full one makes `importlib` look for the parent's module.
            spec = PathFinder.find_spec(other, list(spec.submodule_search_locations))
    except (ImportError, ValueError):
        return None
    return spec
