"""Launches as a user sees them, in a launcher process of their own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import DRIVER, WAITS, Start, Write
from tests.support.terminal import TerminalProgram
from tests.support.waiting import until
from zrpc.launch import Job, launch
from zrpc.testing.procfs import children


@pytest.mark.system
def test_standard_input_goes_to_worker_0(start: Start) -> None:
    script = "import sys; print(repr(sys.stdin.read()))"
    launched = start(script, nprocs=2, popen={"stdin": subprocess.PIPE})
    launched.process.stdin.write(b"hello")
    code, out, _ = launched.finish()
    assert (code, sorted(out.splitlines())) == (0, ["[0] 'hello'", "[1] ''"])


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(17)", 17, "exit code 17"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    ],
)
def test_failure_stops_the_others_and_is_reported_last(
    start: Start, ending: str, code: int, words: str
) -> None:
    script = f"""
        import os, resource, signal, sys, time
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.environ["RANK"] == "1":
            print("last words", file=sys.stderr)
            {ending}
        time.sleep(1000)
        """
    found, _, err = start(script, nprocs=3).finish()
    assert found == code
    assert "zrpc launch: rank 1 failed" in err
    heading, _, last = err.rpartition("failed first, with ")
    assert heading.endswith(") ")
    assert words in last.splitlines()[0]
    assert last.endswith(":\nlast words\n")


def test_worker_has_time_to_clean_up(start: Start) -> None:
    before = """
    import atexit
    atexit.register(print, "cleaned up")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    """
    code, out, err = start(WAITS.format(before=before), nprocs=2, timeout=1).finish()
    assert (code, out.count("cleaned up")) == (124, 2)
    assert err == "zrpc launch: timed out after 1 s; stopping 2 workers\n"


def test_worker_that_exits_early_with_0_stops_no_other(start: Start) -> None:
    """Any bytes are shown, and a last line without end. The time-out may be many years."""
    script = """
        import os, sys, time
        time.sleep(int(os.environ["RANK"]))
        sys.stdout.buffer.write(b"a\\xff\\x00b\\n\\nlast")
        """
    shown = "".join(f"[{rank}] a\udcff\0b\n[{rank}] \n[{rank}] last\n" for rank in range(2))
    assert start(script, nprocs=2, timeout=1e12).finish() == (0, shown, "")


@pytest.mark.parametrize(
    ("job", "error"),
    [
        ({"nprocs": 0}, "expected at least 1 worker, but got nprocs=0"),
        ({"timeout": 0}, "expected a timeout above 0"),
        ({"grace": float("nan")}, "expected a grace period of 0 or more seconds"),
        ({"max_restarts": -1}, "0 or more restarts, but got -1"),
    ],
)
def test_bad_jobs_are_refused(write: Write, job: dict[str, Any], error: str) -> None:
    """Before any process is started."""
    with pytest.raises(ValueError, match=error):
        launch(Job(**{"target": write(""), **job}))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM])
def test_signal_stops_all(waiting: Start, number: signal.Signals) -> None:
    before = """
    def leave(number, frame):
        show(number, frame)
        sys.exit(0)
    for each in signal.SIGTERM, signal.SIGHUP, signal.SIGALRM: signal.signal(each, leave)
    """
    found, out, err = waiting(before, nprocs=2).stop(number)
    assert found == 128 + number
    # All but SIGINT reach workers as SIGTERM.
    assert (out.count("got "), out.count("got SIGTERM\n")) == ((0, 0) if number == 2 else (2, 2))
    assert f"zrpc launch: got {number.name}; stopping 2 workers\n" in err
    assert err.count("KeyboardInterrupt") == (2 if number == signal.SIGINT else 0)
    assert "failed" not in err


def test_worker_that_handles_the_interrupt_gets_only_one(start: Start) -> None:
    script = """
        import signal, time
        got = []
        signal.signal(signal.SIGINT, lambda *_: got.append(1))
        print("ready")
        while not got:
            signal.pause()
        time.sleep(0.5)
        print("got", len(got))
        """
    launched = start(script, nprocs=2)
    launched.ready(2)
    code, out, _ = launched.stop(signal.SIGINT)
    assert (code, out.count("got 1\n")) == (130, 2)


IGNORE = "for n in (2, 15): signal.signal(n, signal.SIG_IGN)"


def test_second_interrupt_kills_at_once(waiting: Start) -> None:
    launched = waiting(IGNORE, nprocs=2, grace=1000)
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # a signal that comes sooner counts as an echo of the first
    assert launched.stop(signal.SIGINT)[0] == 130


def test_no_process_is_left_when_the_launcher_is_killed(waiting: Start, marked: Any) -> None:
    before = f"""
    {IGNORE}
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(os.environ["ZRPC_RUNTIME_DIR"])
    """
    launched = waiting(before, nprocs=3)
    directory = launched.read_until("zrpc-").splitlines()[0].split()[1]
    assert os.path.isdir(directory)
    assert len(marked.pids()) == 8  # launcher, fork server, workers and their children
    launched.process.kill()
    until(lambda: not marked.pids(), "all processes are gone")
    until(lambda: not os.path.exists(directory), "the directory is gone")


def test_launch_ends_when_the_fork_server_is_killed(waiting: Start) -> None:
    launched = waiting()
    os.kill(*children(launched.process.pid), signal.SIGKILL)
    code, _, err = launched.finish()
    assert code == 1
    assert "ServerDied: the fork server has exited; was it killed?" in err


def test_launch_stops_when_its_output_is_closed_or_cannot_be_written(start: Start) -> None:
    script = "import time\nwhile True: print('y'); time.sleep(0.01)"
    launched = start(script, nprocs=2)
    launched.read_until("[1] y")
    launched.process.stdout.close()
    code, _, err = launched.finish()
    assert code == 141
    assert err.count("the output was closed by its reader; stopping 2 workers") == 1
    with open("/dev/full", "w") as full:
        code, _, err = start(script, popen={"stdout": full}).finish()
    assert code == 141
    assert "the output can't be written (No space left on device); stopping 1 worker" in err


@pytest.mark.parametrize(
    ("stop", "method"),
    [("done", "spawn"), ("failure", "fork"), ("signal", "spawn"), ("timeout", "fork")],
)
def test_only_processes_that_have_left_their_workers_session_outlive_the_launch(
    start: Start, tmp_path: Path, marked: Any, method: str, stop: str
) -> None:
    script = """
        import os, subprocess, sys, time
        code = "import sys; print('lives', flush=True); open(sys.argv[1]).read()"
        def child(fifo, **options):
            command = [sys.executable, "-c", code, fifo]
            process = subprocess.Popen(command, stdout=-1, stderr=2, **options)
            assert process.stdout.readline() == b"lives\\n"
        child(sys.argv[1], start_new_session=True)
        child(sys.argv[2])
        print("ready")
        if sys.argv[3] != "done":
            time.sleep(1 if sys.argv[3] == "failure" else 1000)
            sys.exit(1)
        """
    fifos = [str(tmp_path / name) for name in ("detached", "attached")]
    for fifo in fifos:
        os.mkfifo(fifo)
    job = {"timeout": 1.0} if stop == "timeout" else {}
    launched = start(script, argv=[*fifos, stop], start_method=method, **job)
    launched.read_until("[0] ready\n")
    if stop == "signal":
        launched.process.send_signal(signal.SIGTERM)
    code, _, _ = launched.finish()
    assert code == {"done": 0, "failure": 1, "signal": 143, "timeout": 124}[stop]
    left = until(lambda: len(pids := marked.pids()) == 1 and pids, "one process is left")
    assert os.getsid(left[0]) == left[0]
    with open(fifos[0], "w"):
        pass  # it exits at the end of this file


@pytest.mark.system
@pytest.mark.parametrize("plain", [False, True])
def test_terminal_shows_colours_and_sends_one_interrupt(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", "1" * plain)
    script = write(WAITS.format(before="print('\\x1b[31mred')"))
    job = {"target": script, "nprocs": 2, "preload": ()}
    code = "import os; os.dup2(os.open('err', os.O_WRONLY | os.O_CREAT), 2)\n" + DRIVER
    terminal = TerminalProgram(["-c", code, json.dumps(job)], tmp_path, cold=True)
    begin, end = ("", "") if plain else ("\x1b[33m", "\x1b[0m")
    terminal.await_text(f"{begin}[1]{end} ready\r\n")
    terminal.await_text(f"[0]{end} ready\r\n")
    assert f"{begin}[1]{end} \x1b[31mred{end}\r\n" in terminal.seen
    terminal.type("\x03")
    assert terminal.finish() == 130
    terminal.close()
    err = (tmp_path / "err").read_text()
    assert err.count("KeyboardInterrupt") == 2
    assert "\x1b" not in err  # standard error is not a terminal


@pytest.mark.parametrize("stop", ["signal", "timeout"])
def test_workers_are_stopped_although_nobody_reads_the_output(
    start: Start, marked: Any, stop: str
) -> None:
    job = {"timeout": 2.0} if stop == "timeout" else {}
    launched = start("while True: print('x' * 1000)", nprocs=2, **job)
    writing = os.open(f"/proc/self/fd/{launched.process.stdout.fileno()}", os.O_WRONLY)
    until(lambda: not select.select([], [writing], [], 0)[1], "the launcher waits for its reader")
    os.close(writing)
    if stop == "signal":
        launched.process.send_signal(signal.SIGTERM)
    until(lambda: marked.pids() == [launched.process.pid], "only the launcher is left")
    code, out, err = launched.finish()
    assert code == (143 if stop == "signal" else 124)
    assert out.count("x\n") > 60
    assert "stopping 2 workers" in err


def test_thread_that_a_tool_starts_in_each_interpreter_is_noted_once(
    start: Start, write: Write, tmp_path: Path
) -> None:
    tool = """
        import threading, time
        threading.Thread(target=time.sleep, args=[99], name="tracer", daemon=True).start()
        """
    write(tool, "lib/sitecustomize.py")
    environ = {"PYTHONPATH": str(tmp_path / "lib")}
    script = "import sys; print('colorsys' in sys.modules)"  # each is a new interpreter
    code, out, err = start(script, nprocs=2, preload=["colorsys"], environ=environ).finish()
    assert (code, sorted(out.splitlines())) == (0, ["[0] False", "[1] False"])
    assert err.count("(tracer)") == err.count("\n") == 1
    assert err.startswith("zrpc launch: note: workers can't be forked, because something starts")
