"""Keeps torch's compiler out of zrpc.

In code that ``torch.compile`` compiles, each use of zrpc is a graph break: Dynamo, which reads the
code, ends a graph and calls zrpc as it is. Without rules it would compile zrpc's own code, too.

Dynamo has two rules for that. One skips the files of a package. The other also switches Dynamo off
for all that a function calls; torch 2.6 doesn't have it. Importing Dynamo takes seconds, so this
module never does: it watches for the import, and sets the rules afterwards.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_PREFIX = "zrpc."
_REASON = "zrpc is never compiled, since its calls run on other workers"

_actions: list[Callable[[], None]] = []
_is_loaded = False


def watch_for_compiler() -> None:
    """Sets the rules as soon as Dynamo has been imported; at once if it has been."""
    # The finder stays there: while another thread looks through the list, removing one could make
    # that thread miss the next.
    sys.meta_path.insert(0, _Finder())
    if _DYNAMO in sys.modules:
        _set_rules()


def when_compiler_is_loaded(action: Callable[[], None]) -> None:
    """Calls ``action`` once Dynamo has been imported; at once if it has been."""
    # First the list, then the look: the thread that imports Dynamo does it the other way round.
    _actions.append(action)
    if _is_loaded:
        action()


class _Finder:
    """Finds modules as the other finders do, and acts once they have been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _DYNAMO and not name.startswith(_PREFIX):
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find: Any = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec)
                return spec  # type: ignore[no-any-return]
        return None


class _Loader:
    """Executes a module by its own loader, which others may share, and acts afterwards."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec
        self._loader: Any = spec.loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # to find the source, for example

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns the module, or None for a module as usual."""
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module."""
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._spec.name == _DYNAMO:
            _set_rules()
        elif _is_loaded:  # maybe since it was looked for: importing it may import Dynamo
            _switch_off(module)


def _set_rules() -> None:
    """Sets the rules for all modules of zrpc that are loaded."""
    global _is_loaded
    _is_loaded = True
    try:
        from torch._dynamo import trace_rules

        trace_rules.add("zrpc")
        for name, module in list(sys.modules.items()):
            if name.startswith(_PREFIX):
                _switch_off(module)
        for action in _actions:
            action()
    except Exception as error:  # rather than fail the program's import of Dynamo
        warnings.warn(
            "torch.compile will compile zrpc's own code, since this version of torch has other "
            f"rules than zrpc knows ({type(error).__name__}: {error}): use a newer zrpc",
            stacklevel=2,
        )


def _switch_off(module: ModuleType) -> None:
    """Makes Dynamo skip a module's functions, and all that they call."""
    skip = _rule()
    for function in _functions(module, module.__name__):
        # What `torch.compiler.disable` sets: errors and the log of graph breaks show the reason.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
        if not hasattr(function, "__wrapped__"):  # otherwise its code belongs to a decorator
            for code in _with_inner(function.__code__):
                skip(code)


def _rule() -> Callable[[CodeType], object]:
    """Returns what has Dynamo skip the frames of a code, and if it can, what they call."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo import types as dynamo

    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return eval_frame.skip_code  # type: ignore[attr-defined,no-any-return]
    strategy = dynamo.FrameExecStrategy(dynamo.FrameAction.SKIP, dynamo.FrameAction.SKIP)
    return lambda code: eval_frame.set_code_exec_strategy(code, strategy)


def _functions(home: ModuleType | type, module: str) -> Iterator[FunctionType]:
    """Yields the functions of a module and of its classes, including what properties call."""
    for member in list(vars(home).values()):
        if isinstance(member, property):
            member = member.fget
        member = getattr(member, "__func__", member)  # a static method, or one of the class
        # Others' functions are left alone: classes have some of typing and of torch.
        if getattr(member, "__module__", None) != module or member is home:
            continue
        if isinstance(member, type):
            yield from _functions(member, module)
        elif isinstance(member, FunctionType):
            yield member


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yields a code and those of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
