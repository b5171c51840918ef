"""Clusters of real engines on this machine. A test is skipped if its engine isn't installed."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.waiting import until
from zrpc.launch.port import ReservedPort

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 120
_SLURM = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
# How long a requeued job waits: until the credentials of its first start have expired.
_REQUEUE_SECONDS = 30
# The loopback addresses are the names of the nodes, so that each host can be found by its name.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire={requeue_seconds}
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
FirstJobId={first_job}
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=127.0.0.[1-2] Default=YES State=UP
"""


def need(package: str, *programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install {package}")


def engine_environment(**more: str) -> dict[str, str]:
    """The environment without what another engine or a launcher has set."""
    prefixes = ("PYTHONUNBUFFERED", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "ZRPC_", "SLURM_")
    prefixes += ("OMPI_", "PMI")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)} | more


def run(*command: str, env: dict[str, str], cwd: Path | None = None) -> list[str]:
    """Runs a command of an engine; returns the lines of its output, sorted."""
    done = subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """A Slurm cluster of two nodes on this machine; gives the environment for its commands."""
    need("slurm-wlm munge", *_SLURM)
    if os.geteuid() != 0:
        pytest.skip("needs root: slurmd starts tasks as other users")
    with ExitStack() as stack:
        # Not pytest's own directory: its path is too long for a socket.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm")))
        directory.chmod(0o755)  # munged refuses others
        (directory / "state").mkdir()
        ports = [stack.enter_context(ReservedPort()) for _ in range(3)]
        numbers = [port.number for port in ports]
        configuration = directory / "slurm.conf"
        configuration.write_text(
            _CONFIGURATION.format(
                host=socket.gethostname(),
                ports=numbers,
                directory=directory,
                requeue_seconds=_REQUEUE_SECONDS,
                # Jobs meet at ports that depend on their ids: those of another cluster on this
                # machine, which other tests run, differ.
                first_job=random.randrange(1, 1_000_000),
            )
        )
        env = engine_environment(SLURM_CONF=str(configuration))
        for port in ports:
            port.close()  # Slurm doesn't share them
        for command in _daemons(directory):
            log = stack.enter_context((directory / f"{command[0]}{command[-1][-1]}.log").open("w"))
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            stack.callback(_stop, daemon)
            if command[0] == "munged":
                until((directory / "munge.socket").exists, "munged", within=SECONDS)
        until(lambda: _idle_nodes(env) == 2, "idle nodes", within=SECONDS)
        yield env


def _daemons(directory: Path) -> list[list[str]]:
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = ("pid-file", "log-file", "seed-file")
    options = [f"--{name}={directory}/munge.{name}" for name in files]
    options += [f"--key-file={key}", f"--socket={directory}/munge.socket"]
    return [
        ["munged", "--foreground", *options],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "127.0.0.1"],
        ["slurmd", "-D", "-N", "127.0.0.2"],
    ]


def _idle_nodes(env: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], env=env, capture_output=True, text=True, timeout=SECONDS
    )
    return done.stdout.split().count("idle")


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(30)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(30)
