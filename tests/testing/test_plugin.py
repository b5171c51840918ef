"""The pytest plugin: fixtures, marker, and the reports of failures, hangs and leaks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.warm import warm_commands

RunTests = Callable[..., pytest.RunResult]

pytestmark = pytest.mark.system


def run_warm(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Runs pytest in a process that is forked from one which has imported torch."""
    command = (warm_commands().directory / "pytest", "-p", "no:cacheprovider", *arguments)
    # `run` sets PYTHONPATH, which only a fresh interpreter would read.
    return pytester.run("env", "-u", "PYTHONPATH", *command, timeout=60)


def test_a_wrong_marker_is_refused_before_the_first_test(run_tests: RunTests) -> None:
    result = run_tests(
        """
def test_first():
    pass

@pytest.mark.zrpc(workers=0)
def test_marked(mesh):
    pass
"""
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = "test_marked: @pytest.mark.zrpc: workers must be at least 1, but got 0"
    assert text in result.stderr.str()


def test_a_wrong_marker_is_explained_in_a_worker_of_xdist(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import pytest

@pytest.mark.zrpc(worker=3)
def test_marked(mesh):
    pass
"""
    )
    result = run_warm(pytester, "-n", "1")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_marked: @pytest.mark.zrpc: expected one of workers, *"])


@pytest.mark.parametrize("processes", [False, True])
def test_a_failure_shows_the_worker_and_its_traceback(run_tests: RunTests, processes: bool) -> None:
    result = run_tests(
        f"""
def broken():
    print("just before")
    raise ValueError("oops")

@pytest.mark.zrpc(processes={processes})
def test_broken(mesh):
    mesh.run("worker1", broken)
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "in worker1 (*):",
            "Traceback (most recent call last):",
            '    raise ValueError("oops")',
            "*mesh.run(*",
            "E *ValueError: oops",
            "* Captured std*",
            "just before",
        ]
    )


def test_leaks_and_output_of_worker_processes_are_reported(run_tests: RunTests) -> None:
    result = run_tests(
        """
def leave():
    sys.left = os.pipe()
@pytest.mark.zrpc(processes=True)
def test_leave(mesh):
    mesh.run(1, print, "not shown", flush=True)
    mesh.run(1, leave)
@pytest.mark.zrpc(processes=True)
def test_print(mesh):
    mesh.run(1, print, "hello from afar", flush=True)
    assert False
def test_fail(mesh):  # which is not checked
    left = os.pipe()
    try:
        raise ValueError("the only one")
    finally:
        left = [os.fdopen(fd) for fd in left]
"""
    )
    result.assert_outcomes(passed=1, errors=1, failed=2)
    result.stdout.fnmatch_lines(["left behind:", "- worker1 (pid *): descriptor *: pipe:*"])
    result.stdout.fnmatch_lines(["* Captured stdout and stderr of worker1 call *", "hello from*"])


@pytest.mark.parametrize("processes", [False, True])
def test_a_hang_is_reported_with_all_stacks(run_tests: RunTests, processes: bool) -> None:
    timeout = 1.5 if processes else 0.5  # a process starts slowly on a busy machine
    result = run_tests(
        f"""
def hang():
    threading.Event().wait(20)

@pytest.mark.zrpc(workers=3, processes={processes}, timeout={timeout})
def test_hang(mesh):
    mesh.run("worker1", hang)

def test_after():
    pass
"""
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            f"E *MeshTimeout: not finished within {timeout} s *",
            "E *- worker1 (*) runs hang",
            "E *---- stacks of worker0 (*) ----",
            "E *---- stacks of worker1 (*) ----",
            "E *in hang",
            "E *---- stacks of worker2 (*) ----",
            "E *---- other threads of this process ----",
            "E *Thread MainThread*",
            "E *in test_hang",
        ]
    )


def test_a_hang_in_the_test_itself_is_interrupted(run_tests: RunTests) -> None:
    """Even if its main thread waits for a call that is never answered.

    Also if the deadline passes before the test begins. And it does not pass if it swallows the
    error, or has not waited for what a worker runs.
    """
    result = run_tests(
        """
import contextlib, zrpc

entered, end = threading.Event(), threading.Event()

def hang():
    entered.set()
    end.wait(20)

@pytest.mark.zrpc(timeout=0.5)
def test_event(mesh):
    threading.Event().wait()

@pytest.mark.zrpc(timeout=0.5)
def test_call(mesh):
    with mesh.agent(0).as_current():
        zrpc.rpc_sync("worker1", hang, timeout=0)

@pytest.mark.zrpc(timeout=0.5)
def test_torch_future(mesh):
    import torch
    with mesh.agent(0).as_current():
        torch.futures.wait_all([zrpc.rpc_async("worker1", hang, timeout=0)])

@pytest.mark.zrpc(timeout=1)  # for the start of the mesh, too
def test_swallow(mesh):
    mesh.shutdown()
    with contextlib.suppress(TimeoutError):
        threading.Event().wait()

@pytest.mark.zrpc(timeout=1)
def test_not_awaited(mesh):
    mesh.submit(1, end.wait, 20)

@pytest.fixture
def began():
    return time.monotonic()

@pytest.fixture
def slow(began, mesh):
    threading.Event().wait(began + 1.05 - time.monotonic())

@pytest.mark.zrpc(timeout=1)
def test_late(slow):  # on a busy machine the fixture is interrupted
    threading.Event().wait()

def test_after():
    end.set()
"""
    )
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"] + outcomes["errors"]) == (3, 6)
    lines = ["*ERROR at teardown of test_swallow*", "E *MeshTimeout: *"]
    lines += ["*ERROR at teardown of test_not_awaited*", "E *worker1 (a thread) runs Event.wait"]
    result.stdout.fnmatch_lines(lines)
    result.stdout.fnmatch_lines(["E *MeshTimeout: *", "E *in test_event"])
    result.stdout.fnmatch_lines(["*in rpc_sync", "E *---- stacks of worker1*", "E *in hang"])


