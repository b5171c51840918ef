"""Signals to a launcher in a process of its own, and the state of signals that it was given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Launched, Start, Write
from tests.support.waiting import until
from zrpc.launch import Task
from zrpc.launch.signals import SignalInbox
from zrpc.launch.starter import Starter
from zrpc.testing.procfs import children, state_of

# A worker that shows what it was given and what it gets.
SHOWS = """
    import os, signal, sys, time
    ignored = {n.name for n in signal.valid_signals() if isinstance(n, signal.Signals)
               and signal.getsignal(n) == signal.SIG_IGN}
    blocked = {n.name for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())
               if isinstance(n, signal.Signals)}
    print("ignores", *sorted(ignored - {"SIGPIPE", "SIGXFSZ"}))
    print("blocks", *sorted(blocked))
    sys.exit(7)
"""
HANDLES = (
    "for n in 'USR1', 'USR2', 'WINCH', 'CONT': signal.signal(getattr(signal, 'SIG' + n), show)"
)


def given(*, ignored: tuple[int, ...] = (), blocked: tuple[int, ...] = ()) -> dict[str, Any]:
    """Returns options of Popen, for a process that is given this state."""

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    return {"preexec_fn": prepare}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_ignore_and_block_what_the_launcher_was_told_to(start: Start, method: str) -> None:
    state = given(ignored=(signal.SIGCHLD, signal.SIGHUP), blocked=(signal.SIGTERM, signal.SIGCHLD))
    code, out, _ = start(SHOWS, start_method=method, popen=state).finish()
    assert out == "[0] ignores SIGCHLD SIGHUP\n[0] blocks SIGCHLD SIGTERM\n"
    assert code == 7


def test_a_launcher_that_was_told_to_block_everything_can_be_stopped(waiting: Start) -> None:
    state = given(blocked=tuple(signal.valid_signals()))
    assert waiting(nprocs=2, grace=0.1, popen=state).stop()[0] == 143


def test_a_signal_that_the_launcher_was_told_to_ignore_stops_nothing(waiting: Start) -> None:
    launched = waiting(HANDLES, popen=given(ignored=(signal.SIGHUP,)))
    launched.process.send_signal(signal.SIGHUP)
    launched.process.send_signal(signal.SIGUSR1)
    launched.read_until("[0] got SIGUSR1\n")
    assert launched.stop()[0] == 143


@pytest.mark.system
def test_a_program_that_ignores_its_children_learns_the_exits_of_a_fork_server(marked: Any) -> None:
    """Ignored, they would leave no exit codes."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Starter(preload=[], env=marked.env) as server:
        pid = server.spawn(Task.function("signal:getsignal", signal.SIGCHLD))
        assert server.wait(pid, 30) == signal.SIG_IGN
        pid = server.spawn(Task.function("time:sleep", 1000))
        assert server.send_signal(pid, signal.SIGKILL)
        assert server.wait(pid, 30) == -signal.SIGKILL
    assert signal.signal(signal.SIGCHLD, before) == signal.SIG_IGN


def test_a_signal_interrupts_once_and_stays_in_the_inbox() -> None:
    with SignalInbox() as inbox:
        with pytest.raises(KeyboardInterrupt), inbox.interrupting({signal.SIGTERM}):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # after the block, which does nothing
        assert inbox.has({signal.SIGTERM})
        with pytest.raises(KeyboardInterrupt), inbox.interrupting({signal.SIGTERM}):
            pytest.fail("it has come before the block")
        assert inbox.take() == {signal.SIGTERM}
        assert inbox.take() == set()


SLOW = """
    import signal, time
    print("imports", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM])
def test_a_signal_stops_a_launch_whose_modules_are_still_imported(
    start: Start, write: Write, tmp_path: Path, number: signal.Signals
) -> None:
    write(SLOW, "slow.py")
    launched = start(preload=["slow"], environ={"PYTHONPATH": tmp_path})
    launched.read_until("imports\n")
    assert launched.stop(number)[0] == 128 + number


def test_signals_that_reach_the_fork_server_too_do_not_stop_it(waiting: Start) -> None:
    """A supervisor may send them to all processes that it finds."""
    before = """
    def save(number, frame):
        os.write(1, b"saved\\n")
        os._exit(0)
    signal.signal(signal.SIGTERM, save)
    """
    launched = waiting(before)
    (server,) = children(launched.process.pid)
    for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGHUP, signal.SIGTERM):
        os.kill(server, number)
    code, out, _ = launched.stop()
    assert (code, out) == (143, "[0] ready\n[0] saved\n")


@pytest.fixture
def first_process(marked: Any) -> Callable[..., Launched]:
    """Starts Python as the first process of a namespace, which the kernel spares most signals."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    made = subprocess.run([*unshare, "true"], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"needs a namespace of processes: {made.stderr.decode()}")

    def start(*arguments: str, **env: str) -> Launched:
        return Launched([*unshare, sys.executable, "-u", *arguments], {**marked.env, **env})

    return start


