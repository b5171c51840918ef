"""Hosts on this machine: network namespaces that a thread connects, packet by packet.

So it can lose packets in one direction, and refuse connections as a firewall does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from enum import Enum

import pytest

from tests.transport.two_hosts import ip, namespaces, plug_in

__all__ = ["Path", "Switch", "address_of", "connected"]

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
# Large packets, since each costs the thread some microseconds.
_MTU = 60_000
_LARGE = 1000
_JOIN_SECONDS = 30.0
_TCP = 6
_SYN, _RST, _ACK = 0x02, 0x04, 0x10


class Path(Enum):
    """What happens to packets from one host to another."""

    GOOD = "arrive"
    LOST = "are lost"
    # As by a tunnel behind a firewall that drops the messages about that.
    LARGE_LOST = "are lost if they are large"
    # As by a firewall that rejects with a TCP reset: new connections only, but for one port.
    REFUSED = "open no connection"


def address_of(host: int) -> str:
    """Returns the address of a host."""
    return f"10.78.0.{host + 1}"


class Switch:
    """Carries packets between hosts, in a thread.

    Args:
        names: the namespaces of the hosts.
        open_port: a port to which `Path.REFUSED` lets connections through.
    """

    def __init__(self, names: Sequence[str], open_port: int) -> None:
        self._open_port = open_port
        # Replaced as a whole. The thread reads it for each packet.
        self._paths: dict[tuple[int, int], Path] = {}
        self._ends: list[int] = []
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="switch")
        for host, name in enumerate(names):
            self._plug_in(host, name)
        self._thread.start()

    def _plug_in(self, host: int, name: str) -> None:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._ends.append(end)
        device = f"zrpc{os.getpid() % 10**6}-{host}"
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        ip("link", "set", device, "mtu", str(_MTU), "netns", name, "name", "cable")
        plug_in(name, address_of(host))

    def set(self, path: Path, sender: int, receiver: int) -> None:
        """Sets what happens to packets from one host to another."""
        self._paths = {**self._paths, (sender, receiver): path}

    def mend(self) -> None:
        """Lets all packets arrive."""
        self._paths = {}

    def close(self) -> None:
        """Stops the thread."""
        os.write(self._stopped, b"x")
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        for end in (*self._ends, self._stop, self._stopped):
            os.close(end)

    def _carry(self) -> None:
        hosts = {socket.inet_aton(address_of(host)): host for host in range(len(self._ends))}
        while True:
            ready, _, _ = select.select([*self._ends, self._stop], [], [])
            if self._stop in ready:
                return
            for sender, end in enumerate(self._ends):
                if end not in ready:
                    continue
                packet = os.read(end, 1 << 16)
                receiver = hosts.get(packet[16:20])
                if packet[0] >> 4 == 4 and receiver is not None:
                    self._forward(packet, sender, receiver)

    def _forward(self, packet: bytes, sender: int, receiver: int) -> None:
        path = self._paths.get((sender, receiver), Path.GOOD)
        if path is Path.LOST or (path is Path.LARGE_LOST and len(packet) > _LARGE):
            return
        to = receiver
        if path is Path.REFUSED and opens_connection(packet, self._open_port):
            packet, to = reset(packet), sender
        # If the queue there is full, the packet is lost.
        with contextlib.suppress(OSError):
            os.write(self._ends[to], packet)


def opens_connection(packet: bytes, but_to: int) -> bool:
    """Returns whether a packet opens a TCP connection, to another port than ``but_to``."""
    start = 4 * (packet[0] & 15)
    if packet[9] != _TCP:
        return False
    port, flags = int.from_bytes(packet[start + 2 : start + 4], "big"), packet[start + 13]
    return flags & (_SYN | _ACK) == _SYN and port != but_to


def reset(packet: bytes) -> bytes:
    """Returns the packet that refuses the connection which ``packet`` opens."""
    start = 4 * (packet[0] & 15)
    source, target = packet[12:16], packet[16:20]
    source_port, target_port, number = struct.unpack_from("!HHI", packet, start)
    head = struct.pack(
        "!HHIIBBHHH",
        target_port, source_port, 0, (number + 1) % (1 << 32), 5 << 4, _RST | _ACK, 0, 0, 0,
    )  # fmt: skip
    pseudo = target + source + struct.pack("!HH", _TCP, len(head))
    head = head[:16] + struct.pack("!H", _checksum(pseudo + head)) + head[18:]
    fields = (0x45, 0, 20 + len(head), 0, 0, 64, _TCP, 0, target, source)
    header = struct.pack("!BBHHHBBH4s4s", *fields)
    return header[:10] + struct.pack("!H", _checksum(header)) + header[12:] + head


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


@contextlib.contextmanager
def connected(count: int, open_port: int) -> Iterator[tuple[list[str], Switch]]:
    """Yields the namespaces of new hosts, and their switch; skips the test if that can't be."""
    with namespaces(count) as names:
        try:
            switch = Switch(names, open_port)
        except OSError as error:
            pytest.skip(f"hosts with a switch need TUN devices: {error}")
        try:
            yield names, switch
        finally:
            switch.close()
