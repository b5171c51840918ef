"""Two hosts on one machine: two network namespaces of Linux with a cable between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

# The interface in each of them, and the addresses.
CABLE = "cable"
ADDRESSES = ("10.78.0.1", "10.78.0.2")

_COMMAND_SECONDS = 30.0
_LINK_CHECK_SECONDS = 0.01


class NamespaceError(Exception):
    """The error if this user or this system can't make network namespaces."""


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Makes two connected namespaces; removes them afterwards. Gives their names.

    In the main thread only: meanwhile SIGTERM and SIGHUP raise, since else nothing removes them.

    Raises:
        NamespaceError: they can't be made.
        SystemExit: one of these signals has arrived.
    """
    stops = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = [signal.signal(number, _exit) for number in stops]
    names = [f"zrpc-bench-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        peer = ["peer", "name", CABLE, "netns", names[1]]
        _ip("link", "add", CABLE, "netns", names[0], "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                _ip("-n", name, "link", "set", device, "up")
        for name in names:
            _await_link(name)
        yield names
    finally:
        for name in names:
            with contextlib.suppress(NamespaceError):
                _ip("netns", "delete", name)
        for number, handler in zip(stops, before, strict=True):
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def enter(name: str) -> None:
    """Moves this thread into a namespace; threads that it starts are in it too.

    Raises:
        OSError: there is no such namespace, or this user may not enter it.
    """
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
    finally:
        os.close(fd)


def _await_link(name: str) -> None:
    """Waits until the cable works: Linux takes up to a second to say so.

    torch's RPC passes by an interface that is not operational, and takes loopback without a word.
    """
    deadline = time.monotonic() + _COMMAND_SECONDS
    while "UP" not in (state := _ip("-n", name, "-brief", "link", "show", "dev", CABLE)).split():
        if time.monotonic() > deadline:
            raise NamespaceError(f"expected {CABLE} to be up, found: {state.strip()}")
        time.sleep(_LINK_CHECK_SECONDS)


def _ip(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["ip", *arguments], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        ).stdout
    except subprocess.CalledProcessError as error:
        raise NamespaceError(
            f"expected to make network namespaces, but `ip {' '.join(arguments)}` failed: "
            f"{error.stderr.strip()}: run as root"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NamespaceError(f"network namespaces need `ip`, of iproute2: {error}") from error
