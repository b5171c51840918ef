"""Pods without Kubernetes: a process in namespaces of its own for each index of a Job.

Each has its own network, process ids, host name, mounts, /tmp and user, and a root file system that
is read-only. What a cluster's name server would answer is in /etc/hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until
from tests.transport.two_hosts import SOON, ip, namespaces, plug_in

_PROGRAMS = ("ip", "unshare", "setpriv", "mount")
# What the image would have. Other users may not see it here, as below /root.
IMAGE = tuple(dict.fromkeys(map(Path, (sys.base_prefix, sys.prefix, Path(__file__).parents[2]))))
# An emptyDir has mode 0777 without the sticky bit; the runtime gives each pod a /dev/shm of 64 MiB.
_CONTAINER = """
set -e
mount --bind {hosts} /etc/hosts
mount -t tmpfs tmpfs /mnt
{keep}
mount -t tmpfs -o mode=0777 tmpfs /tmp
mount -t tmpfs -o mode=1777,size=64m tmpfs /dev/shm
{show}
mount -o remount,ro,bind /
hostname {name}
ip link set lo up
exec setpriv --reuid {uid} --regid {uid} --clear-groups --inh-caps=-all --bounding-set=-all "$@"
"""
_DOMAIN = "default.svc.cluster.local"


@dataclass
class Pods:
    """The pods of an indexed Job.

    Args:
        job: the manifest.
        secrets: the values of secrets, by name and key.
        directory: for files of the test.
    """

    job: dict[str, Any]
    secrets: dict[tuple[str, str], str]
    directory: Path
    _networks: list[str] = field(default_factory=list)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, cwd: Path, command: list[str] | None = None, first: int = 0) -> None:
        """Starts the container of each pod, from ``first`` on; ``command`` replaces the Job's."""
        spec = self.job["spec"]["template"]["spec"]
        [container] = spec["containers"]
        size = len(self._networks)
        for index in range(first, size):
            name = f"{self.job['metadata']['name']}-{index}"
            hosts = self.directory / f"hosts{index}"
            hosts.write_text(self._hosts(spec["subdomain"], index, size))
            keep, show = _mounts_of_image()
            script = _CONTAINER.format(
                hosts=hosts, keep=keep, show=show, name=name, uid=20_000 + index
            )
            enter = (
                f"ip netns exec {self._networks[index]} unshare --mount --pid --fork --uts --ipc"
            )
            enter += " --mount-proc --kill-child"
            self._processes.append(
                subprocess.Popen(
                    [*enter.split(), "sh", "-c", script, "pod", *(command or container["command"])],
                    env=self._environment(container["env"], index),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def terminate(self) -> None:
        """Sends SIGTERM to the first process of each container as soon as that handles it."""
        for process in self._processes:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            until(lambda path=children: _handles(path, signal.SIGTERM), "handlers", within=4 * SOON)
            os.kill(int(children.read_text()), signal.SIGTERM)

    def outcomes(self) -> list[tuple[int, str]]:
        """Waits for all; returns their exit codes and outputs."""
        outputs = [process.communicate(timeout=4 * SOON)[0] for process in self._processes]
        codes = [process.returncode for process in self._processes]
        return list(zip(codes, outputs, strict=True))

    def _environment(self, variables: list[dict[str, Any]], index: int) -> dict[str, str]:
        """The variables of the manifest, and what Kubernetes and the image add; nothing else."""
        found = {}
        for variable in variables:
            if "value" in variable:
                found[variable["name"]] = variable["value"]
            else:
                key = variable["valueFrom"]["secretKeyRef"]
                found[variable["name"]] = self.secrets[key["name"], key["key"]]
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "HOME": "/", "JOB_COMPLETION_INDEX": str(index), **found}

    def _hosts(self, service: str, own: int, size: int) -> str:
        """What kubelet writes, which is this pod's own name; then what a name server knows."""
        name = self.job["metadata"]["name"]
        order = sorted(range(size), key=lambda index: index != own)
        lines = ["127.0.0.1 localhost"]
        for index in order:
            short = f" {name}-{index}" if index == own else ""
            lines.append(f"{_address(index)} {name}-{index}.{service}.{_DOMAIN}{short}")
        return "\n".join(lines) + "\n"

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """A bridge, and the network namespaces of the pods; skips the test if not permitted."""
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if missing or os.geteuid() != 0:
            pytest.skip(f"pods need root, and {', '.join(missing or _PROGRAMS)}")
        with namespaces(1 + self.job["spec"]["completions"]) as (switch, *self._networks):
            try:
                ip("-n", switch, "link", "add", "bridge", "type", "bridge")
                ip("-n", switch, "link", "set", "bridge", "up")
                for index, name in enumerate(self._networks):
                    port, cable = f"port{index}", ("peer", "name", "cable", "netns", name)
                    ip("-n", switch, "link", "add", port, "type", "veth", *cable)
                    ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                    plug_in(name, _address(index))
            except OSError as error:
                pytest.skip(f"pods need a bridge: {error}")
            try:
                yield
            finally:
                for process in self._processes:
                    process.kill()
                    process.communicate(timeout=SOON)


def _handles(children: Path, number: int) -> bool:
    child = children.read_text().strip()
    status = Path(f"/proc/{child}/status").read_text() if child else "SigCgt:\t0"
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (number - 1) & 1)


def _mounts_of_image() -> tuple[str, str]:
    """The commands that keep the image's directories, and those that put them where they were."""
    keep = [f"mkdir /mnt/{n} && mount --bind '{path}' /mnt/{n}" for n, path in enumerate(IMAGE)]
    closed = {
        next((each for each in reversed(path.parents) if not each.stat().st_mode & 1), None)
        for path in IMAGE
        if not path.is_relative_to("/tmp")
    }
    show = [f"mount -t tmpfs -o mode=0755 tmpfs '{each}'" for each in sorted(closed - {None})]
    for number, path in enumerate(IMAGE):
        show.append(f"mkdir -p '{path}' && mount --bind /mnt/{number} '{path}'")
    return "\n".join(keep), "\n".join(show)


def _address(index: int) -> str:
    return f"10.78.0.{index + 1}"
