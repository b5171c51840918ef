"""The pytest plugin: meshes of zrpc workers as fixtures.

pytest imports this module in every run in an environment with zrpc. So it imports neither
torch nor zmq, nor zrpc's core: the fixtures do, when a test first uses one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from zrpc.testing.spec import DEFAULT_WORKERS, MeshSpec

if TYPE_CHECKING:
    from zrpc.testing.mesh import Mesh
    from zrpc.testing.watchdog import Watchdog

_MARKER = (
    "zrpc(workers=2, processes=False, timeout=30, options={}, leaks=True, faults=False, "
    "restarts=False, elastic=False): the number of workers in the test's mesh, whether they are "
    "processes (otherwise threads), the seconds that the test may take, arguments for "
    "ZmqRpcBackendOptions, whether leaks are errors, whether connections between the workers can "
    "be disturbed, whether killed workers can be restarted, and whether the mesh is elastic."
)
# The exit status of a session that can't continue: pytest's own for an internal error.
_EXIT_STATUS = 3

_failed = pytest.StashKey[bool]()
_watchdog: pytest.StashKey[Watchdog] = pytest.StashKey()
_shared: pytest.StashKey[list[Mesh]] = pytest.StashKey()


class MakeMesh:
    """The type of the fixture ``make_mesh``."""

    def __init__(self, item: pytest.Item, spec: MeshSpec, watchdog: Watchdog) -> None:
        self._ways = _ways_to_start(item.config, [item])
        self._spec = spec
        self._watchdog = watchdog

    def __call__(
        self,
        workers: int | None = None,
        *,
        processes: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Mesh:
        """Starts a mesh; the marker gives what is None, and its options are merged."""
        from zrpc.testing.startup import start_mesh

        __tracebackhide__ = True
        spec = self._spec.replace(workers, processes, options)
        return start_mesh(spec, self._watchdog, **self._ways)


@pytest.fixture
def mesh(make_mesh: MakeMesh) -> Mesh:
    """The test's mesh of workers, as specified by ``@pytest.mark.zrpc(...)``.

    See `zrpc.testing.Mesh` for its methods, and `make_mesh` for when it is shut down.

    Example::

        @pytest.mark.zrpc(workers=3)
        def test_names(mesh):
            assert mesh.run(0, zrpc.rpc_sync, "worker2", max, args=(1, 2)) == 2
    """
    return make_mesh()


@pytest.fixture
def make_mesh(request: pytest.FixtureRequest) -> Iterator[MakeMesh]:
    """A function that starts a mesh, for tests that need several, or none at first.

    At the end of the test the meshes are shut down: gracefully if it passed, otherwise by
    force. Then anything left behind in this process is an error of the test, unless its
    marker has ``leaks=False``.

    Example::

        def test_two_meshes(make_mesh):
            first, second = make_mesh(workers=2), make_mesh(workers=4, processes=True)
    """
    from zrpc.testing.startup import warm_up
    from zrpc.testing.watchdog import Watchdog

    item: pytest.Item = request.node
    spec = _spec_of(item)
    warm_up(spec.processes)
    if spec.leaks:
        request.getfixturevalue("no_leaks")

    with Watchdog(spec.timeout, last_resort=lambda report: _exit(item, report)) as watchdog:
        item.stash[_watchdog] = request.config.stash[_watchdog] = watchdog
        # Until this phase of the test ends; the hooks below do the same for the other phases.
        watchdog.may_interrupt = True
        yield MakeMesh(item, spec, watchdog)
        watchdog.may_interrupt = False
        passed = not item.stash.get(_failed, False)
        try:
            _shut_down(watchdog.meshes, graceful=passed)
            if watchdog.timed_out is not None and passed:
                raise watchdog.timed_out  # the test has caught it, but must not pass
        except BaseException:
            item.stash[_failed] = True
            raise


class MeshFactory:
    """The type of the fixture ``mesh_factory``."""

    def __init__(self, session: pytest.Session) -> None:
        self._ways = _ways_to_start(session.config, session.items)
        self._meshes = session.config.stash[_shared] = []

    def __call__(self, workers: int = DEFAULT_WORKERS, **arguments: Any) -> Mesh:
        """Starts a mesh; the arguments are those of the marker, and of `zrpc.testing.MeshSpec`."""
        from zrpc.testing.startup import start_shared_mesh

        __tracebackhide__ = True
        mesh = start_shared_mesh(MeshSpec(workers, **arguments), **self._ways)
        self._meshes.append(mesh)
        return mesh


@pytest.fixture(scope="session")
def mesh_factory(request: pytest.FixtureRequest) -> Iterator[MeshFactory]:
    """A function that starts a mesh for several tests: for fixtures of a module or the session.

    It takes the arguments of the marker. ``timeout`` is the limit of each wait for the workers. The
    mesh lives until the session ends, or until ``mesh.shutdown()``.

    Example::

        @pytest.fixture(scope="module")
        def workers(mesh_factory):
            return mesh_factory(workers=4, processes=True)
    """
    yield MeshFactory(request.session)
    _shut_down(request.config.stash[_shared], graceful=not request.session.testsfailed)


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes it an error if a passing test leaves something behind in this process.

    Reported are threads, child processes, descriptors, ZeroMQ contexts, and socket files of
    agents, if they were made after this fixture was set up and still exist two seconds after
    it was torn down. Tests with a mesh use it already.

    Example::

        @pytest.mark.usefixtures("no_leaks")
        def test_start_and_stop(): ...
    """
    from zrpc.testing.leaks import no_leaks

    with contextlib.suppress(_Failed), _leaks_fail(), no_leaks():
        yield
        if request.node.stash.get(_failed, False):
            raise _Failed  # the failure's traceback keeps the test's objects alive


