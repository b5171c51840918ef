"""Imports point one way: each module may only know those in the rooms below it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

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

# From the top to the bottom. A room may import from the rooms below it, and from no other.
ROOMS: list[list[str]] = [
    ["zrpc.cli"],
    ["zrpc.bench"],
    ["zrpc.testing", "zrpc.drop_in", "zrpc.integrations"],
    ["zrpc.driver"],
    ["face", "zrpc.launch"],
    ["zrpc.services"],
    ["zrpc.agent"],
    ["zrpc.calls"],
    ["zrpc.membership"],
    ["zrpc.transport", "zrpc.wire"],
    ["values"],
    ["zrpc.runtime"],
    ["leaves"],
]
# What lies directly in zrpc/: torch's names.
FACE = {
    "zrpc.api",
    "zrpc.autograd",
    "zrpc.backend_registry",
    "zrpc.bootstrap",
    "zrpc.groups",
    "zrpc.mesh",
    "zrpc.nn",
    "zrpc.optim",
    "zrpc.torch_collectives",
    "zrpc.streams",
}
# What goes by value in a pickle.
VALUES = {"zrpc.by_value", "zrpc.class_versions", "zrpc.error_parts", "zrpc.function_homes"}
# A service may know these others, and no more.
NEIGHBOURS = {
    ("actors", "rref"),
    ("autograd", "rref"),
    ("debugger", "inspection"),
    ("groups", "rref"),
    ("groups", "shm"),
    ("groups", "streams"),
    ("inspection", "actors"),
    ("inspection", "groups"),
    ("inspection", "rref"),
    ("inspection", "streams"),
    ("names", "actors"),
    ("names", "rref"),
    ("rref", "actors"),
    ("streams", "rref"),
    ("tracing", "autograd"),
    ("weights", "shm"),
}
# What other rooms may import from a room; a dot stands for its package. All else is private to it.
_SURFACE = {
    "zrpc.runtime": """adaptive_spin alarm allocator compiler context_thread event_loop forks
        garbage_collector gates green_threads interrupts leader_follower resource_limits run_queue
        switch_interval thread_errors thread_frames thread_pool torch_modes""",
    "zrpc.wire": """cut devices exceptions graph_capture kind member_id message
        page_locks parts pickling unpickling""",
    "zrpc.transport": "address chunks curve identity network probes",
    "zrpc.membership": """agreement cluster_environment device_maps endpoints
        failure_detector hooks init_method launched liveness missing_ranks peer_record rendezvous
        secret signed_store store view worker_info""",
    "zrpc.calls": """call_counters call_options callee callees caller cancel_scope codec
        current_device execution function_names future future_callback future_error future_group
        last_calls main_copies message_hooks
        open_telemetry outbox pending_call pending_calls recorder result_sink unmapped""",
    "zrpc.agent": "agent current service shutdown stats",
    "zrpc.services": """actors.service agreement autograd.grad_lock autograd.service
        batching.service collectives debugger.prompt debugger.service devices.service
        elastic.join elastic.limits groups.arguments groups.future groups.group
        groups.service inspection.discovery inspection.rates inspection.report
        inspection.service inspection.snapshot metrics.address metrics.service names.claims
        names.service queue.service rref.orders rref.rref rref.service shm.segments shm.service
        streams.service streams.stream tracing.service weights.publisher weights.service
        weights.subscriber""",
    "zrpc.launch": """. child descriptors interpreter line_splitter output port signals starter
        store task terminal worker""",
    "zrpc.driver": "place",
    "zrpc.drop_in": ". check",
    "zrpc.testing": ". procfs served stacks startup watchdog",
    "zrpc.bench": """device library link machine namespaces plot progress rows run scale session
        soak.report soak.run table""",
    "face": "api autograd backend_registry bootstrap optim",
    "values": "by_value error_parts",
    "leaves": "actors batch_values constants errors functions options stand_in torch_internals",
}
SURFACE = {room: {name.strip(".") for name in names.split()} for room, names in _SURFACE.items()}
LEAVES = {f"zrpc.{name}" for name in SURFACE["leaves"]}
# zrpc itself loads its names when they are used, so that it stands in no layer.
FACADE = "zrpc"


class _Imports(NamedTuple):
    """The modules that a file imports when it is loaded, anywhere it runs, and for types only."""

    at_load: set[str]
    anywhere: set[str]
    for_types: set[str]


def imports_of(module: str) -> _Imports:
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: dict[str, set[str]] = {"load": set(), "run": set(), "types": set()}
    for when, node in _statements(ast.parse(path.read_text())):
        found[when].update(_names_in(node, package))
    return _Imports(found["load"], found["load"] | found["run"], found["types"])


def _statements(node: ast.AST, when: str = "load") -> Iterator[tuple[str, ast.AST]]:
    """The statements that import, and when: as the module is loaded, as it runs, or for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield when, child
        elif isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            yield from _statements(ast.Module(child.body, []), "types")
            yield from _statements(ast.Module(child.orelse, []), when)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _statements(child, "run")
        elif not isinstance(child, ast.expr):
            yield from _statements(child, when)


