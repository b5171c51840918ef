"""The installed command, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import click
import pytest
from click.testing import CliRunner

from tests.support.programs import run_python
from zrpc.cli import main
from zrpc.cli.launch import command

ZRPC = str(Path(sys.executable).with_name("zrpc"))


def run(*arguments: str, cwd: Path, forked: bool = False, **env: str) -> tuple[int, str, str]:
    """Runs the command. Its workers are new interpreters, unless a test says otherwise.

    With `forked`, the command is forked from a process that has imported torch, and so are its
    workers: for tests whose workers need torch, and that are about these.
    """
    method = {} if forked else {"ZRPC_START_METHOD": "spawn"}
    command = ("-m", "zrpc.cli", *arguments)
    done = run_python(*command, cwd=cwd, warm=forked, **{**method, **env})
    return done.returncode, done.stdout, done.stderr


def test_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path) == (0, f"zrpc, version {version('torch-zrpc')}\n", "")


def test_help_imports_neither_torch_nor_zmq() -> None:
    code = """
import sys
from zrpc.cli import main
for arguments in (["--help"], ["launch", "--help"]):
    main(arguments, standalone_mode=False)
assert not {"torch", "zmq", "numpy"} & set(sys.modules), "imported"
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "launch" in done.stdout


def test_help_begins_with_examples_and_shows_each_option_in_a_section() -> None:
    text = CliRunner().invoke(main, ["launch", "-h"]).output
    assert text.index("zrpc launch -n 4 train.py --lr 0.1") < text.index("All arguments after")
    headings = ["Workers:", "Output:", "Restarts:", "Workers that join and leave:", "Network:"]
    places = [text.index(f"\n{heading}\n") for heading in [*headings, "Other options:"]]
    assert places == sorted(places)
    options = [option for param in command.params for option in param.opts if option[0] == "-"]
    assert [option for option in options if option not in text] == []
    assert "Exit codes: 0 if all workers" in text


def test_commands_are_listed_by_use_and_no_help_shows_a_mark_for_the_formatter() -> None:
    text = CliRunner().invoke(main, ["-h"]).output
    assert text.index("launch") < text.index("stacks") < text.index("secret") < text.index("bench")
    for name in main.list_commands(click.Context(main)):
        assert "\\b" not in CliRunner().invoke(main, [name, "--help"]).output


