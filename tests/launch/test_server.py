"""The server that starts processes: what it shares with them, and how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.launch.conftest import DEADLINE, Launched, Write, outcome
from tests.support.waiting import until
from zrpc.launch import LaunchError, ServerDied, Starter, Task, starter
from zrpc.launch.channel import Channel

Serve = Callable[..., Starter]


@pytest.fixture
def serve(tmp_path: Path, marked: Any) -> Serve:
    """Makes a fork server that preloads modules, some of them from the test's own directory."""

    def serve(*preload: str, **variables: str) -> Starter:
        env = {**marked.env, "PYTHONPATH": str(tmp_path / "lib"), **variables}
        return Starter(preload=preload, env=env)

    return serve


def test_sixteen_children_share_one_import(write: Write, tmp_path: Path, serve: Serve) -> None:
    """Without the garbage collector, and without a module that can't be imported."""
    write(
        """
        import gc, os
        enabled = gc.isenabled()
        with open(os.environ["IMPORTS"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        """,
        "lib/heavy.py",
    )
    script = write("""
        import gc, heavy, os, sys
        assert os.getppid() == int(sys.argv[1]) and gc.isenabled() and not heavy.enabled
    """)
    imports = tmp_path / "imports"
    with serve("no_such_module", "heavy", IMPORTS=str(imports)) as server:
        pids = [server.spawn(Task.script(script, [str(server.pid)])) for _ in range(16)]
        assert [server.wait(pid, DEADLINE) for pid in pids] == [0] * 16
        assert imports.read_text() == f"{server.pid}\n"


def test_torch_is_preloaded_and_random_numbers_differ(write: Write, serve: Serve) -> None:
    script = write("""
        import sys
        assert "torch" in sys.modules
        import numpy, random, torch
        print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())
    """)
    numbers: list[str] = []
    with serve("torch", "numpy.random") as server:
        for _ in range(3):
            code, output = outcome(server, Task.script(script))
            # Safe to fork: numpy's OpenBLAS ends its threads just before each fork.
            assert os.listdir(f"/proc/{server.pid}/task") == [str(server.pid)]
            assert code == 0, output
            numbers += output.split()
    assert len(set(numbers)) == len(numbers) == 12


def test_thread_of_a_preloaded_module_makes_each_child_a_new_interpreter(
    write: Write, serve: Serve
) -> None:
    source = "import _thread, time; _thread.start_new_thread(time.sleep, (999,))"
    write(source, "lib/preloaded.py")
    script = write("import sys; sys.exit('colorsys' in sys.modules)")
    with serve("preloaded", "colorsys") as server:
        assert "threads in each interpreter (1 without a name)" in server.note
        assert server.wait(server.spawn(Task.script(script)), DEADLINE) == 0


_ACCELERATOR = """
    import os, sys
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    server = os.getpid()
    class Module:
        def _is_in_bad_fork(self):
            return used and os.getpid() != server
        def _unused(self, *_): ...
        is_available = current_device = device_count = _unused
    _setup_privateuseone_for_python_backend("gpu", Module())
    used = False
"""


@pytest.mark.parametrize("used", [False, True])
def test_a_server_that_has_used_the_accelerator_is_not_forked(
    write: Write, serve: Serve, used: bool
) -> None:
    """An accelerator that a process has used can't be used in the children it forks: as CUDA."""
    write(dedent(_ACCELERATOR), "lib/accelerator.py")
    write(f"import accelerator; accelerator.used = {used}", "lib/model.py")
    script = write("import sys; sys.exit('accelerator' in sys.modules)")
    with serve("accelerator", "model") as server:
        assert ("something uses gpu while modules are imported" in server.note) is used
        assert server.wait(server.spawn(Task.script(script)), DEADLINE) == int(not used)


def test_a_start_may_fail_and_has_a_timeout(
    write: Write, serve: Serve, marked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "_REPLY_SECONDS", 0.5)
    write("import time; time.sleep(1000)", "lib/slow.py")
    with pytest.raises(LaunchError, match="did not answer within"):
        serve("slow").start()
    assert not marked.pids()
    for executable, error in (
        ("/bin/false", "has exited; was it killed"),
        ("/no/such/python", "could not start the fork server"),
    ):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(LaunchError, match=error):
            Starter().start()


def test_many_unread_exits_do_not_block_the_server(serve: Serve, marked: Any) -> None:
    with serve() as server:
        pids = {server.spawn(Task.function("os:_exit", 0)) for _ in range(400)}
        until(lambda: len(marked.pids()) == 1, "all children have ended")
        assert server.send_signal(min(pids), signal.SIGTERM) is False  # it still answers
        found: set[int] = set()
        while found != pids:
            exits = server.exits(timeout=DEADLINE)
            assert exits
            found.update(each.pid for each in exits)


