"""Real processes. Each is marked by a variable of its test, so that leaks are found."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.waiting import until
from tests.support.warm import buffered, warm_commands
from zrpc.launch import Starter, Task

DEADLINE = 30.0
Write = Callable[..., str]
Start = Callable[..., "Launched"]
_MARK = "ZRPC_TEST_MARK"
_PLAIN = ("PYTHONUNBUFFERED", "OMP_NUM_THREADS", "NO_COLOR", "ZRPC_START_METHOD", "RANK")
DRIVER = """\
import json, sys
from zrpc.launch import Job, launch
sys.exit(launch(Job(**json.loads(sys.argv[1]))))
"""


class Marked:
    """Finds the processes whose environment has this test's mark."""

    def __init__(self) -> None:
        self.value = uuid.uuid4().hex

    @property
    def env(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in _PLAIN}
        return {**inherited, _MARK: self.value}

    def pids(self) -> list[int]:
        wanted = f"{_MARK}={self.value}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                        found.append(int(entry))
        return found


@pytest.fixture
def marked() -> Iterator[Marked]:
    """Fails the test if a process with the mark is left at its end."""
    mark = Marked()
    yield mark
    left: list[int] = []
    try:
        until(lambda: not mark.pids(), "no process is left", within=5.0)
    finally:
        left = mark.pids()
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a script and returns its path."""

    def write(source: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        return str(path)

    return write


class Launched:
    """A launcher in a process of its own."""

    def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE} | options
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, **streams)
        self._seen = b""

    def read_until(self, text: str) -> str:
        """Reads standard output until `text` was seen."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + DEADLINE
        while text.encode() not in self._seen:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in time, but {self._seen!r}"
            data = os.read(fd, 65536)
            assert data, f"no {text!r} before the end, but {self._seen!r} {self.finish()}"
            self._seen += data
        return self._seen.decode()

    def ready(self, count: int = 1) -> None:
        """Waits until each of the first workers has printed that it is ready."""
        for rank in range(count):
            self.read_until(f"[{rank}] ready\n")

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Sends a signal; returns what `finish` does."""
        self.process.send_signal(number)
        return self.finish()

    def finish(self) -> tuple[int, str, str]:
        """Returns the exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=DEADLINE)
        text = (self._seen + (out or b"")).decode(errors="surrogateescape")
        return self.process.returncode, text, err.decode(errors="surrogateescape")


@pytest.fixture
def start(marked: Marked, tmp_path: Path, write: Write) -> Iterator[Callable[..., Launched]]:
    """Starts a launcher for a job, of a script unless it has another target.

    Modules are preloaded only if the job names some.

    If a job preloads torch, it and its fork server are forked from a process that has torch. Then
    nothing looks for processes that are left.
    """
    started: list[Launched] = []
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)

    def start(source: str = "", *, popen: Any = (), environ: Any = (), **job: Any) -> Launched:
        target = write(source, f"script{len(started)}.py")
        text = json.dumps({"target": target, "preload": [], **job})
        env = {**marked.env, **dict(environ)}
        python = sys.executable
        if "torch" in job.get("preload", ()):
            python, env = warm_commands().python, buffered(env)
        started.append(Launched([python, str(driver), text], env, **dict(popen)))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
        with contextlib.suppress(ValueError):
            launched.process.communicate(timeout=DEADLINE)


# A worker that prints that it is ready, and then waits for a signal.
WAITS = """
    import os, signal, subprocess, sys, time
    def show(number, frame):
        os.write(1, f"got {{signal.Signals(number).name}}\\n".encode())
    {before}
    print("ready")
    while True:
        time.sleep(0.1)  # a signal that comes just before it does not end it
"""


@pytest.fixture
def waiting(start: Start) -> Start:
    """Starts a launcher whose workers wait for signals, and waits until they do."""

    def waiting(before: str = "", nprocs: int = 1, **job: Any) -> Launched:
        launched = start(WAITS.format(before=before), nprocs=nprocs, **job)
        launched.ready(nprocs)
        return launched

    return waiting


def outcome(starter: Starter, task: Task, **options: Any) -> tuple[int, str]:
    """Runs a task; returns its exit code and all of its output."""
    with tempfile.TemporaryFile() as file:
        pid = starter.spawn(task, stdout=file.fileno(), stderr=file.fileno(), **options)
        code = starter.wait(pid, DEADLINE)
        file.seek(0)
        return code, file.read().decode()


@pytest.fixture(params=["fork", "spawn"])
def starter(request: pytest.FixtureRequest, marked: Marked) -> Iterator[Starter]:
    """Runs each kind of starter in turn, without preloaded modules."""
    with Starter(request.param, preload=(), env=marked.env) as running:
        yield running
