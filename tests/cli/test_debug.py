"""Breakpoints of launched workers, at a terminal; and zrpc debug."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from tests.support.terminal import DEADLINE, TerminalProgram
from tests.support.waiting import until
from tests.support.warm import warm_commands
from zrpc.cli import main

ZRPC = ["-m", "zrpc.cli"]
IMPORTS = """
    import os
    import zrpc as rpc
    rank = int(os.environ["RANK"])
"""
BEGIN = f"""{IMPORTS}
    rpc.init_rpc(f"worker{{rank}}")
"""
HANDLER = f"""{IMPORTS}
    def handler(number):
        local = number + 1
        breakpoint()
        return local

    rpc.init_rpc(f"worker{{rank}}")
    if rank == 0:
        print("got", rpc.rpc_sync("worker1", handler, (6,), timeout=2))
    rpc.shutdown()
"""
RAISES = f"""{BEGIN}
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first that exits stops the other
    rpc.barrier()
    here = f"script of {{rank}}"
    raise ValueError(here)
"""
Begin = Callable[..., TerminalProgram]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts ``zrpc`` on a terminal; a script is the source of its last argument."""
    started: list[TerminalProgram] = []

    def begin(*arguments: str, script: str = "", cold: bool = False) -> TerminalProgram:
        if script:
            (tmp_path / "script.py").write_text(dedent(script))
            arguments = (*arguments, "script.py")
        started.append(TerminalProgram([*ZRPC, *arguments], tmp_path, cold))
        return started[-1]

    yield begin
    for program in started:
        program.close()


def say(program: TerminalProgram, text: str, answer: str = "") -> str:
    """Types a command of the debugger; returns what is shown up to the next prompt."""
    program.type(f"{text}\n")
    return program.read_until(f"{answer}(Pdb) ")


def test_breakpoint_of_a_handler_opens_a_prompt_at_the_launchers_terminal(begin: Begin) -> None:
    launched = begin("launch", "--pdb", "-n", "2", script=HANDLER)
    assert "worker1 (rank 1), pid" in launched.read_until("(Pdb) ")
    say(launched, "p local", "7\r\n")
    launched.type("c\n")
    launched.read_until("[0]")
    assert launched.finish() == 0
    assert "got 7" in launched.seen


def test_errors_of_handler_and_script_open_prompts_one_after_the_other(begin: Begin) -> None:
    launched = begin("launch", "--pdb", "-n", "2", script=RAISES)
    for rank in range(2):  # else one would be in the barrier when the other one exits
        launched.await_text(f"ValueError: script of {rank}")
    shown = ""
    for _ in range(2):
        shown += launched.read_until("(Pdb) ") + say(launched, "p here")
        launched.type("q\n")
    assert launched.finish() == 1
    for rank in range(2):
        assert f"'script of {rank}'" in shown
    assert shown.count("has raised ValueError") >= 2


@pytest.mark.parametrize("hidden", [False, True], ids=["as usual", "with a hidden module"])
def test_error_before_the_mesh_opens_a_prompt(begin: Begin, tmp_path: Path, hidden: bool) -> None:
    if hidden:  # then the worker is a new interpreter
        shutil.copy(uuid.__file__, tmp_path)
    script = "import sys\nhere = sys.argv[1:]\nraise ValueError(here)\n"
    (tmp_path / "raises.py").write_text(script)
    launched = begin("launch", "--pdb", "raises.py", "a b", "-c", cold=True)
    if hidden:
        launched.read_until("uuid beside the program hides a preloaded module")
    assert "rank 0, pid" in launched.read_until("(Pdb) ")
    say(launched, "p here", "['a b', '-c']\r\n")
    launched.type("c\n")
    assert launched.finish() == 1


def test_worker_that_is_killed_at_the_prompt_ends_it(begin: Begin) -> None:
    launched = begin("launch", "--pdb", "-n", "2", script=HANDLER)
    found = re.search(r"-- worker1 \(rank 1\), pid (\d+)", launched.read_until("(Pdb) "))
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    assert launched.finish() == 128 + signal.SIGKILL
    assert "rank 1 failed (SIGKILL" in launched.seen


def test_ctrl_c_at_the_prompt_stops_the_workers_and_ctrl_d_quits_the_debugger(begin: Begin) -> None:
    in_script = BEGIN + "    breakpoint()\n    print(rank)\n"
    for script, key in ((HANDLER, "\x03"), (in_script, "\x03"), (HANDLER, "\x04")):
        launched = begin("launch", "--pdb", "-n", "2", script=script)
        launched.read_until("(Pdb) ")
        launched.type(key)
        assert (launched.finish() == 128 + signal.SIGINT) == (key == "\x03")
    assert "BdbQuit" in launched.seen


def test_zrpc_debug_attaches_detaches_and_attaches_again(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(dedent(HANDLER))
    launched = subprocess.Popen(
        [warm_commands().python, *ZRPC, "launch", "--pdb", "-n", "2", "script.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "err").open("wb"),
        text=True,
    )
    try:
        err = tmp_path / "err"
        found = until(
            lambda: re.search(r"pid (\d+), stands.*: zrpc debug 1\n", err.read_text()),
            err.read_text,
            within=DEADLINE,
        )
        assert found is not None
        refused = CliRunner().invoke(main, ["debug", "nobody"])
        assert refused.exit_code == 1
        assert "no worker nobody of this user waits at a breakpoint" in refused.output
        assert f"worker1 (rank 1, pid {found[1]})" in refused.output
        first = begin("debug", found[1], cold=True)
        first.read_until("(Pdb) ")
        say(first, "p local", "7\r\n")
        first.type("\x03")
        first.read_until(f"detached; worker1 waits: zrpc debug {found[1]}")
        assert first.finish() == 0
        second = begin("debug", found[1])
        second.read_until("(Pdb) ")
        second.type("c\n")
        second.read_until("goes on")
        assert second.finish() == 0
        out, _ = launched.communicate(timeout=DEADLINE)
        assert (launched.returncode, out) == (0, "[0] got 7\n")
    finally:
        launched.kill()
        launched.communicate()
