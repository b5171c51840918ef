"""Two hosts on this machine: two network namespaces, and a cable that can be bad."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

SOON = 30.0  # two programs start
ADDRESSES = ("10.77.0.1", "10.77.0.2")

# What a program does first: it joins its host's namespace.
ENTER = """
import ctypes, os, sys
fd = os.open("/run/netns/" + os.environ["NAMESPACE"], os.O_RDONLY)
if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
os.close(fd)
"""

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LARGEST_PACKET = 1 << 16


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


def plug_in(name: str, address: str) -> None:
    """Brings up a host's end of the cable."""
    ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
    for device in ("lo", "cable"):
        ip("-n", name, "link", "set", device, "up")


def connect_by_veth(names: list[str]) -> None:
    """Connects two namespaces by a cable of the kernel."""
    try:
        peer = ["peer", "name", "cable", "netns", names[1]]
        ip("link", "add", "cable", "netns", names[0], "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            plug_in(name, address)
    except OSError as error:
        pytest.skip(f"two hosts need veth devices: {error}")


class Cable(Protocol):
    """A cable between two hosts whose quality can be set."""

    def set(self, loss: float, delay: float) -> None:
        """Sets the loss and the delay of packets sent at either end.

        Args:
            loss: the share of packets that are lost; 1 cuts the cable silently.
            delay: seconds, each way.
        """


class NetemCable:
    """A cable of the kernel, with ``tc netem`` at both ends."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def set(self, loss: float, delay: float) -> None:
        for name in self._names:
            what = ["delay", f"{delay * 1000:g}ms", "loss", f"{loss * 100:g}%"]
            run("tc", "-n", name, "qdisc", "replace", "dev", "cable", "root", "netem", *what)


class RelayCable:
    """Two TUN devices, and a thread that carries packets between them, if there is no netem."""

    def __init__(self, names: list[str]) -> None:
        self._ends: list[int] = []
        # Read by the thread for each packet; replaced as a whole.
        self._quality = (0.0, 0.0)
        self._rng = random.Random(77)
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="cable")
        for number, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._ends.append(end)
            device = f"zrpc{os.getpid() % 10**6}-{number}"
            request = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(end, _TUNSETIFF, request)
            ip("link", "set", device, "netns", name, "name", "cable")
            plug_in(name, address)
        self._thread.start()

    def set(self, loss: float, delay: float) -> None:
        self._quality = (loss, delay)

    def close(self) -> None:
        os.write(self._stopped, b"x")
        if self._thread.ident is not None:
            self._thread.join(SOON)
        for end in (*self._ends, self._stop, self._stopped):
            os.close(end)

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while True:
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([*self._ends, self._stop], [], [], wait)
            if self._stop in ready:
                return
            for end in ready:
                packet = os.read(end, _LARGEST_PACKET)
                loss, delay = self._quality
                if self._rng.random() >= loss:
                    there = self._ends[1 - self._ends.index(end)]
                    due = time.monotonic() + delay
                    heapq.heappush(under_way, (due, next(numbers), there, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, there, packet = heapq.heappop(under_way)
                with contextlib.suppress(OSError):  # the queue there is full: the packet is lost
                    os.write(there, packet)


@contextlib.contextmanager
def bad_cable(names: list[str]) -> Iterator[Cable]:
    """Connects two namespaces by such a cable; skips the test if that is not possible."""
    try:
        run("tc", "-n", names[0], "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except OSError as error:
        missing = str(error)
    else:
        run("tc", "-n", names[0], "qdisc", "delete", "dev", "lo", "root")
        connect_by_veth(names)
        yield NetemCable(names)
        return
    try:
        relay = RelayCable(names)
    except OSError as error:
        pytest.skip(f"neither `tc netem` ({missing}) nor TUN devices ({error}) are to be had")
    try:
        yield relay
    finally:
        relay.close()
