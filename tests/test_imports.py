"""Imports point one way: each module may only know those in the rooms below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    **{
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / "zrpc").rglob("*.py"))
    },
    **{
        f"zrpc.cli.{path.stem}".removesuffix(".__init__"): path
        for path in sorted((ROOT / "cli").rglob("*.py"))
    },
}

# From the top to the bottom; what stands in one line may not import each other, except where
# one package or module is named (its own modules may, as long as there is no cycle).
LAYERS: list[list[str]] = [
    ["zrpc.cli"],
    ["zrpc.soak"],
    ["zrpc.testing"],
    ["zrpc.bench"],
    ["zrpc.launch", "zrpc.nn", "zrpc.optim"],
    ["zrpc.api"],
    ["zrpc.autograd", "zrpc.inspection"],
    [
        "zrpc.backend_registry",
        "zrpc.gathering",
        "zrpc.joining",
        "zrpc.roll_call",
        "zrpc.rref",
        "zrpc.shared_memory",
    ],
    ["zrpc.elastic"],
    ["zrpc.agent", "zrpc.endpoints"],
    ["zrpc.dispatcher"],
    ["zrpc.callee", "zrpc.caller"],
    ["zrpc.codec", "zrpc.graceful_shutdown", "zrpc.outbox", "zrpc.watch"],
    [
        "zrpc.current",
        "zrpc.execution",
        "zrpc.futures",
        "zrpc.incoming_call",
        "zrpc.membership",
        "zrpc.requests",
        "zrpc.store_host",
        "zrpc.termination",
        "zrpc.window",
    ],
    [
        "zrpc.callbacks",
        "zrpc.calls",
        "zrpc.cancel_scope",
        "zrpc.event_loop",
        "zrpc.functions",
        "zrpc.future_error",
        "zrpc.interrupts",
        "zrpc.io_threads",
        "zrpc.options",
        "zrpc.rendezvous",
        "zrpc.store",
    ],
    ["zrpc.failure_detector", "zrpc.hooks", "zrpc.leaving", "zrpc.news"],
    ["zrpc.roster"],
    ["zrpc.summary"],
    ["zrpc.item"],
    ["zrpc.card", "zrpc.entries", "zrpc.horizon"],
    ["zrpc.init_method", "zrpc.pool", "zrpc.secret"],
    ["zrpc.worker_info"],
    ["zrpc.transport", "zrpc.wire"],
    [
        "zrpc.context_thread",
        "zrpc.errors",
        "zrpc.exhaustion",
        "zrpc.malloc",
        "zrpc.silence",
        "zrpc.spin",
        "zrpc.switch_interval",
    ],
]
# zrpc itself loads its names when they are used, so that it stands in no layer.
FACADE = "zrpc"


class _Imports(ast.NodeVisitor):
    """The modules that a file imports when it is loaded, or anywhere."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.module = module
        self.is_package = is_package
        self.at_load: set[str] = set()
        self.anywhere: set[str] = set()
        self._depth = 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.module.split(".")
            parts = parts[: len(parts) - node.level + self.is_package]
            base = ".".join([*parts, base]).strip(".")
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            self._add(inner if inner in FILES else base)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                self.visit(child)
            return
        self.generic_visit(node)

    def _add(self, name: str) -> None:
        self.anywhere.add(name)
        if not self._depth:
            self.at_load.add(name)


def imports_of(module: str, source: str | None = None) -> _Imports:
    path = FILES[module]
    imports = _Imports(module, path.name == "__init__.py")
    imports.visit(ast.parse(source if source is not None else path.read_text(), str(path)))
    return imports


IMPORTS = {module: imports_of(module) for module in FILES}


def own(names: set[str]) -> set[str]:
    return {name for name in names if name in FILES and name != FACADE}


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules on one cycle, in order; empty where there is none."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for imported in sorted(graph[module]):
            if found := search(imported, [*path, module]):
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        if found := search(module, []):
            return found
    return []


def layer_of(module: str) -> tuple[int, str]:
    """The number of a module's layer, from the top, and the entry there that covers it."""
    found = [
        (number, entry)
        for number, layer in enumerate(LAYERS)
        for entry in layer
        if module == entry or module.startswith(entry + ".")
    ]
    assert len(found) == 1, f"{module} stands in {len(found)} layers: give it its place"
    return found[0]


