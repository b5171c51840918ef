"""Behaviour that only the fork server has."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from zrpc.launch import LaunchError, ServerDied, Starter, Task, server, starter
from zrpc.launch.channel import Channel

DEADLINE = 30.0
Write = Callable[..., str]
Until = Callable[..., Any]


def with_path(env: Any, directory: Path) -> dict[str, str]:
    """Returns an environment in which a directory comes first on ``sys.path``."""
    return {**env, "PYTHONPATH": str(directory)}


def test_sixteen_children_share_one_import(write: Write, tmp_path: Path, marked: Any) -> None:
    write(
        """
        import os
        with open(os.environ["IMPORTS"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        """,
        "lib/heavy.py",
    )
    script = write("import heavy, os, sys; sys.exit(0 if os.getppid() == int(sys.argv[1]) else 1)")
    imports = tmp_path / "imports"
    env = {**marked.env, "IMPORTS": str(imports)}
    with Starter(preload=["heavy"], env=with_path(env, tmp_path / "lib")) as server:
        pids = [server.spawn(Task.script(script, [str(server.pid)])) for _ in range(16)]
        assert [server.wait(pid, DEADLINE) for pid in pids] == [0] * 16
        assert imports.read_text() == f"{server.pid}\n"


def test_the_collector_rests_during_the_imports_only(
    write: Write, tmp_path: Path, marked: Any
) -> None:
    write("import gc; enabled = gc.isenabled()", "lib/heavy.py")
    script = write("import gc, heavy; assert gc.isenabled() and not heavy.enabled")
    with Starter(preload=["heavy"], env=with_path(marked.env, tmp_path / "lib")) as server:
        assert server.wait(server.spawn(Task.script(script)), DEADLINE) == 0


def test_torch_is_preloaded_and_random_numbers_differ(
    write: Write, tmp_path: Path, marked: Any
) -> None:
    script = write(
        """
        import sys
        assert "torch" in sys.modules
        import numpy, random, torch
        print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())
        """
    )
    with (
        Starter(preload=["torch", "numpy.random"], env=marked.env) as server,
        open(tmp_path / "out", "w") as out,
    ):
        for _ in range(3):
            pid = server.spawn(Task.script(script), stdout=out.fileno())
            # Safe to fork: numpy's OpenBLAS ends its threads just before each fork.
            assert os.listdir(f"/proc/{server.pid}/task") == [str(server.pid)]
            assert server.wait(pid, DEADLINE) == 0
    numbers = (tmp_path / "out").read_text().split()
    assert len(set(numbers)) == len(numbers) == 12


def test_module_that_cannot_be_imported_is_not_preloaded(write: Write, marked: Any) -> None:
    code = "import sys; sys.exit('colorsys' not in sys.modules)"
    with Starter(preload=["no_such_module", "colorsys"], env=marked.env) as server:
        assert server.wait(server.spawn(Task.script(write(code))), DEADLINE) == 0


STARTS_THREADS = {
    "named": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=[999], name='tracer', daemon=True).start()",
    "without a name": "import _thread, time\n_thread.start_new_thread(time.sleep, (999,))",
}


@pytest.mark.parametrize("where", ["sitecustomize.py", "preloaded.py"])
@pytest.mark.parametrize("kind", STARTS_THREADS)
def test_thread_of_a_tool_makes_each_child_a_new_interpreter(
    write: Write, tmp_path: Path, marked: Any, kind: str, where: str
) -> None:
    write(STARTS_THREADS[kind], f"lib/{where}")
    script = write("import sys; print(sys.argv[1:], 'colorsys' in sys.modules, sys.stdin.read())")
    output = tmp_path / "output"
    (tmp_path / "input").write_text("typed")
    env = with_path(marked.env, tmp_path / "lib")
    with Starter(preload=["preloaded", "colorsys"], env=env) as server:
        assert server.threads == [{"named": "tracer"}.get(kind, "1 without a name")]
        assert server.threads[0] in server.note
        with output.open("w") as out, (tmp_path / "input").open() as file:
            fds = {"stdin": file.fileno(), "stdout": out.fileno()}
            pid = server.spawn(Task.script(script, ["a"]).within(env=env), **fds)
            assert server.wait(pid, DEADLINE) == 0
        assert output.read_text() == "['a'] False typed\n"
        sleeping = server.spawn(Task.function("time:sleep", 1000))
        assert server.send_signal(sleeping, signal.SIGTERM, group=True)
        assert server.wait(sleeping, DEADLINE) == -signal.SIGTERM


def test_new_interpreter_gets_descriptors_under_their_own_numbers(
    write: Write, tmp_path: Path, marked: Any
) -> None:
    write(STARTS_THREADS["named"], "lib/sitecustomize.py")
    pairs = [os.pipe() for _ in range(3)]
    # Each has a number that another one may have had on its way.
    targets = [fcntl.fcntl(pair[1], fcntl.F_DUPFD, 70) for pair in pairs]
    script = write("import os, sys\nfor fd in sys.argv[1:]: os.write(int(fd), fd.encode())")
    with Starter(preload=(), env=with_path(marked.env, tmp_path / "lib")) as server:
        task = Task.script(script, [str(fd) for fd in targets])
        assert server.wait(server.spawn(task, pass_fds=targets), DEADLINE) == 0
    assert [os.read(pair[0], 9) for pair in pairs] == [str(fd).encode() for fd in targets]
    for fd in (*targets, *(fd for pair in pairs for fd in pair)):
        os.close(fd)


def test_start_has_a_timeout(
    write: Write, tmp_path: Path, marked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "_REPLY_SECONDS", 0.5)
    write("import time; time.sleep(1000)", "slow.py")
    server = Starter(preload=["slow"], env=with_path(marked.env, tmp_path))
    with pytest.raises(LaunchError, match="did not answer within"):
        server.start()
    assert not marked.pids()


def test_interpreter_that_exits_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ServerDied):
        Starter().start()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(LaunchError, match="could not start the fork server"):
        Starter().start()


def test_many_unread_exits_do_not_block_the_server(marked: Any, until: Until) -> None:
    with Starter(preload=[], env=marked.env) as server:
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
    marked: Any, monkeypatch: pytest.MonkeyPatch, interrupted_by: str
) -> None:
    """A request whose reply does not come in time, or past an interrupt, is the last one."""

    def receive(channel: Channel) -> None:
        monkeypatch.undo()
        if interrupted_by == "timeout":
            raise TimeoutError
        signal.raise_signal(signal.SIGINT)

    with Starter(preload=(), env=marked.env) as server:
        monkeypatch.setattr(Channel, "receive", receive)
        with pytest.raises((LaunchError, KeyboardInterrupt)):
            server.spawn(Task.function("time:sleep", 1000))
        assert server.broken
        with pytest.raises(LaunchError, match="as a request to it was broken off"):
            server.make_directory()


def test_module_beside_the_script_wins_over_a_preloaded_one(
    write: Write, tmp_path: Path, marked: Any
) -> None:
    write("mine = True", "queue.py")
    script = write(
        "import os, queue, sys; print(queue.mine, os.getppid() == int(sys.argv[1]), sys.argv[2])"
    )
    with (
        Starter(preload=["queue", "json"], env=marked.env) as server,
        open(tmp_path / "out", "w") as out,
    ):
        task = Task.script(script, [str(server.pid), "last"])
        pid = server.spawn(task, stdout=out.fileno(), stderr=out.fileno())
        assert server.wait(pid, DEADLINE) == 0
    *notice, line = (tmp_path / "out").read_text().splitlines()
    assert line == "True True last"
    assert len(notice) == 1
    assert "queue beside the program hides a preloaded module" in notice[0]


def test_module_beside_the_script_may_be_the_preloaded_one(
    write: Write, tmp_path: Path, marked: Any
) -> None:
    write("", "heavy.py")
    script = write("import sys; sys.exit(0 if 'heavy' in sys.modules else 1)")
    with Starter(preload=["heavy"], env=with_path(marked.env, tmp_path)) as server:
        assert server.wait(server.spawn(Task.script(script)), DEADLINE) == 0


def test_children_die_with_the_server(marked: Any, until: Until) -> None:
    with Starter(preload=[], env=marked.env) as server:
        server.spawn(Task.function("time:sleep", 1000))
        path = server.make_directory()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerDied, match="has exited; was it killed"):
            server.exits(timeout=DEADLINE)
        with pytest.raises(ServerDied):
            server.spawn(Task.function("time:sleep", 1000))
        until(lambda: not marked.pids(), "the child is dead")
    assert not os.path.exists(path)


def test_all_processes_die_with_the_owner(write: Write, marked: Any, until: Until) -> None:
    child = write(
        """
        import signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        command = [sys.executable, "-c", "input('started\\\\n')"]
        # Not run(), which would close the pipe: the process ends when nobody holds it.
        subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True).wait()
        """,
        "child.py",
    )
    owner = write(
        f"""
        import time
        from zrpc.launch import Starter, Task
        with Starter(preload=[]) as server:
            print(server.make_directory(), flush=True)
            server.spawn(Task.script({child!r}))
            time.sleep(1000)
        """,
        "owner.py",
    )
    with subprocess.Popen(
        [sys.executable, owner], stdout=subprocess.PIPE, env=marked.env, text=True
    ) as process:
        assert process.stdout is not None
        try:
            directory = process.stdout.readline().strip()
            assert process.stdout.readline() == "started\n"
            assert len(marked.pids()) == 4
            assert os.path.isdir(directory)
        finally:
            process.kill()  # else the end of this block would wait for it
    until(lambda: not marked.pids(), "all processes are gone")
    assert not os.path.exists(directory)


def test_server_shows_no_traceback_if_its_owner_exits_during_the_imports(
    write: Write, tmp_path: Path, marked: Any, until: Until
) -> None:
    write(
        """
        import os, select
        owner = os.pidfd_open(os.getppid())
        print("importing", flush=True)
        select.select([owner], [], [])
        """,
        "patient.py",
    )
    owner = write(
        """
        from zrpc.launch import Starter
        Starter(preload=["patient"]).start()
        """,
        "owner.py",
    )
    with (
        open(tmp_path / "errors", "w") as errors,
        subprocess.Popen(
            [sys.executable, owner],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=with_path(marked.env, tmp_path),
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "importing\n"
        finally:
            process.kill()
    until(lambda: not marked.pids(), "the server is gone")
    assert (tmp_path / "errors").read_text() == ""


def test_closing_kills_orphans_of_children(write: Write, marked: Any) -> None:
    script = write(
        """
        import subprocess, sys
        command = [sys.executable, "-c", "input('started\\\\n')"]
        child = subprocess.Popen(command, stdin=-1, stdout=-1, start_new_session=True)
        child.stdout.readline()
        child.stdin.detach()  # so that it reads on
        """
    )
    with Starter(preload=[], env=marked.env) as server:
        assert server.wait(server.spawn(Task.script(script)), DEADLINE) == 0


def test_descriptor_number_that_the_server_uses_is_refused(
    write: Write, tmp_path: Path, marked: Any
) -> None:
    write("import os; os.dup2(0, 99)", "opens.py")
    reading, writing = os.pipe()
    taken = os.dup2(reading, 99)
    try:
        with Starter(preload=["opens"], env=with_path(marked.env, tmp_path)) as server:
            with pytest.raises(LaunchError, match=r"descriptor 99 .* os\.dup"):
                server.spawn(Task.function("os:getpid"), pass_fds=[taken])
            assert server.wait(server.spawn(Task.function("builtins:int", 0)), DEADLINE) == 0
    finally:
        for fd in (reading, writing, taken):
            os.close(fd)


def test_missing_working_directory_is_refused(marked: Any) -> None:
    with (
        Starter(preload=[], env=marked.env) as server,
        pytest.raises(LaunchError, match="'/no/such'"),
    ):
        server.spawn(Task.function("os:getpid").within(cwd="/no/such"))


def test_each_child_has_its_own_multiprocessing_state(
    write: Write, tmp_path: Path, marked: Any
) -> None:
    write(
        """
        import multiprocessing as mp
        def f(): pass
        if __name__ == "__main__":
            process = mp.get_context("spawn").Process(target=f)
            process.start()
            process.join()
            print(process.exitcode, bytes(mp.current_process().authkey).hex())
        """
    )
    with (
        Starter(preload=["multiprocessing.process"], env=marked.env) as server,
        open(tmp_path / "out", "w") as out,
    ):
        for _ in range(2):
            # A relative path, in a directory that isn't the server's.
            task = Task.script("script.py").within(cwd=str(tmp_path))
            assert server.wait(server.spawn(task, stdout=out.fileno()), DEADLINE) == 0
    first, second = (tmp_path / "out").read_text().splitlines()
    assert first.startswith("0 ")
    assert second.startswith("0 ")
    assert first != second


def test_the_server_ends_without_an_error_if_there_is_no_proc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not mounted, or without the file that lists the children, which kernels may lack."""

    def open_none(path: str) -> NoReturn:
        raise FileNotFoundError(path)

    monkeypatch.setattr(server, "open", open_none, raising=False)
    assert server._children() == []
