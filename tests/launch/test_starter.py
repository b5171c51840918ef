"""What a starter promises, whether its processes are forked or new interpreters."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.launch.conftest import DEADLINE, Write, outcome
from zrpc.launch import LaunchError, Starter, Task
from zrpc.launch.starter import start_method


def test_function_gets_its_arguments_and_returns_the_exit_code(starter: Starter) -> None:
    first = starter.spawn(Task.function("builtins:int", "101", base=2))
    second = starter.spawn(Task.function("builtins:int.bit_length", 7))
    # The exit of the first is kept meanwhile.
    assert [starter.wait(pid, DEADLINE) for pid in (second, first)] == [3, 5]


def test_function_must_be_given_with_its_module() -> None:
    with pytest.raises(ValueError, match="module:qualname"):
        Task.function("print")


def test_environment_of_a_task_is_its_own(starter: Starter, write: Write, tmp_path: Path) -> None:
    script = write("""
        import json, os, sys
        print(json.dumps([os.getcwd(), dict(os.environ), sys.path, sys.argv]))
    """)
    (tmp_path / "there").mkdir()
    path = ["/nowhere", *[entry for entry in os.sys.path if entry]]  # type: ignore[attr-defined]
    task = Task.script(script, ["a", "--b"]).within(
        cwd=str(tmp_path / "there"), env={"ONLY": "ün"}, sys_path=path
    )
    code, output = outcome(starter, task)
    assert code == 0, output
    cwd, env, sys_path, argv = json.loads(output)
    assert cwd == str(tmp_path / "there")
    assert {key: value for key, value in env.items() if key != "LC_CTYPE"} == {"ONLY": "ün"}
    assert sys_path == [str(tmp_path), *path]
    assert argv == [script, "a", "--b"]


def test_process_uses_the_given_streams_and_by_default_has_no_input(
    starter: Starter, write: Write, tmp_path: Path
) -> None:
    script = write("import sys; print(repr(sys.stdin.read())); print('err', file=sys.stderr)")
    code, output = outcome(starter, Task.script(script))
    assert (code, sorted(output.splitlines())) == (0, ["''", "err"])
    source, out, err = tmp_path / "in", tmp_path / "out", tmp_path / "err"
    source.write_text("hello")
    with open(source) as stdin, open(out, "w") as stdout, open(err, "w") as stderr:
        fds = {"stdin": stdin.fileno(), "stdout": stdout.fileno(), "stderr": stderr.fileno()}
        assert starter.wait(starter.spawn(Task.script(script), **fds), DEADLINE) == 0
    assert (out.read_text(), err.read_text()) == ("'hello'\n", "err\n")


def test_only_descriptors_passed_on_are_open(starter: Starter, write: Write) -> None:
    script = write("""
        import os
        fds = {int(fd) for fd in os.listdir("/proc/self/fd")}
        print(sorted(fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")))
        for fd in fds & set(range(70, 100)): os.write(fd, fd.to_bytes())
    """)
    pairs = [os.pipe() for _ in range(3)]
    os.set_inheritable(pairs[0][0], True)  # must not leak, although inheritable
    # Each has a number that another one may have had on its way.
    passed = [os.dup2(writing, 77 + i) for i, (_, writing) in enumerate(pairs)]
    try:
        found = outcome(starter, Task.script(script), pass_fds=passed)
        assert found == (0, "[0, 1, 2, 77, 78, 79]\n")
        assert [os.read(reading, 9) for reading, _ in pairs] == [bytes([fd]) for fd in passed]
    finally:
        for fd in (*passed, *(fd for pair in pairs for fd in pair)):
            os.close(fd)


def test_wait_has_a_timeout_and_signals_reach_only_a_running_process(starter: Starter) -> None:
    for group in (False, True):
        pid = starter.spawn(Task.function("time:sleep", 1000))
        assert starter.send_signal(pid, signal.SIGTERM, group=group)  # even right after the start
        assert starter.wait(pid, DEADLINE) == -signal.SIGTERM
        assert not starter.send_signal(pid, signal.SIGTERM, group=group)
    pid = starter.spawn(Task.function("time:sleep", 1000))
    with pytest.raises(TimeoutError, match="is still running after"):
        starter.wait(pid, 0.01)


def test_closing_kills_processes_and_what_they_started_and_ends_the_use(
    starter: Starter, write: Write, tmp_path: Path
) -> None:
    """The fixture `marked` fails if a process is left."""
    script = write("""
        import subprocess, sys, time
        command = [sys.executable, "-c", "input('started')"]
        for own_session in False, True:
            child = subprocess.Popen(command, stdin=-1, start_new_session=own_session)
            child.stdin.detach()  # so that it reads on
        time.sleep(float(sys.argv[1]))
    """)
    reading, writing = os.pipe()
    for seconds in "0", "1000":
        starter.spawn(Task.script(script, [seconds]), stdout=writing)
    os.close(writing)
    text = b""
    while len(text) < 4 * len("started"):
        text += os.read(reading, 100)
    for _ in range(2):
        starter.close()
    assert os.read(reading, 1) == b""  # no process has the other end open
    os.close(reading)
    for use in (lambda: starter.spawn(Task.script("x.py")), starter.exits):
        with pytest.raises(LaunchError, match="with statement"):
            use()


def test_start_method_is_the_argument_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZRPC_START_METHOD", raising=False)
    assert start_method() == "fork"
    monkeypatch.setenv("ZRPC_START_METHOD", "spawn")
    assert start_method() == "spawn"
    assert start_method("fork") == "fork"
    with pytest.raises(ValueError, match="but got 'thread'"):
        start_method("thread")