def test_an_option_after_the_script_is_noted_unless_it_is_meant_for_that(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import sys; print(sys.argv[1:])")
    for arguments, noted in (
        (["s.py", "--nproc-per-node=2"], "--nproc-per-node=2"),
        (["-n", "1", "s.py", "--nprocs", "2"], None),
        (["s.py", "--lr", "1", "-m", "x"], None),
    ):
        code, out, err = run("launch", *arguments, cwd=tmp_path)
        assert (code, out) == (0, f"[0] {arguments[arguments.index('s.py') + 1 :]!r}\n")
        assert (f"note: {noted} stands after the script and is passed to it" in err) == bool(err)
        assert bool(err) == (noted is not None)


BAD_ARGUMENTS = (
    (["no.py"], "there is no script 'no.py'"),
    (["/dev/stdin"], "expected a script that each worker can open, found '/dev/stdin'"),
    (["--nprocs", "0", "s.py"], "0 is not in the range x>=1"),
    (["--env", "NOVALUE", "s.py"], "expected NAME=VALUE, but got 'NOVALUE'"),
    (["--env", "=V", "s.py"], "expected NAME=VALUE, but got '=V'"),
    (["--env", "RANK=1", "s.py"], "RANK can't be set"),
    (["--env", "ZRPC_SECRET=x", "s.py"], "ZRPC_SECRET can't be set here"),
    (["--timeout", "0", "s.py"], "0.0 is not in the range x>0"),
    (["--timeout", "nan", "s.py"], "expected a finite number, but got nan"),
    (["--name-prefix", "a b", "s.py"], "expected a name prefix of at most 120 letters"),
    (["--role", "a", "s.py"], "expected NAME=NUMBER, each name once, but got 'a'"),
    (["--role", "a=1", "--role", "a=2", "s.py"], "each name once, but got 'a=2'"),
    (["--role", "a=0", "s.py"], "expected 1 worker or more of the role a, but got 0"),
    (["--role", "a=2", "-n", "3", "s.py"], "which is 2, but got nprocs=3: leave it out"),
    (["--role", "a=2", "--elastic", "s.py"], "--role names workers by their number"),
    (["--grace", "-1", "s.py"], "Invalid value for '--grace': -1.0 is not in the range x>=0"),
    (["--grace", "inf", "s.py"], "Invalid value for '--grace': expected a finite number"),
    (["--listen", "h:1", "s.py"], "are for an elastic mesh: add --elastic"),
    (["--join", "h:1", "s.py"], "are for an elastic mesh: add --elastic"),
    (["--elastic", "--listen", "h:1", "--join", "h:1", "s.py"], "but got both"),
    (["--elastic", "--listen", "h", "s.py"], "expected HOST:PORT, but got 'h'"),
    (["--metrics-port", "abc", "s.py"], "for --metrics-port: expected PORT or ADDRESS:PORT"),
    (["--metrics-port", "65534", "-n", "3", "s.py"], "got '65534' on the worker with rank 2"),
    (["--elastic", "--join", "h:1", "s.py"], "need its secret: set ZRPC_SECRET_FILE"),
)


def test_bad_arguments_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    runner = CliRunner(env={"ZRPC_SECRET": None, "ZRPC_SECRET_FILE": None})
    for arguments, error in BAD_ARGUMENTS:
        result = runner.invoke(main, ["launch", *arguments])
        assert result.exit_code == 2, arguments
        assert error in result.output


WAITS_FOR_ZRPC = """
    import os, signal, sys
    import zrpc

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    if sys.argv[1] == "others":
        if rank == 1:
            sys.exit(3)
        zrpc.init_rpc()
    zrpc.init_rpc()
    if rank == 1:
        os._exit(3)
    if sys.argv[1] == "a call":
        zrpc.rpc_sync("worker1", signal.pause, timeout=0)
    if sys.argv[1] == "a barrier":
        zrpc.barrier(timeout=0)
    zrpc.shutdown()
"""


@pytest.mark.parametrize(
    ("what", "restarts"),
    [("others", 0), ("others", 1), ("a call", 0), ("a barrier", 0), ("the shutdown", 0)],
)
def test_a_worker_that_waits_only_for_zrpc_exits_when_a_peer_has_failed(
    tmp_path: Path, what: str, restarts: int
) -> None:
    """Even if it ignores SIGTERM."""
    (tmp_path / "waits.py").write_text(dedent(WAITS_FOR_ZRPC))
    options = ["-n", "2", "--grace", "3600", "--max-restarts", str(restarts)]
    code, _, err = run("launch", *options, "waits.py", what, cwd=tmp_path, forked=True)
    assert code == 3, err


def test_launch_errors_are_explained_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    for place in ("/dev/null/logs", "/proc/logs"):
        code, _, err = run("launch", "--log-dir", place, "s.py", cwd=tmp_path)
        assert code == 1
        assert err.startswith(f"Error: the log directory {place} can't be created: ")


def test_a_launcher_without_descriptors_says_which_limit_to_raise(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    command = f"ulimit -n 24 && exec {ZRPC} launch -n 16 --start-method spawn s.py"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr
    assert "raise the limit with `ulimit -n`" in done.stderr


def test_options_after_the_script_are_passed_to_it(tmp_path: Path) -> None:
    script = """
        import os, sys
        print(*map(os.environ.get, ("ZRPC_WORKER_NAME", "A", "B", "ZRPC_IFACE")), sys.argv)
    """
    (tmp_path / "s.py").write_text(dedent(script))
    code, out, err = run(
        *("launch", "--nprocs", "2", "--name-prefix", "w:", "--env", "A=1", "--env", "B=x=y"),
        *("--log-dir", "logs", "--timeout", "60", "--iface", "eth7"),
        *("s.py", "--nprocs", "3", "-m", "--", "--help"),
        cwd=tmp_path,
    )
    assert (code, err) == (0, "")
    argv = ["s.py", "--nprocs", "3", "-m", "--", "--help"]
    assert sorted(out.splitlines()) == [f"[{i}] w:{i} 1 x=y eth7 {argv}" for i in range(2)]
    assert (tmp_path / "logs" / "rank1.out").read_text() == f"w:1 1 x=y eth7 {argv}\n"


def test_module_can_be_launched_and_its_exit_code_is_returned(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import sys; print(sys.argv[1:]); sys.exit(9)")
    code, out, _ = run("launch", "-m", "tool", "-n", "4", cwd=tmp_path)
    assert (code, out) == (9, "[0] ['-n', '4']\n")


def test_workers_come_from_one_process_that_has_imported_torch(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import os, sys; print(os.getppid(), 'torch' in sys.modules)")
    options = ("--start-method", "fork", "--nprocs", "2")
    code, out, err = run("launch", *options, "s.py", cwd=tmp_path)
    assert code == 0, err
    [line] = {line.partition(" ")[2] for line in out.splitlines()}
    assert line.endswith(" True")


CALLING = """
import zrpc

with zrpc.session() as worker:
    if worker.rank == 0:
        zrpc.rpc_sync("worker1", max, args=(1, 2))
"""


def traced(path: Path) -> tuple[set[str], set[str]]:
    """Returns the workers in a trace, and what they did."""
    events = json.loads(path.read_text())["traceEvents"]
    workers = {e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
    return workers, {event["name"] for event in events if event["ph"] == "X"}


@pytest.mark.parametrize("by_launcher", [True, False], ids=["--trace", "ZRPC_TRACE"])
def test_a_trace_of_the_whole_run(tmp_path: Path, by_launcher: bool) -> None:
    (tmp_path / "calling.py").write_text(CALLING)
    folder = tmp_path / "traces"
    options = ["--trace", "trace.json"] if by_launcher else []
    env = {} if by_launcher else {"ZRPC_TRACE": str(folder)}
    code, _, err = run(
        *("launch", "-n", "2", *options, "calling.py"), cwd=tmp_path, forked=True, **env
    )
    assert code == 0, err
    workers, did = traced((tmp_path if by_launcher else folder) / "trace.json")
    assert workers == {"worker0", "worker1"}
    assert {"rpc_sync#max(worker0 -> worker1)", "max"} <= did
    file = json.loads(((tmp_path if by_launcher else folder) / "trace.json").read_text())
    rows = {(e["pid"], e["tid"]) for e in file["traceEvents"] if e["ph"] == "X"}
    named = {(e["pid"], e["tid"]) for e in file["traceEvents"] if e["name"] == "thread_name"}
    assert rows <= named  # also the rows of threads that had ended when the trace was written
    if by_launcher:
        assert "the trace of 2 of 2 workers is in trace.json" in err
        assert not folder.exists()


def test_a_trace_that_cannot_be_written_is_known_before_any_worker_starts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')")
    code, out, err = run("launch", "--trace", "missing/trace.json", "script.py", cwd=tmp_path)
    assert code == 2
    assert "started" not in out
    assert "missing/trace.json" in err


KILLED = """
    import os, pathlib, signal, time
    import zrpc

    with zrpc.session() as worker:
        if worker.rank == 1:
            with zrpc.span("the last thing"):
                pass
            [path] = pathlib.Path(os.environ["ZRPC_TRACE"]).glob("worker1-*.running")
            while "the last thing" not in path.read_text():  # it is written soon after
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
"""


RESTARTED = """
    import os, sys
    import zrpc

    with zrpc.session():
        pass
    sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


def test_a_trace_counts_a_restarted_worker_once(tmp_path: Path) -> None:
    (tmp_path / "restarted.py").write_text(dedent(RESTARTED))
    options = ["--max-restarts", "1", "--trace", "trace.json"]
    code, _, err = run("launch", *options, "restarted.py", cwd=tmp_path, forked=True)
    assert code == 0, err
    assert "the trace of 1 of 1 workers is in trace.json" in err


def test_ctrl_c_while_the_command_is_imported_has_the_same_exit_code() -> None:
    code = """
import signal, sys
from zrpc.cli import main
class Interrupts:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "zrpc.cli.launch":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupts)
main(["launch", "script.py"])
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_trace_that_cannot_be_written_at_the_end(tmp_path: Path) -> None:
    script = "import os; os.remove('trace.json'); os.mkdir('trace.json'); raise SystemExit(3)"
    (tmp_path / "s.py").write_text(script)
    code, _, err = run("launch", "--trace", "trace.json", "s.py", cwd=tmp_path)
    assert code == 3  # that of the worker
    assert "the trace trace.json can't be written: " in err
    assert sorted(os.listdir(tmp_path)) == ["s.py", "trace.json"]


def test_the_trace_of_a_killed_worker_is_there_up_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(dedent(KILLED))
    code, _, err = run(
        *("launch", "-n", "2", "--trace", "trace.json", "killed.py"), cwd=tmp_path, forked=True
    )
    assert code == 128 + 9, err
    workers, did = traced(tmp_path / "trace.json")
    assert workers == {"worker0", "worker1"}
    assert "the last thing" in did
    missing = json.loads((tmp_path / "trace.json").read_text())["otherData"]["missing"]
    why = "worker1 (rank 1): it was killed, or runs on; what it did last is missing"
    assert why in missing
    assert f"zrpc launch: {why}" in err
