"""Hosts on this machine: network namespaces, which `tests.partitions.network` connects."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOON = 30.0  # two programs start

# What a program does first: it joins its host's namespace.
ENTER = """
import ctypes, os, sys
fd = os.open("/run/netns/" + os.environ["NAMESPACE"], os.O_RDONLY)
if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
os.close(fd)
"""


@dataclass
class Host:
    """A network namespace, and a directory for the sockets in it."""

    namespace: str
    runtime: Path


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def ip(*arguments: str) -> None:
    run("ip", *arguments)


def plug_in(name: str, address: str) -> None:
    """Brings up a host's end of the cable."""
    ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
    for device in ("lo", "cable"):
        ip("-n", name, "link", "set", device, "up")


@contextlib.contextmanager
def namespaces(count: int = 2) -> Iterator[list[str]]:
    """Yields the names of new namespaces; skips the test if none can be made."""
    if shutil.which("ip") is None:
        pytest.skip("several hosts need `ip`, of iproute2")
    names = [f"zrpc-{os.getpid()}-{os.urandom(2).hex()}" for _ in range(count)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except OSError as error:
            pytest.skip(f"several hosts need network namespaces: {error}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=SOON)
