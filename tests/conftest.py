"""What all tests share, and which of them start processes.

A test is marked `system` if its folder, its fixtures or its mesh say that it starts processes. A
test that starts one in another way needs the marker itself, or it fails. Tests that take long have
it, too.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from zrpc.testing import Mesh

_HERE = Path(__file__).parent
if sys.dont_write_bytecode:
    # Each process of pytest would compile all modules, for seconds. It may not do so beside them.
    sys.pycache_prefix = str(_HERE.parent / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
# Until the tests are collected: the objects of torch and of the tests live to the end.
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts `pytest &` that way, and each process would inherit it: no test of Ctrl-C ends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
pytest_plugins = ["pytester"]
pytest.register_assert_rewrite("tests.support", "tests.services", "tests.transport")

from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support.identity import forget  # noqa: E402
from zrpc.launch.port import ReservedPort  # noqa: E402
from zrpc.launch.starter import Starter  # noqa: E402

# How long an example takes says nothing on a busy machine.
settings.register_profile("zrpc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("zrpc")

# Whole folders and files of tests that start processes.
_SYSTEM_PATHS = (
    "bench/soak",
    "bench/test_command.py",
    "cli/test_debug.py",
    "cli/test_launch.py",
    "docs/test_pages.py",
    "driver",
    "drop_in/test_run.py",
    "engines",
    "examples",
    "gpu",
    "integrations",
    "launch/test_descriptors.py",
    "launch/test_server.py",
    "launch/test_program.py",
    "runtime/test_allocator.py",
)
# Fixtures that start processes.
_SYSTEM_FIXTURES = {
    "commands",
    "marked",
    "programs",
    "quick_commands",
    "shell",
    "start",
    "start_workers",
    "starter",
    "succeed",
}
# More workers than this only wait for each other's programs.
_MAX_WORKERS = 8
# For each processor: tests wait for much of their time, those that start processes for more.
_WORKERS_PER_PROCESSOR = 3
_WORKERS_PER_PROCESSOR_IF_QUICK = 2


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Runs the whole suite on all processors, and parts of it, named by their paths, on one."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    quick = config.option.markexpr == "not system"
    each = _WORKERS_PER_PROCESSOR_IF_QUICK if quick else _WORKERS_PER_PROCESSOR
    return min(each * len(os.sched_getaffinity(0)), _MAX_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _starts_processes(item):
            item.add_marker(pytest.mark.system)
    # The longest come first: otherwise one of the processes would run the last of them alone.
    items.sort(key=lambda item: item.get_closest_marker("system") is None)


@functools.cache  # thousands of tests lie in a few hundred files
def _in_a_system_path(path: Path) -> bool:
    within = path.relative_to(_HERE).as_posix() if path.is_relative_to(_HERE) else ""
    return within.startswith(_SYSTEM_PATHS)


def _starts_processes(item: pytest.Item) -> bool:
    if _in_a_system_path(item.path):
        return True
    if _SYSTEM_FIXTURES & set(getattr(item, "fixturenames", ())):
        return True
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("processes") is True:
        return True
    asked = [
        mark.kwargs["processes"] for mark in item.iter_markers("zrpc") if "processes" in mark.kwargs
    ]
    return bool(asked and asked[0])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_started: list[str] = []


def _note_start(event: str, args: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"):
        _started.append(event)


def pytest_configure() -> None:
    sys.addaudithook(_note_start)  # for good: Python has no way to remove one
    spawn = Starter.spawn

    def noted(self: Starter, *args: Any, **kwargs: Any) -> int:
        _started.append("Starter.spawn")
        return spawn(self, *args, **kwargs)

    Starter.spawn = noted  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _system_tests_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that starts a process and is not marked `system`."""
    _started.clear()
    yield
    if _started and not request.node.get_closest_marker("system"):
        pytest.fail(f"mark it `system`, as it starts a process: {', '.join(_started)}")


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Has the garbage collector pass by what was there before a module's tests: all of torch.

    Without it each full collection, of which some tests ask for many, takes a quarter of a
    second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _quick_comparisons() -> None:
    """Has the first `torch.testing.assert_close` of a process not import DTensor, for seconds."""
    if comparison := sys.modules.get("torch.testing._comparison"):
        comparison._HAS_DTENSOR = False  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Forgets what a test has sent to other workers as the same object."""
    yield
    forget()


@pytest.fixture
def caller(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh, with worker0 as the worker that the test itself is."""
    with mesh.agent(0).as_current():
        yield mesh


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that nobody gets who asks for any free one, while the test has it."""
    with ReservedPort() as port:
        yield port.number