def _names_in(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in FILES else base


@functools.cache
def all_imports() -> dict[str, _Imports]:
    """The imports of each module.

    Not read when pytest collects, which each of its processes does: that takes a second.
    """
    return {module: imports_of(module) for module in FILES}


def own(names: set[str]) -> set[str]:
    return {name for name in names if name in FILES and name != FACADE}


def room_of(module: str) -> str:
    """The room that a module lies in."""
    if module in VALUES:
        return "values"
    if module in LEAVES:
        return "leaves"
    if ".".join(module.split(".")[:2]) in FACE:
        return "face"
    room = ".".join(module.split(".")[:2])
    assert any(room in row for row in ROOMS), f"{module} lies in no room: give it its place"
    return room


def row_of(module: str) -> int:
    """The number of the row that a module's room is in, counted from the top."""
    return next(number for number, row in enumerate(ROOMS) if room_of(module) in row)


def upward(module: str, imported: set[str]) -> set[str]:
    """Those of the imported modules that lie in other rooms, and not in a room below."""
    return {
        name
        for name in imported
        if room_of(name) != room_of(module) and row_of(name) <= row_of(module)
    }


def private(module: str, imported: set[str]) -> set[str]:
    """Those of the imported modules that are private to another room."""
    return {
        name
        for name in imported
        if room_of(name) != room_of(module)
        and name.removeprefix(room_of(name)).removeprefix("zrpc").lstrip(".")
        not in SURFACE[room_of(name)]
    }


def reached(start: str) -> set[str]:
    """All that is imported with a module, by way of our own modules: names as imported."""
    seen: set[str] = set()
    left = [start]
    while left:
        module = left.pop()
        parents = {".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 1)}
        for name in all_imports()[module].at_load | parents:
            if name not in seen:
                seen.add(name)
                if name in FILES:
                    left.append(name)
    return seen


@pytest.mark.system
def test_no_import_cycles() -> None:
    """Neither when modules are loaded, nor for a reader of the types."""
    imports = all_imports()
    graph = {module: own(imports[module].at_load | imports[module].for_types) for module in FILES}
    for part in ("closing", "current", "service"):
        graph[f"zrpc.agent.{part}"].remove("zrpc.agent.agent")  # the whole that it is a part of
    TopologicalSorter(graph).prepare()  # its error names the modules of a cycle


def breaches(rule: Callable[[str, set[str]], set[str]]) -> dict[str, set[str]]:
    """The imports that break a rule, by module. Inside of functions too: they are no way around."""
    modules = sorted(set(FILES) - {FACADE})
    found = {module: rule(module, own(all_imports()[module].anywhere)) for module in modules}
    return {module: names for module, names in found.items() if names}


def test_imports_point_downward() -> None:
    assert breaches(upward) == {}


def test_only_the_surface_of_another_room_is_imported() -> None:
    assert breaches(private) == {}


def test_the_surface_of_a_room_is_used_by_other_rooms() -> None:
    used: dict[str, set[str]] = {room: set() for room in SURFACE}
    for module in FILES:
        for name in own(all_imports()[module].anywhere):
            room = room_of(name)
            if module == FACADE or room_of(module) != room:
                used[room].add(name.removeprefix(room).removeprefix("zrpc").lstrip("."))
    assert {room: names - used[room] for room, names in SURFACE.items() if names - used[room]} == {}


def test_services_know_few_of_their_neighbours() -> None:
    found = {
        (module.split(".")[2], name.split(".")[2])
        for module in in_package("zrpc.services")
        for name in own(all_imports()[module].anywhere)
        if name.startswith("zrpc.services.")
    }
    assert {(a, b) for a, b in found if a != b} <= NEIGHBOURS


def test_only_the_face_lies_outside_of_rooms() -> None:
    flat = {f"zrpc.{path.stem}" for path in (ROOT / "zrpc").glob("*.py")} - {"zrpc.__init__"}
    assert flat == {name for name in FACE | VALUES | LEAVES if FILES[name].name != "__init__.py"}


def in_package(package: str) -> list[str]:
    return [module for module in FILES if module == package or module.startswith(package + ".")]


IO = {"zmq", "socket", "threading", "time", "torch", "pickle"}
FORBIDDEN = {
    "zrpc.wire": {"zmq", "socket"},
    "zrpc.transport": {"pickle", "cloudpickle", "marshal", "torch"},
    # The rules are without I/O.
    "zrpc.services.rref.protocol": IO,
    "zrpc.services.rref.messages": IO,
    "zrpc.services.names.messages": IO,
    "zrpc.services.names.registry": IO,
    "zrpc.membership.failure_detector": IO,
    "zrpc.services.inspection.wait_graph": IO,
    "zrpc.services.inspection.questions": IO,
    "zrpc.agent.termination": IO,
    "zrpc.services.inspection.listener": {"zmq", "torch", "pickle"},
    "zrpc.membership.cluster_environment": {"zmq", "socket", "os", "threading", "torch"},
    "zrpc.wire.message": {"zmq", "socket", "threading", "torch", "pickle", "cloudpickle"},
    "zrpc.errors": {"zmq", "torch"},
    "zrpc.membership.secret": {"zmq", "torch"},
}


def test_what_a_room_must_not_import() -> None:
    for package, forbidden in FORBIDDEN.items():
        assert in_package(package), package
        for module in in_package(package):
            outside = {name.split(".")[0] for name in all_imports()[module].anywhere}
            assert not outside & forbidden, module


def test_nothing_imports_the_rpc_of_torch() -> None:
    for module in FILES:
        found = {n for n in all_imports()[module].anywhere if n.startswith("torch.distributed.rpc")}
        assert not found, module


def test_the_launcher_needs_nothing_of_the_core() -> None:
    for module in in_package("zrpc.launch"):
        others = {n for n in own(all_imports()[module].anywhere) if not n.startswith("zrpc.launch")}
        # `spawn` sends functions as calls do, and lets its own process join the others.
        allowed = "zrpc.wire.pickling zrpc.membership.launched zrpc.membership.cluster_environment"
        is_spawn = module == "zrpc.launch.processes"
        assert others <= set(allowed.split() if is_spawn else ()), module


def test_what_loads_fast_reaches_nothing_heavy() -> None:
    heavy = {"torch", "zmq", "numpy", "cloudpickle", "multiprocessing"}
    for module in ("zrpc.testing.plugin", "zrpc.testing", "zrpc.cli", "zrpc.cli.stacks", "zrpc"):
        found = reached(module)
        assert not {name for name in found if name.split(".")[0] in heavy}
        assert "zrpc.agent.agent" not in found
