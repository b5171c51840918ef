"""Start and stop of many workers by a launcher; as a program, what each worker does."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from zrpc.bench.effort import Sample
from zrpc.bench.library import load
from zrpc.bench.session import Session

__all__ = ["launch_bare", "main", "start_and_stop"]

_BARE = "bare"


def start_and_stop(session: Session, count: int) -> Sample:
    """``zrpc launch`` or ``torchrun``, of workers that form a mesh and leave it."""
    return _launch(session.participant, count, session.participant)


def launch_bare(session: Session, count: int) -> Sample:
    """The same, of processes that import torch and end."""
    return _launch(session.participant, count, _BARE)


def _launch(participant: str, count: int, what: str) -> Sample:
    launchers = {
        "zrpc": ["-m", "zrpc.cli", "launch", "--nprocs", str(count)],
        "torch": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)],
    }
    command = [sys.executable, *launchers[participant], "-m", "zrpc.bench.start", what]
    before = time.perf_counter()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    taken = time.perf_counter() - before
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {_cause(done.stderr)}")
    return Sample(taken, taken, 1)


def _cause(output: str) -> str:
    """The line of a failed launch's output that most likely says why."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return next(iter(errors), lines[-1] if lines else "no output")


def main(what: str) -> None:
    """One worker: joins the mesh of the launcher and leaves it, or only imports torch."""
    if what == _BARE:
        import torch  # noqa: F401

        return
    library = load(what)
    library.join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), tcp=False)
    library.leave()


if __name__ == "__main__":
    main(sys.argv[1])
