"""The installed command, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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


Launch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Launches a script in a directory of its own; returns its exit code, output and errors.

    With `forked`, the command is forked from a process that has imported torch, and so are its
    workers: for tests whose workers need torch, and that are about these. Otherwise these are new
    interpreters.
    """

    def launch(source: str, *words: str, forked: bool = False, **env: str) -> tuple[int, str, str]:
        (tmp_path / "s.py").write_text(dedent(source))
        method = {} if forked else {"ZRPC_START_METHOD": "spawn"}
        command = ("-m", "zrpc.cli", "launch", *words)
        done = run_python(*command, cwd=tmp_path, warm=forked, **{**method, **env})
        return done.returncode, done.stdout, done.stderr

    return launch


def test_version_is_that_of_the_distribution() -> None:
    done = subprocess.run([ZRPC, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"zrpc, version {version('torch-zrpc')}\n"


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([ZRPC, "--version"], stdout=full, stderr=subprocess.PIPE, text=True)
    expected = "Error: could not write: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, expected)


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


def test_an_option_after_the_script_is_noted_unless_it_is_meant_for_that(launch: Launch) -> None:
    for arguments, noted in (
        (["s.py", "--nproc-per-node=2"], "--nproc-per-node=2"),
        (["-n", "1", "s.py", "--nprocs", "2"], None),
        (["s.py", "--lr", "1", "-m", "x"], None),
    ):
        code, out, err = launch("import sys; print(sys.argv[1:])", *arguments)
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
    launch: Launch, what: str, restarts: int
) -> None:
    """Even if it ignores SIGTERM."""
    options = ["-n", "2", "--grace", "3600", "--max-restarts", str(restarts)]
    code, _, err = launch(WAITS_FOR_ZRPC, *options, "s.py", what, forked=True)
    assert code == 3, err


def test_launch_errors_are_explained_without_a_traceback(launch: Launch) -> None:
    for place in ("/dev/null/logs", "/proc/logs"):
        code, _, err = launch("", "--log-dir", place, "s.py")
        assert code == 1
        assert err.startswith(f"Error: the log directory {place} can't be created: ")


def test_a_launcher_without_descriptors_says_which_limit_to_raise(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    command = f"ulimit -n 24 && exec {ZRPC} launch -n 16 --start-method spawn s.py"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr
    assert "raise the limit with `ulimit -n`" in done.stderr


def test_options_after_the_script_are_passed_to_it(launch: Launch, tmp_path: Path) -> None:
    script = """
        import os, sys
        print(*map(os.environ.get, ("ZRPC_WORKER_NAME", "A", "B", "ZRPC_IFACE")), sys.argv)
    """
    options = ["--nprocs", "2", "--name-prefix", "w:", "--env", "A=1", "--env", "B=x=y"]
    options += ["--log-dir", "logs", "--timeout", "60", "--iface", "eth7"]
    argv = ["s.py", "--nprocs", "3", "-m", "--", "--help"]
    code, out, err = launch(script, *options, *argv)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{i}] w:{i} 1 x=y eth7 {argv}" for i in range(2)]
    assert (tmp_path / "logs" / "rank1.out").read_text() == f"w:1 1 x=y eth7 {argv}\n"


def test_module_can_be_launched_and_its_exit_code_is_returned(launch: Launch) -> None:
    code, out, _ = launch("import sys; print(sys.argv[1:]); sys.exit(9)", "-m", "s", "-n", "4")
    assert (code, out) == (9, "[0] ['-n', '4']\n")


def test_workers_come_from_one_process_that_has_imported_torch(launch: Launch) -> None:
    script = "import os, sys; print(os.getppid(), 'torch' in sys.modules)"
    code, out, err = launch(script, "--start-method", "fork", "--nprocs", "2", "s.py")
    assert code == 0, err
    [line] = {line.partition(" ")[2] for line in out.splitlines()}
    assert line.endswith(" True")


CALLING = """
import zrpc

with zrpc.session() as worker:
    if worker.rank == 0:
        zrpc.rpc_sync("worker1", max, args=(1, 2))
"""


class Trace:
    """What is in the file of a trace.

    Attributes:
        workers: the names of the workers.
        did: the names of what they did.
        missing: which workers' traces are not whole, and why.
    """

    def __init__(self, path: Path) -> None:
        file = json.loads(path.read_text())
        events = file["traceEvents"]
        work = [event for event in events if event["ph"] == "X"]
        self.workers = {e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
        self.did = {event["name"] for event in work}
        self.missing = file["otherData"]["missing"]
        # Each has a name, also the rows of threads that had ended when the trace was written.
        rows = {(event["pid"], event["tid"]) for event in work}
        assert rows <= {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}


@pytest.mark.parametrize("by_launcher", [True, False], ids=["--trace", "ZRPC_TRACE"])
def test_a_trace_of_the_whole_run(launch: Launch, tmp_path: Path, by_launcher: bool) -> None:
    folder = tmp_path if by_launcher else tmp_path / "traces"
    options = ["--trace", "trace.json"] if by_launcher else []
    env = {} if by_launcher else {"ZRPC_TRACE": str(folder)}
    code, _, err = launch(CALLING, "-n", "2", *options, "s.py", forked=True, **env)
    assert code == 0, err
    trace = Trace(folder / "trace.json")
    assert trace.workers == {"worker0", "worker1"}
    assert {"rpc_sync#max(worker0 -> worker1)", "max"} <= trace.did
    if by_launcher:
        assert "the trace of 2 of 2 workers is in trace.json" in err
        assert sorted(os.listdir(tmp_path)) == ["s.py", "trace.json"]


def test_a_trace_that_cannot_be_written_is_known_before_any_worker_starts(launch: Launch) -> None:
    code, out, err = launch("print('started')", "--trace", "missing/trace.json", "s.py")
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


def test_a_trace_counts_a_restarted_worker_once(launch: Launch) -> None:
    options = ["--max-restarts", "1", "--trace", "trace.json"]
    code, _, err = launch(RESTARTED, *options, "s.py", forked=True)
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


def test_a_trace_that_cannot_be_written_at_the_end(launch: Launch, tmp_path: Path) -> None:
    script = "import os; os.remove('trace.json'); os.mkdir('trace.json'); raise SystemExit(3)"
    code, _, err = launch(script, "--trace", "trace.json", "s.py", forked=True)
    assert code == 3  # the worker's
    assert "the trace trace.json can't be written: " in err
    assert sorted(os.listdir(tmp_path)) == ["s.py", "trace.json"]


def test_the_trace_of_a_killed_worker_is_there_up_to_its_end(
    launch: Launch, tmp_path: Path
) -> None:
    code, _, err = launch(KILLED, "-n", "2", "--trace", "trace.json", "s.py", forked=True)
    assert code == 128 + 9, err
    trace = Trace(tmp_path / "trace.json")
    assert trace.workers == {"worker0", "worker1"}
    assert "the last thing" in trace.did
    why = "worker1 (rank 1): it was killed, or runs on; what it did last is missing"
    assert why in trace.missing
    assert f"zrpc launch: {why}" in err
