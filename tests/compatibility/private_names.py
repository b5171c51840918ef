"""Which private names of torch a test uses, itself or by the functions that it calls.

Found by reading the source of the test, and of all functions and classes of torch's test modules
that it leads to. Private names of the tests' own modules don't count.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

_TESTS = "torch.testing._internal.dist"  # where torch's tests of RPC and what they share are


def private_names(cls: type, method: str) -> list[str]:
    """Returns the private names that one test uses, in alphabetical order."""
    found: set[str] = set()
    seen: set[Any] = set()
    left: list[tuple[Any, type | None]] = [(inspect.getattr_static(cls, method), cls)]
    while left:
        code, owner = left.pop()
        code = inspect.unwrap(code)
        if code in seen or not _is_of_tests(code):
            continue
        seen.add(code)
        for node in ast.walk(_parsed(code)):
            if isinstance(node, ast.Attribute):
                target = _target(node, code, owner)
                if target is not None:
                    left.append(target)
                elif _is_private(node.attr) and not _is_own(node, owner):
                    found.add(node.attr)
            elif isinstance(node, ast.Name):
                value = _globals(code).get(node.id)
                if _is_of_tests(value):
                    if not node.id.endswith("Test"):
                        left.append((value, value if inspect.isclass(value) else None))
                elif _is_private(node.id) and value is not None:
                    found.add(node.id)
    return sorted(found)


def _target(node: ast.Attribute, code: Any, owner: type | None) -> tuple[Any, type] | None:
    """Returns the function of a test class that ``self.f``, ``cls.f`` or ``Class.f`` names."""
    if not isinstance(node.value, ast.Name):
        return None
    is_own = node.value.id in ("self", "cls")
    cls = owner if is_own else _globals(code).get(node.value.id)
    if not inspect.isclass(cls):
        return None
    found = inspect.getattr_static(cls, node.attr, None)
    found = getattr(found, "__func__", found)
    return (found, cls) if _is_of_tests(found) else None


def _is_own(node: ast.Attribute, owner: type | None) -> bool:
    return (
        owner is not None and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_of_tests(value: Any) -> bool:
    is_code = inspect.isfunction(value) or inspect.isclass(value)
    return is_code and (value.__module__ or "").startswith((_TESTS, "tests.", "__main__"))


def _globals(code: Any) -> dict[str, Any]:
    function = code if inspect.isfunction(code) else next(_functions(code), None)
    return getattr(function, "__globals__", {})


def _functions(cls: type) -> Iterator[Any]:
    return (value for value in vars(cls).values() if inspect.isfunction(value))


def _parsed(code: Any) -> ast.AST:
    """Returns the source, without decorators: those set the worker up."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.decorator_list = []
    return tree