def upward(module: str, imported: set[str]) -> set[str]:
    """Which of the imported modules a module must not know."""
    number, entry = layer_of(module)
    return {name for name in imported if layer_of(name)[1] != entry and layer_of(name)[0] <= number}


def reached(start: str, anywhere: bool = False) -> set[str]:
    """All that is imported with a module, by way of our own modules: names as imported."""
    seen: set[str] = set()
    left = [start]
    while left:
        module = left.pop()
        parents = {".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 1)}
        imports = IMPORTS[module].anywhere if anywhere else IMPORTS[module].at_load
        for name in imports | parents:
            if name not in seen:
                seen.add(name)
                if name in FILES:
                    left.append(name)
    return seen


def test_the_modules_were_found():
    assert {"zrpc.api", "zrpc.rref.protocol", "zrpc.cli.launch", "zrpc.wire"} <= set(FILES)
    assert "zrpc.agent" in IMPORTS["zrpc.api"].at_load


def test_no_import_cycles():
    assert cycle_in({module: own(IMPORTS[module].at_load) for module in FILES}) == []


def test_a_cycle_would_be_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert cycle_in(graph) == ["b", "c"]


@pytest.mark.parametrize("module", sorted(set(FILES) - {FACADE}))
def test_imports_point_downward(module):
    # Inside of functions too: a late import is no way around the order.
    assert upward(module, own(IMPORTS[module].anywhere)) == set()


def test_an_import_that_points_upward_would_be_found():
    source = "from zrpc.wire import header\ndef f():\n    from zrpc.agent import Agent\n"
    imports = imports_of("zrpc.wire.header", source)
    assert imports.at_load == {"zrpc.wire.header"}
    assert upward("zrpc.wire.header", own(imports.anywhere)) == {"zrpc.agent"}


def in_package(package: str) -> list[str]:
    return [module for module in FILES if module == package or module.startswith(package + ".")]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("zrpc.wire", {"zmq", "socket"}),
        ("zrpc.transport", {"pickle", "cloudpickle", "marshal", "torch"}),
        # The rules are without I/O.
        ("zrpc.rref.protocol", {"zmq", "socket", "threading", "time", "torch", "pickle"}),
        ("zrpc.rref.ids", {"zmq", "socket", "threading", "time", "torch", "pickle"}),
        ("zrpc.failure_detector", {"zmq", "socket", "threading", "time", "torch", "pickle"}),
        ("zrpc.inspection.wait_graph", {"zmq", "socket", "threading", "time", "torch", "pickle"}),
        ("zrpc.inspection.congestion", {"zmq", "socket", "threading", "time", "torch", "pickle"}),
        ("zrpc.inspection.listener", {"zmq", "threading", "torch", "pickle"}),
        ("zrpc.termination", {"zmq", "socket", "threading", "time", "torch", "pickle"}),
        ("zrpc.wire.header", {"zmq", "socket", "threading", "torch", "pickle", "cloudpickle"}),
        ("zrpc.errors", {"zmq", "torch"}),
        ("zrpc.secret", {"zmq", "torch"}),
    ],
)
def test_what_a_room_must_not_import(package, forbidden):
    for module in in_package(package):
        outside = {name.split(".")[0] for name in IMPORTS[module].anywhere}
        assert not outside & forbidden, module


def test_nothing_imports_the_rpc_of_torch():
    for module in FILES:
        found = {n for n in IMPORTS[module].anywhere if n.startswith("torch.distributed.rpc")}
        assert not found, module


def test_the_launcher_needs_nothing_of_the_core():
    for module in in_package("zrpc.launch"):
        others = {n for n in own(IMPORTS[module].anywhere) if not n.startswith("zrpc.launch")}
        assert not others, module


@pytest.mark.parametrize(
    "module", ["zrpc.testing.plugin", "zrpc.testing", "zrpc.cli", "zrpc.cli.stacks", "zrpc"]
)
def test_what_loads_fast_reaches_neither_torch_nor_zmq(module):
    heavy = {name for name in reached(module) if name.split(".")[0] in ("torch", "zmq")}
    assert not heavy


def test_loading_the_plugin_loads_neither_torch_nor_zmq():
    code = (
        "import sys, zrpc.testing.plugin, zrpc.cli\n"
        "print(sorted(m for m in sys.modules if m in ('torch', 'zmq', 'zrpc.agent')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_each_module_says_what_it_offers():
    for module, path in FILES.items():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{module} has no docstring"