def test_a_hang_that_nothing_interrupts_ends_the_session(pytester: pytest.Pytester) -> None:
    """The main thread is in C code that no signal ends: a torch future that nothing completes."""
    pytester.makepyfile(
        """
        import pytest
        from zrpc.testing import watchdog
        watchdog._LAST_RESORT_SECONDS = 0.5

        @pytest.mark.zrpc(timeout=0.5)
        def test_stuck(mesh):
            import torch
            torch._C.Future([]).wait()
        """
    )
    result = run_warm(pytester)
    assert result.ret == 3
    result.stderr.fnmatch_lines(
        ["*::test_stuck: not finished within 0.5 s*", "*in test_stuck", "*ending the session*"]
    )


def test_a_leak_is_an_error(run_tests: RunTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zrpc.testing.leaks._WAIT_SECONDS", 0.1)
    result = run_tests(
        """
def leave():
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    kept = socket.socket(socket.AF_UNIX)
    path = os.environ["ZRPC_RUNTIME_DIR"] + "/left"
    kept.bind(path)
    return end, thread, process, kept

@pytest.fixture(scope="module")
def kept():
    kept = []
    yield kept
    for end, thread, process, left in kept:
        end.set()
        thread.join()
        process.communicate()
        left.close()

def test_with_mesh(kept, mesh):
    kept.append(mesh.run(0, leave))

@pytest.mark.usefixtures("kept", "no_leaks")
def test_without_mesh(kept):
    kept.append(leave())

@pytest.mark.zrpc(leaks=False)
def test_leaks_are_allowed(kept, mesh):
    os.environ["ZRPC_RUNTIME_DIR"] = os.getcwd()
    kept.append(mesh.run(0, leave))
    del os.environ["ZRPC_RUNTIME_DIR"]
"""
    )
    result.assert_outcomes(passed=3, errors=2)
    _, with_mesh, without_mesh = re.split("ERROR at teardown of", result.stdout.str())
    for name, report in (("with_mesh", with_mesh), ("without_mesh", without_mesh)):
        assert report.startswith(f" test_{name} ___")
        for line in (
            r"thread forgotten \(a daemon\), in wait .*",
            r"process \d+: cat",
            r"descriptor \d+: pipe:.*",
            r"descriptor \d+: socket:.* bound to .*/left",
            "socket file /.*/left",
        ):
            assert re.search(f"^- {line}$", report, re.MULTILINE), line


def test_the_output_of_worker_processes_is_shown_at_once_if_it_is_not_captured(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.zrpc(processes=True)
        def test_print(mesh):
            mesh.run(1, print, "hello from afar", flush=True)
            assert False
        """
    )
    result = run_warm(pytester, "--capture=no")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*hello from afar*", "*= FAILURES =*"])


def test_a_rerun_test_starts_from_scratch(pytester: pytest.Pytester, run_tests: RunTests) -> None:
    """Some plugins rerun failed tests."""
    pytester.makeconftest(
        """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    runtestprotocol(item, log=False, nextitem=nextitem)
    item._initrequest()
    runtestprotocol(item, nextitem=nextitem)
    return True
"""
    )
    result = run_tests(
        """
tries = []

def test_fails_then_leaks(mesh):
    tries.append(os.open(__file__, os.O_RDONLY))
    assert len(tries) == 2

def teardown_module():
    os.close(tries[-1])
"""
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["left behind:", "- descriptor *.py"])


def test_an_interrupted_test_ends_at_once(run_tests: RunTests) -> None:
    """After Ctrl-C and `pytest.exit` there is no report that says that the test has failed."""
    result = run_tests(
        """
import zrpc

@pytest.mark.zrpc(processes=True, timeout=3)
def test_interrupted(mesh):
    mesh.submit(0, zrpc.rpc_sync, "worker1", time.sleep, args=(20,))
    pytest.exit("enough")
"""
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*Exit: enough*"])
    assert "MeshTimeout" not in result.stdout.str() + result.stderr.str()


def test_a_debugger_has_no_deadline(
    run_tests: RunTests, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the test enters the debugger, or pytest does after a failure."""
    reports: list[str] = []
    monkeypatch.setattr("zrpc.testing.plugin._exit", lambda item, report: reports.append(report))
    monkeypatch.setattr("zrpc.testing.watchdog._LAST_RESORT_SECONDS", 0.2)
    monkeypatch.setattr("zrpc.testing.watchdog._INTERRUPT_SECONDS", 0.1)
    pytester.syspathinsert()
    pytester.makepyfile(
        patient="""
import pdb, threading

def outlive_the_deadline(*args, **kwargs):
    for thread in threading.enumerate():
        if thread.name == "zrpc-watchdog":
            thread.join()

class Patient(pdb.Pdb):
    set_trace = interaction = outlive_the_deadline
"""
    )
    result = run_tests(
        """
@pytest.mark.zrpc(timeout=0.5)
def test_breakpoint(mesh):
    pytest.set_trace()
    assert mesh.run("worker0", max, 1, 2) == 2

@pytest.mark.zrpc(timeout=0.5)
def test_post_mortem(mesh):
    assert mesh.run("worker0", max, 1, 2) == 1
""",
        "--pdb",
        "--pdbcls=patient:Patient",
    )
    result.assert_outcomes(passed=1, failed=1)
    assert "MeshTimeout" not in result.stdout.str()
    assert reports == []