@pytest.mark.parametrize("slow", ["click.py", "torch.py"])
def test_a_command_that_is_the_first_process_of_a_container_is_stopped_while_it_starts(
    write: Write, tmp_path: Path, first_process: Callable[..., Launched], slow: str
) -> None:
    write(SLOW, f"modules/{slow}")
    launched = first_process(
        *("-m", "zrpc.cli", "launch", write("")), PYTHONPATH=str(tmp_path / "modules")
    )
    launched.read_until("imports\n")
    os.kill(*children(launched.process.pid), signal.SIGTERM)
    assert launched.finish()[0] == 143


def test_a_program_that_only_imports_the_commands_keeps_its_signals(
    write: Write, first_process: Callable[..., Launched]
) -> None:
    script = write("import signal, zrpc.cli; print(signal.getsignal(signal.SIGTERM).name)")
    assert first_process(script).finish()[1] == "SIG_DFL\n"


def test_only_an_interrupt_is_forwarded_to_the_children_of_workers_too(waiting: Start) -> None:
    before = f"""
    {HANDLES}
    code = "import signal, time; print('child is ready', flush=True); time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", code])  # of SIGUSR1 it would die
    """
    launched = waiting(before, nprocs=2)
    for rank in range(2):
        launched.read_until(f"[{rank}] child is ready\n")
    for name in ("SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT"):
        launched.process.send_signal(getattr(signal, name))
        for rank in range(2):
            launched.read_until(f"[{rank}] got {name}\n")
    (server,) = children(launched.process.pid)
    for worker in children(server):
        assert [state_of(child) in "SR" for child in children(worker)] == [True]  # it lives
    code, _, err = launched.stop(signal.SIGINT)
    assert (code, err.count("KeyboardInterrupt")) == (130, 4)  # of the children, too


def test_ctrl_z_suspends_the_workers_and_their_children_with_the_launcher(waiting: Start) -> None:
    before = """
    code = "import time; print('child is ready', flush=True); time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", code])
    """
    # The time that it is suspended doesn't count.
    options = {"timeout": 30.0, "popen": {"process_group": 0}}
    launched = waiting(before, nprocs=2, **options)
    for rank in range(2):
        launched.read_until(f"[{rank}] child is ready\n")
    (server,) = children(launched.process.pid)
    workers = children(server)
    processes = [*workers, *(pid for worker in workers for pid in children(worker))]
    assert len(processes) == 4
    for number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        launched.process.send_signal(number)
        _, status = os.waitpid(launched.process.pid, os.WUNTRACED)
        assert os.WSTOPSIG(status) == number  # what a shell shows
        until(lambda: [state_of(pid) for pid in processes] == ["T"] * 4, "all are suspended")
        launched.process.send_signal(signal.SIGCONT)
        until(lambda: [state_of(pid) for pid in processes] == ["S"] * 4, "all go on")
    assert launched.stop()[0] == 143


def test_a_signal_to_a_suspended_launch_stops_it_as_it_goes_on(waiting: Start) -> None:
    launched = waiting(nprocs=2, popen={"process_group": 0})
    launched.process.send_signal(signal.SIGTSTP)
    os.waitpid(launched.process.pid, os.WUNTRACED)
    for number in (signal.SIGTERM, signal.SIGCONT):  # what a shell's `kill` sends to a job
        launched.process.send_signal(number)
    assert launched.finish()[0] == 143


def test_without_a_shell_that_could_continue_it_a_launch_is_not_suspended(waiting: Start) -> None:
    before = "signal.signal(signal.SIGCONT, show)"
    launched = waiting(before, popen={"start_new_session": True})
    launched.process.send_signal(signal.SIGTSTP)
    launched.read_until("[0] got SIGCONT\n")
    assert state_of(launched.process.pid) != "T"
    assert launched.stop()[0] == 143