class _Failed(Exception):
    """The test has failed, so leaks are not checked."""


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuses markers with wrong arguments before the first test runs."""
    if hasattr(config, "workerinput"):
        return  # a worker of pytest-xdist would exit without the message: the fixture raises it
    for item in items:
        _spec_of(item)


# Our wrappers of a phase are the innermost ones, so that an interruption hits nothing but the
# fixtures and the test.


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Ends the interruptible section that the fixture `make_mesh` has begun."""
    __tracebackhide__ = True
    item.stash[_failed] = False  # True if a plugin reruns a test that failed
    try:
        return (yield)
    except BaseException:
        item.stash[_failed] = True
        raise
    finally:
        if _watchdog in item.stash:
            item.stash[_watchdog].may_interrupt = False


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Lets the deadline of a test with a mesh interrupt the test."""
    __tracebackhide__ = True
    with _interruptible(item):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Lets the deadline of a test with a mesh interrupt the teardown of other fixtures."""
    __tracebackhide__ = True
    with _interruptible(item, cleanup=True):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records whether the test has failed, and adds its workers' output to the report."""
    report = yield
    if call.excinfo is not None:
        item.stash[_failed] = True
    watchdog = item.stash.get(_watchdog, None)
    own = [] if watchdog is None else watchdog.meshes
    for mesh in (*own, *item.config.stash.get(_shared, ())):
        for name, text in mesh._new_output():
            report.sections.append((f"Captured stdout and stderr of {name} {call.when}", text))
    late = None if watchdog is None else watchdog.timed_out
    if late is not None and call.excinfo is not None and late is not call.excinfo.value:
        report.sections.append(("Past the deadline", str(late)))
    if call.when == "teardown":
        for stash in (item.stash, item.config.stash):
            with contextlib.suppress(KeyError):
                del stash[_watchdog]
    return report


def pytest_enter_pdb(config: pytest.Config) -> None:
    """Lifts the deadline of a test with a mesh while it is debugged."""
    if _watchdog in config.stash:
        config.stash[_watchdog].suspend()


@contextlib.contextmanager
def _interruptible(item: pytest.Item, cleanup: bool = False) -> Iterator[None]:
    if _watchdog not in item.stash:
        yield
        return
    try:
        with item.stash[_watchdog].interruptible(cleanup):
            yield
    except BaseException:
        # After Ctrl-C and pytest.exit no report records the failure. The meshes would be shut
        # down gracefully, and so wait for the very call that was interrupted.
        item.stash[_failed] = True
        raise


@contextlib.contextmanager
def _leaks_fail() -> Iterator[None]:
    """Makes pytest show leaks without zrpc's stack, which says nothing."""
    from zrpc.testing.leaks import LeakError

    try:
        yield
    except LeakError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _shut_down(meshes: list[Mesh], graceful: bool) -> None:
    """Shuts all meshes down, the latest first; raises an error only then."""
    with _leaks_fail(), contextlib.ExitStack() as stack:
        for mesh in meshes:
            stack.callback(mesh.shutdown, graceful)


def _ways_to_start(config: pytest.Config, items: Sequence[pytest.Item]) -> dict[str, Any]:
    """Returns the arguments of `start_mesh` that depend on pytest: for the meshes of tests."""
    modules = (item.getparent(pytest.Module) for item in items)
    by_value = sorted({module.obj.__name__ for module in modules if module is not None})
    return {"by_value": by_value, "capture": config.getoption("capture", "no") != "no"}


def _spec_of(item: pytest.Item) -> MeshSpec:
    try:
        return MeshSpec.from_marks(item.iter_markers("zrpc"))
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.zrpc: {error}") from None


def _exit(item: pytest.Item, report: str) -> None:
    """Ends the session if nothing can interrupt its main thread. In the watchdog's thread."""
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print(
        f"\n{item.nodeid}: {report}\nThe main thread can't be interrupted: ending the session.",
        file=sys.__stderr__,
        flush=True,
    )
    os._exit(_EXIT_STATUS)
