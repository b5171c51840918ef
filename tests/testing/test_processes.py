import os
import signal
import subprocess
import sys
import threading

import pytest

import zrpc
from zrpc.testing import LeakError, MeshTimeout, WorkerExited, WorkerFailed, local_mesh

pytestmark = pytest.mark.zrpc(processes=True)


class Failure(Exception):
    pass


class Unsendable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def my_name():
    return zrpc.get_worker_info().name


def wait_for_ever():
    threading.Event().wait()


@pytest.mark.zrpc(workers=4)
def test_each_worker_is_a_process(mesh):
    pids = mesh.run_all(os.getpid)
    assert pids == [mesh.pid(name) for name in mesh.names]
    assert len({os.getpid(), *pids}) == 5
    assert mesh.run_all(my_name) == ["worker0", "worker1", "worker2", "worker3"]


def test_workers_call_each_other(mesh):
    assert mesh.run(0, zrpc.rpc_sync, "worker1", os.getpid) == mesh.pid(1)
    assert mesh.run(0, zrpc.rpc_sync, "worker1", my_name) == "worker1"


def test_functions_run_in_the_main_thread(mesh):
    assert mesh.run(1, lambda: threading.current_thread() is threading.main_thread())


def test_surroundings_are_those_of_the_test(mesh, monkeypatch):
    assert mesh.run(0, os.getcwd) == os.getcwd()
    assert mesh.run(0, lambda: [p for p in sys.path if p]) == [os.path.abspath(p) for p in sys.path]


def test_closures_and_their_results(mesh):
    seen = [1, 2]
    assert mesh.run(0, lambda: [*seen, my_name()]) == [1, 2, "worker0"]


def test_classes_of_the_test_keep_their_identity(mesh):
    def fail():
        raise Failure("mine")

    with pytest.raises(Failure, match="mine") as info:
        mesh.run(1, fail)
    cause = str(info.value.__cause__)
    assert f"in worker1 (pid {mesh.pid(1)}):\nTraceback" in cause
    assert "in fail\n    raise Failure" in cause


def compare():
    found = {"a": 1}
    assert found == {"a": 2}


def test_assertions_tell_what_was_compared(mesh):
    """A function of a module that is imported by name there has assertions that say nothing."""
    with pytest.raises(AssertionError, match="'a': 1"):
        mesh.run(1, compare)


def test_an_exception_that_cannot_be_rebuilt(mesh):
    def fail():
        raise Unsendable(1, 2)

    with pytest.raises(WorkerFailed, match="Unsendable: 1 and 2"):
        mesh.run(0, fail)
    assert mesh.run(0, my_name) == "worker0"


def test_a_result_that_cannot_be_pickled(mesh):
    with pytest.raises(WorkerFailed, match="the result can't be pickled: <unlocked"):
        mesh.run(0, threading.Lock)
    assert mesh.run(0, my_name) == "worker0"


def test_a_killed_worker_fails_what_waits_for_it(mesh):
    waiting = mesh.submit(1, wait_for_ever)
    mesh.kill("worker1")
    for call in (waiting.result, lambda: mesh.run(1, my_name)):
        with pytest.raises(WorkerExited, match=r"worker1 \(pid \d+\) was killed by SIGKILL"):
            call()
    assert mesh.run(0, my_name) == "worker0"


@pytest.mark.zrpc(restarts=True)
@pytest.mark.parametrize(
    "elastic", [False, pytest.param(True, marks=pytest.mark.zrpc(elastic=True))]
)
def test_a_killed_worker_that_is_started_again(mesh, elastic):
    assert mesh.run(0, zrpc.rpc_sync, 1, os.getpid) == mesh.pid(1)
    with pytest.raises(RuntimeError, match=r"was not killed: expected mesh.kill\(1\) first"):
        mesh.restart(1)
    for incarnation in (1, 2):
        before = mesh.pid(1)
        mesh.kill(1)
        mesh.restart(1)
        assert mesh.pid(1) != before
        assert mesh.run(0, zrpc.rpc_sync, 1, os.getpid) == mesh.pid(1)
        assert mesh.run(1, zrpc.rpc_sync, 0, os.getpid) == mesh.pid(0)
        assert mesh.run(0, zrpc.get_worker_info, "worker1").incarnation == incarnation
    mesh.shutdown()  # gracefully: all are there