@pytest.mark.parametrize("interrupted_by", ["timeout", "ctrl-c"])
def test_no_reply_is_taken_for_that_to_another_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, interrupted_by: str
) -> None:
    """A request whose reply does not come in time, or past an interrupt, is the last one."""

    def receive(channel: Channel) -> None:
        monkeypatch.undo()
        if interrupted_by == "timeout":
            raise TimeoutError
        signal.raise_signal(signal.SIGINT)

    with serve() as server:
        monkeypatch.setattr(Channel, "receive", receive)
        with pytest.raises((LaunchError, KeyboardInterrupt)):
            server.spawn(Task.function("time:sleep", 1000))
        assert server.broken
        with pytest.raises(LaunchError, match="as a request to it was broken off"):
            server.make_directory()


def test_module_beside_the_script_is_preferred(write: Write, serve: Serve) -> None:
    write("", "lib/heavy.py")  # it may also be the preloaded one
    write("mine = True", "queue.py")
    same = write("import sys; sys.exit('heavy' not in sys.modules)", "lib/same.py")
    shown = "queue.mine, os.getppid() == int(sys.argv[1]), sys.argv[2]"
    other = write(f"import os, queue, sys; print({shown})", "other.py")
    with serve("queue", "heavy") as server:
        tasks = [Task.script(script, [str(server.pid), "last"]) for script in (same, other)]
        assert outcome(server, tasks[0]) == (0, "")
        code, output = outcome(server, tasks[1])
    assert code == 0, output
    assert "queue beside the program hides a preloaded module" in output
    assert output.endswith("\nTrue True last\n")


def test_a_fresh_interpreter_starts_if_the_owner_has_removed_its_directory(marked: Any) -> None:
    with Starter("spawn", env=marked.env) as server:
        os.rmdir(server.make_directory())
        assert server.wait(server.spawn(Task.function("builtins:int", 0)), DEADLINE) == 0


def test_children_die_with_the_server(serve: Serve, marked: Any) -> None:
    with serve() as server:
        server.spawn(Task.function("time:sleep", 1000))
        path = server.make_directory()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerDied, match="has exited; was it killed"):
            server.exits(timeout=DEADLINE)
        with pytest.raises(ServerDied):
            server.spawn(Task.function("time:sleep", 1000))
        until(lambda: not marked.pids(), "the child is dead")
    assert not os.path.exists(path)


def test_server_shows_no_traceback_if_its_owner_exits_during_the_imports(
    write: Write, tmp_path: Path, marked: Any
) -> None:
    """Nor does it live on: the fixture `marked` fails if it does."""
    write(
        """
        import os, select
        owner = os.pidfd_open(os.getppid())
        print("importing", flush=True)
        select.select([owner], [], [])
        """,
        "patient.py",
    )
    owner = "from zrpc.launch import Starter; Starter(preload=['patient']).start()"
    env = {**marked.env, "PYTHONPATH": str(tmp_path)}
    launched = Launched([sys.executable, "-c", owner], env)
    launched.read_until("importing\n")
    assert launched.stop(signal.SIGKILL) == (-signal.SIGKILL, "importing\n", "")


def test_impossible_requests_are_refused(write: Write, serve: Serve) -> None:
    write("import os; os.dup2(0, 99)", "lib/opens.py")
    reading, writing = os.pipe()
    taken = os.dup2(reading, 99)
    try:
        with serve("opens") as server:
            with pytest.raises(LaunchError, match=r"descriptor 99 .* os\.dup"):
                server.spawn(Task.function("os:getpid"), pass_fds=[taken])
            with pytest.raises(LaunchError, match="'/no/such'"):
                server.spawn(Task.function("os:getpid").within(cwd="/no/such"))
            assert server.wait(server.spawn(Task.function("builtins:int", 0)), DEADLINE) == 0
    finally:
        for fd in (reading, writing, taken):
            os.close(fd)


def test_no_child_shares_multiprocessing_state(write: Write, tmp_path: Path, serve: Serve) -> None:
    write("""
        import multiprocessing as mp
        def f(): pass
        if __name__ == "__main__":
            process = mp.get_context("spawn").Process(target=f)
            process.start()
            process.join()
            print(process.exitcode, bytes(mp.current_process().authkey).hex())
    """)
    # A relative path, in a directory that isn't the server's.
    task = Task.script("script.py").within(cwd=str(tmp_path))
    with serve("multiprocessing.process") as server:
        (_, first), (_, second) = [outcome(server, task) for _ in range(2)]
    assert first.startswith("0 ")
    assert second.startswith("0 ")
    assert first != second


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_the_server_ends_without_an_error_if_there_is_no_proc(write: Write, marked: Any) -> None:
    """Not mounted, or without the file that lists the children, which kernels may lack."""
    script = write("""
        from zrpc.launch import Starter, Task
        with Starter(preload=()) as starter:
            starter.spawn(Task.function("time:sleep", 1000))
    """)
    command = f"mount -t tmpfs none /proc || exit 77; exec {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], env=marked.env, capture_output=True, text=True
    )
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip(f"no mount namespace: {done.stderr}")
    assert (done.returncode, done.stderr) == (0, "")
