"""A launcher at a terminal: who gets what is typed. A real shell runs it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.terminal import TerminalProgram
from tests.support.waiting import until

_DRIVER = """\
import sys
from zrpc.launch import Job, launch
sys.exit(launch(Job(sys.argv[1], sys.argv[2:], nprocs=2, preload=())))
"""
# Worker 0 evaluates an expression that reads, a number of times.
READS = """
    import getpass, os, select, subprocess, sys, tty
    if os.environ["RANK"] == "1":
        sys.exit(0)
    expression, count = sys.argv[1:]
    print("reads", sys.stdin.isatty())
    for _ in range(int(count)):
        print("got", repr(eval(expression)))
"""
LINE = "input()"
TO_THE_END = "sys.stdin.read()"
DESCRIPTOR = "os.read(0, 100).decode().rstrip()"
LAUNCHER = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"
TWO_LINES = {"one\n": "one", "two\n": "two"}
# An expression that reads, and what it gives if some text is typed.
WAYS = {
    "input": (LINE, TWO_LINES),
    "descriptor": (DESCRIPTOR, TWO_LINES),
    "device": ("open('/dev/stdin').readline().rstrip()", TWO_LINES),
    "select": ("select.select([sys.stdin], [], []) and sys.stdin.readline().rstrip()", TWO_LINES),
    "select of a descriptor": (f"select.select([0], [], []) and {DESCRIPTOR}", TWO_LINES),
    "poll": (
        f"(p := select.poll()).register(0, select.POLLIN) or p.poll() and {DESCRIPTOR}",
        TWO_LINES,
    ),
    "epoll": (
        f"(p := select.epoll()).register(0, select.EPOLLIN) or p.poll() and {DESCRIPTOR}",
        TWO_LINES,
    ),
    "child": ("subprocess.run(['head', '-n1'], stdout=-1, text=True).stdout.rstrip()", TWO_LINES),
    "to Ctrl-D": (TO_THE_END, {"one\ntwo\n\x04": "one\\ntwo\\n", "part\x04\x04": "part"}),
    # A thread may get that signal before the launch is continued in the foreground.
    "after a late signal of the background": (
        f"os.kill({LAUNCHER}, {int(signal.SIGTTOU)}) or input()",
        TWO_LINES,
    ),
}

_WRITES_AT_ONCE = """\
import os, time
with open("pids", "a") as file:
    print(os.getpid(), file=file)
print("writes")
time.sleep(1)
"""


class Shell(TerminalProgram):
    """An interactive shell, with job control."""

    def __init__(self, cwd: Path, mark: str) -> None:
        bash = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        code = f"import os; os.execvp('bash', {bash})"
        super().__init__(["-c", code], cwd, cold=True)
        self.type(f"PS1='prompt> '; export ZRPC_TEST_MARK={mark} NO_COLOR=1; echo be''gins\n")
        self.read_until("begins\r\n")
        self.read_until("prompt> ")

    def launch(self, reads: str, count: int = 1, before: str = "", after: str = "") -> None:
        command = [sys.executable, "driver.py", "reads.py", reads, str(count)]
        self.type(f"{before} {shlex.join(command)} {after}\n")

    def begin(self, reads: str, count: int = 1) -> None:
        """Launches in the foreground, and waits until worker 0 reads."""
        self.launch(reads, count)
        self.read_until("[0] reads True\r\n")

    def answer(self, text: str) -> None:
        """Types a line for worker 0, which shows it."""
        self.type(f"{text}\n")
        self.read_until(f"[0] got '{text}'\r\n")

    def exit(self) -> None:
        """Leaves the shell, which has its terminal back."""
        self.read_until("prompt> ")
        self.type("exit\n")
        self.finish()


@pytest.fixture
def shell(tmp_path: Path, marked: Any) -> Iterator[Shell]:
    (tmp_path / "driver.py").write_text(_DRIVER)
    (tmp_path / "reads.py").write_text(dedent(READS))
    shell = Shell(tmp_path, marked.value)
    yield shell
    shell.exit()
    shell.close()


@pytest.mark.parametrize("way", WAYS)
def test_worker_0_of_a_foreground_launch_reads_what_is_typed(shell: Shell, way: str) -> None:
    expression, answers = WAYS[way]
    shell.begin(expression, len(answers))
    for typed, got in answers.items():
        shell.type(typed)
        shell.read_until(f"[0] got '{got}'\r\n")


def test_what_no_worker_reads_is_left_to_the_shell(shell: Shell) -> None:
    shell.launch("None")
    shell.type("echo type''d ahead\n")
    shell.read_until("[0] reads True\r\n")
    shell.read_until("typed ahead\r\n")


def test_a_launch_in_the_background_leaves_the_terminal_to_the_shell(shell: Shell) -> None:
    shell.launch(LINE, after="&")
    shell.read_until("a worker reads the terminal; it waits until you continue this by fg\r\n")
    shell.type("echo for the sh''ell\n")
    shell.read_until("for the shell\r\n")
    shell.type("fg\n")
    shell.read_until("reads.py 'input()' 1\r\n")
    shell.answer("for the worker")


def test_a_launch_that_began_while_the_shell_edited_a_line_reads_lines(shell: Shell) -> None:
    """The shell's line editor sets the terminal as stty does here."""
    shell.type("stty -icanon -echo -icrnl\n")
    shell.launch(TO_THE_END, after="&")
    shell.read_until("a worker reads the terminal; it waits until you continue this by fg\r\n")
    shell.type("stty icanon echo icrnl; fg\n")
    shell.read_until("reads.py 'sys.stdin.read()' 1\r\n")
    shell.type("one\n\x04")
    shell.read_until("[0] got 'one\\n'\r\n")