def test_restarts_have_to_be_asked_for(mesh):
    mesh.kill(1)
    with pytest.raises(RuntimeError, match="expected a mesh made with restarts=True"):
        mesh.restart(1)


def test_a_worker_that_exits(make_mesh):
    mesh = make_mesh()
    with pytest.raises(WorkerExited, match=r"worker0 \(pid \d+\) exited with status 3"):
        mesh.run(0, os._exit, 3)
    with pytest.raises(WorkerExited, match="exited with status 3"):
        mesh.shutdown()  # a worker is missing that nobody has killed


def test_a_call_of_exit_is_a_failure_and_no_end(mesh):
    with pytest.raises(SystemExit):
        mesh.run(0, sys.exit, 3)
    assert mesh.run(0, my_name) == "worker0"


def test_a_crash_says_where(make_mesh, pytestconfig):
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    mesh = make_mesh()
    with pytest.raises(WorkerExited, match="SIGSEGV"):
        mesh.run(0, crash)
    mesh.shutdown(graceful=False)
    if pytestconfig.getoption("capture") != "no":
        assert "in crash" in mesh.output(0)


def test_output_is_kept(make_mesh, pytestconfig):
    mesh = make_mesh()
    mesh.run(1, print, "to stdout", flush=True)
    mesh.run(1, lambda: print("to stderr", file=sys.stderr))
    if pytestconfig.getoption("capture") != "no":
        assert mesh.output(1) == "to stdout\nto stderr\n"
        assert mesh.output(0) == ""
        assert mesh.new_output() == [("worker1", "to stdout\nto stderr\n")]
        assert mesh.new_output() == []
    mesh.shutdown()
    if pytestconfig.getoption("capture") != "no":
        assert mesh.output(1) == "to stdout\nto stderr\n"


def test_no_agent_of_another_process(mesh):
    with pytest.raises(TypeError, match="expected a mesh of threads"):
        mesh.agent(0)


def test_what_a_worker_leaves_behind(make_mesh):
    def leave():
        sys.left = subprocess.Popen(["sleep", "1000"])
        sys.thread = threading.Thread(target=wait_for_ever, daemon=True, name="forgotten")
        sys.thread.start()
        return sys.left.pid

    mesh = make_mesh()
    pid = mesh.run(0, leave)
    mesh.run(1, os.pipe)
    with pytest.raises(LeakError) as info:
        mesh.shutdown()
    message = str(info.value)
    assert "thread forgotten (a daemon), in wait" in message
    assert message.count(f"worker0 (pid {mesh.pid(0)}): process {pid}: sleep 1000") == 1
    assert f"worker1 (pid {mesh.pid(1)}): descriptor" in message


@pytest.mark.zrpc(leaks=False)
def test_what_is_left_behind_is_not_looked_for_in_vain(mesh):
    """It would be waited for, for two seconds."""

    def refuse():
        from zrpc.testing.leaks import Resources

        def left_behind(self):
            raise AssertionError("nobody wants to know")

        Resources.left_behind = left_behind

    mesh.run_all(refuse)
    mesh.shutdown()


def test_a_worker_that_is_stopped_is_named(make_mesh):
    """A process that can't even write its stacks must not hold up the end."""

    def hang():
        with local_mesh(2, processes=True, timeout=1.5) as mesh:
            os.kill(mesh.pid(1), signal.SIGSTOP)
            mesh.run(1, my_name)

    with pytest.raises(MeshTimeout) as info:
        hang()
    assert "none within 1 s; state: T" in str(info.value)


@pytest.mark.usefixtures("no_leaks")
def test_a_hang_shows_all_stacks():
    def hang():
        with local_mesh(3, processes=True, timeout=1.5) as mesh:
            mesh.run(1, wait_for_ever)

    with pytest.raises(MeshTimeout, match=r"not finished within 1\.5 s") as info:
        hang()
    message = str(info.value)
    assert "worker1 (pid " in message
    assert "runs wait_for_ever" in message
    assert "in wait_for_ever" in message
    assert message.count("---- stacks of worker") == 3
    assert message.count("in recv_bytes") == 2  # the other workers, which wait for work
