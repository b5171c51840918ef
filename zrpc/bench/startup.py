"""Workloads: starting and stopping many workers. Run as a program, it is one of the workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from zrpc.bench.library import WorkerSettings, load
from zrpc.bench.session import Sample, Session

_BARE = "bare"


def start_and_stop(session: Session, count: int) -> Sample:
    """Runs ``zrpc launch`` or ``torchrun`` with workers that form a mesh and leave it."""
    return _time_launch(session.participant, count, session.participant)


def launch_bare(session: Session, count: int) -> Sample:
    """Runs ``zrpc launch`` or ``torchrun`` with processes that import torch and exit."""
    return _time_launch(session.participant, count, _BARE)


def _time_launch(participant: str, count: int, program: str) -> Sample:
    launchers = {
        "zrpc": ["-m", "zrpc.cli", "launch", "--nprocs", str(count)],
        "torch": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)],
    }
    command = [sys.executable, *launchers[participant], "-m", "zrpc.bench.startup", program]
    before = time.perf_counter()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    taken = time.perf_counter() - before
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {_likely_cause(done.stderr)}")
    return Sample.single(taken)


def _likely_cause(output: str) -> str:
    """Returns the line of a failed launch's output that is most likely the cause."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return next(iter(errors), lines[-1] if lines else "no output")


def main(program: str) -> None:
    """Joins the mesh of the launcher and leaves it, or only imports torch."""
    if program == _BARE:
        import torch  # noqa: F401

        return
    library = load(program)
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    library.join(WorkerSettings(program, size, rank=rank))
    library.leave()


if __name__ == "__main__":
    main(sys.argv[1])