def test_a_suspended_launch_leaves_the_terminal_to_the_shell(shell: Shell) -> None:
    shell.begin(LINE, count=3)
    for word, command in (("one", "sleep 0.3"), ("two", "bg"), ("three", "")):
        shell.answer(word)
        if not command:
            break
        shell.type("\x1a")
        shell.read_until("Stopped")
        shell.read_until("prompt> ")
        shell.type(f"echo susp''ended; {command}\n")
        shell.read_until("suspended\r\n")
        if command == "bg":
            # Back in the foreground, it had not asked for that: it looks every 0.1 s.
            assert "continue this by fg" not in shell.seen
            shell.read_until("reads.py 'input()' 3 &\r\n")
            shell.type("echo contin''ued\n")
            shell.read_until("continued\r\n")
        shell.type("fg\n")
        shell.read_until("reads.py 'input()' 3\r\n")


def test_workers_stop_with_a_launcher_suspended_by_output(shell: Shell, tmp_path: Path) -> None:
    def states() -> set[str]:
        pids = (tmp_path / "pids").read_text().split()
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

    (tmp_path / "reads.py").write_text(_WRITES_AT_ONCE)
    shell.type("stty tostop\n")
    shell.launch("None", after="&")
    shell.type("wait %1\n")
    shell.read_until("Stopped")
    until(lambda: states() == {"T"}, "the workers are stopped")
    shell.type("stty -tostop; fg\n")
    shell.read_until("[0] writes\r\n")


@pytest.mark.parametrize("ends", ["by itself", "by Ctrl-C"])
def test_a_password_is_not_shown(shell: Shell, ends: str) -> None:
    shell.begin("len(getpass.getpass('Password:', sys.stdout))")
    until(lambda: not shell.echoes(), "the echo is off")
    if ends == "by itself":
        shell.type("zq!7#k\n")
        shell.read_until("got 6\r\n")
    else:
        shell.type("zq!\x03")
        shell.read_until("got SIGINT; stopping ")
    assert "zq!" not in shell.seen  # which is in no path, and in no line of a traceback


def test_a_letter_is_read_as_soon_as_it_is_typed(shell: Shell) -> None:
    shell.begin("(tty.setcbreak(sys.stdin), sys.stdin.read(1))[1]")
    until(lambda: not shell.echoes(), "the terminal is in the mode for letters")
    shell.type("q")
    shell.read_until("[0] got 'q'\r\n")


@pytest.mark.parametrize("after", ["", "</dev/tty"])
def test_a_launch_outside_of_the_terminals_session_reads_nothing(shell: Shell, after: str) -> None:
    shell.launch(TO_THE_END, before="setsid --wait", after=after)
    shell.type("echo for the sh''ell\n")
    shell.read_until("[0] reads False\r\n")
    shell.read_until("[0] got ''\r\n")
    shell.read_until("for the shell\r\n")
