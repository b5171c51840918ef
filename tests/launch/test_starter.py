"""Behaviour that the fork server and its substitute share."""

from __future__ import annotations

import json
import os
import selectors
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zrpc.launch import LaunchError, Starter, Task
from zrpc.launch.starter import start_method

DEADLINE = 30.0
Write = Callable[..., str]


def run(starter: Starter, task: Task, tmp_path: Path, **options: Any) -> tuple[int, str]:
    with open(tmp_path / "output", "w+b") as file:
        pid = starter.spawn(task, stdout=file.fileno(), stderr=file.fileno(), **options)
        code = starter.wait(pid, DEADLINE)
        file.seek(0)
        return code, file.read().decode()


@pytest.mark.parametrize(
    ("source", "code"),
    [("", 0), ("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_exit_code_is_as_in_subprocess(
    starter: Starter, write: Write, source: str, code: int
) -> None:
    pid = starter.spawn(Task.script(write(source)))
    assert starter.wait(pid, DEADLINE) == code


def test_function_gets_its_arguments_and_returns_the_exit_code(starter: Starter) -> None:
    pid = starter.spawn(Task.function("builtins:int", "101", base=2))
    assert starter.wait(pid, DEADLINE) == 5


def test_function_can_be_an_attribute_of_a_class(starter: Starter) -> None:
    pid = starter.spawn(Task.function("builtins:int.bit_length", 7))
    assert starter.wait(pid, DEADLINE) == 3


def test_function_must_be_given_with_its_module() -> None:
    with pytest.raises(ValueError, match="module:qualname"):
        Task.function("print")


def test_task_environment_replaces_the_servers(
    starter: Starter, write: Write, tmp_path: Path
) -> None:
    script = write(
        """
        import json, os, sys
        print(json.dumps([os.getcwd(), dict(os.environ), sys.path, sys.argv]))
        """
    )
    (tmp_path / "there").mkdir()
    path = ["/nowhere", *[entry for entry in os.sys.path if entry]]  # type: ignore[attr-defined]
    task = Task.script(script, ["a", "--b"]).within(
        cwd=str(tmp_path / "there"), env={"ONLY": "ün"}, sys_path=path
    )
    code, output = run(starter, task, tmp_path)
    assert code == 0, output
    cwd, env, sys_path, argv = json.loads(output)
    assert cwd == str(tmp_path / "there")
    assert {key: value for key, value in env.items() if key != "LC_CTYPE"} == {"ONLY": "ün"}
    assert sys_path == [str(tmp_path), *path]
    assert argv == [script, "a", "--b"]


def test_process_uses_the_given_streams(starter: Starter, write: Write, tmp_path: Path) -> None:
    script = write("import sys; print(sys.stdin.read().upper()); print('err', file=sys.stderr)")
    source, out, err = tmp_path / "in", tmp_path / "out", tmp_path / "err"
    source.write_text("hello")
    with open(source) as stdin, open(out, "w") as stdout, open(err, "w") as stderr:
        fds = {"stdin": stdin.fileno(), "stdout": stdout.fileno(), "stderr": stderr.fileno()}
        assert starter.wait(starter.spawn(Task.script(script), **fds), DEADLINE) == 0
    assert (out.read_text(), err.read_text()) == ("HELLO\n", "err\n")


def test_standard_input_is_empty_by_default(starter: Starter, write: Write, tmp_path: Path) -> None:
    script = write("import sys; print(repr(sys.stdin.read()))")
    assert run(starter, Task.script(script), tmp_path) == (0, "''\n")


def test_only_descriptors_passed_on_are_open(
    starter: Starter, write: Write, tmp_path: Path
) -> None:
    script = write(
        """
        import os
        fds = {int(fd) for fd in os.listdir("/proc/self/fd")}
        print(sorted(fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")))
        """
    )
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)  # must not leak, although inheritable
    passed = os.dup2(writing, 77)
    try:
        code, output = run(starter, Task.script(script), tmp_path, pass_fds=[passed])
    finally:
        for fd in (reading, writing, passed):
            os.close(fd)
    assert (code, output) == (0, "[0, 1, 2, 77]\n")


def test_descriptor_passed_on_works(starter: Starter, write: Write, tmp_path: Path) -> None:
    script = write("import os, sys; os.write(int(sys.argv[1]), b'through')")
    reading, writing = os.pipe()
    try:
        run(starter, Task.script(script, [str(writing)]), tmp_path, pass_fds=[writing])
        assert os.read(reading, 100) == b"through"
    finally:
        os.close(reading)
        os.close(writing)


def test_exits_can_be_awaited_in_a_selector(starter: Starter) -> None:
    pids = {starter.spawn(Task.function("builtins:int", code)): code for code in (1, 2)}
    found = {}
    with selectors.DefaultSelector() as selector:
        selector.register(starter, selectors.EVENT_READ)
        while len(found) < 2:
            assert selector.select(DEADLINE)
            found.update({each.pid: each.returncode for each in starter.exits()})
    assert found == pids


def test_waiting_for_one_keeps_the_exit_of_another(starter: Starter) -> None:
    first = starter.spawn(Task.function("builtins:int", 1))
    second = starter.spawn(Task.function("builtins:int", 2))
    codes = starter.wait(second, DEADLINE), starter.wait(first, DEADLINE)
    assert codes == (2, 1)


def test_wait_has_a_timeout(starter: Starter) -> None:
    pid = starter.spawn(Task.function("time:sleep", 1000))
    with pytest.raises(TimeoutError, match="is still running after"):
        starter.wait(pid, 0.01)


def test_signals_reach_only_a_running_process(starter: Starter) -> None:
    pid = starter.spawn(Task.function("time:sleep", 1000))
    assert starter.send_signal(pid, signal.SIGKILL)
    assert starter.wait(pid, DEADLINE) == -signal.SIGKILL
    assert not starter.send_signal(pid, signal.SIGKILL)


def test_group_can_be_signalled_right_after_the_start(starter: Starter) -> None:
    pids = [starter.spawn(Task.function("time:sleep", 1000)) for _ in range(5)]
    for pid in pids:
        assert starter.send_signal(pid, signal.SIGTERM, group=True)
        assert starter.wait(pid, DEADLINE) == -signal.SIGTERM


def test_process_leads_its_own_session(starter: Starter, write: Write, tmp_path: Path) -> None:
    script = write("import os; print(os.getsid(0) == os.getpgid(0) == os.getpid())")
    assert run(starter, Task.script(script), tmp_path) == (0, "True\n")


def test_signal_state_is_that_of_a_fresh_interpreter(
    starter: Starter, write: Write, tmp_path: Path
) -> None:
    script = write(
        """
        import signal
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        print({signal.getsignal(n).name for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)})
        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.set_wakeup_fd(-1))
        """
    )
    assert run(starter, Task.script(script), tmp_path) == (0, "True\n{'SIG_DFL'}\nset() -1\n")


def test_closing_kills_processes_and_what_they_started(
    starter: Starter, write: Write, tmp_path: Path
) -> None:
    # The fixture `marked` fails if a process is left.
    script = write(
        """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "input('started')"], stdin=-1)
        time.sleep(1000)
        """
    )
    reading, writing = os.pipe()
    starter.spawn(Task.script(script), stdout=writing)
    os.close(writing)
    assert os.read(reading, 7) == b"started"
    starter.close()
    assert os.read(reading, 1) == b""  # no process has the other end open
    os.close(reading)


def test_directory_is_private_and_short_and_removed_at_the_end(starter: Starter) -> None:
    path = starter.make_directory()
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert len(path) < 64
    Path(path, "socket").touch()
    starter.close()
    assert not os.path.exists(path)


def test_starter_can_be_closed_twice_but_not_used_afterwards(starter: Starter) -> None:
    starter.close()
    starter.close()
    with pytest.raises(LaunchError, match="with statement"):
        starter.spawn(Task.script("x.py"))
    with pytest.raises(LaunchError, match="with statement"):
        starter.exits()


def test_this_process_keeps_its_descriptors(starter: Starter) -> None:
    starter.wait(starter.spawn(Task.function("builtins:int", 0)), DEADLINE)
    before = sorted(os.listdir("/proc/self/fd"))
    starter.wait(starter.spawn(Task.function("builtins:int", 0)), DEADLINE)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.system
def test_closing_leaves_no_descriptor_open(marked: Any) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for method in ("fork", "spawn"):
        with Starter(method, preload=(), env=marked.env) as starter:
            starter.wait(starter.spawn(Task.function("builtins:int", 0)), DEADLINE)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_start_method_comes_from_the_argument_then_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ZRPC_START_METHOD", raising=False)
    assert start_method() == "fork"
    monkeypatch.setenv("ZRPC_START_METHOD", "spawn")
    assert start_method() == "spawn"
    assert start_method("fork") == "fork"
    with pytest.raises(ValueError, match="but got 'thread'"):
        start_method("thread")
