"""What Linux's /proc tells of processes and descriptors; elsewhere, that there are none."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = [
    "children",
    "command_of",
    "descriptors",
    "native_threads",
    "session_members",
    "socket_names",
    "state_of",
]


def descriptors() -> dict[int, str]:
    """This process's open descriptors, and what each points to."""
    found = {}
    for fd in _listed("/proc/self/fd"):
        # It may be gone, as the one by which the directory was read.
        with contextlib.suppress(OSError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def native_threads(prefix: str) -> dict[int, str]:
    """This process's threads whose names, as the system knows them, begin with ``prefix``."""
    found = {}
    for tid in _listed("/proc/self/task"):
        name = _text(f"/proc/self/task/{tid}/comm").strip()
        if name.startswith(prefix):
            found[int(tid)] = name
    return found


def children(parent: int | None = None) -> list[int]:
    """The processes whose parent is this process, or ``parent``; ended ones included."""
    wanted = str(os.getpid() if parent is None else parent)
    return [pid for pid, stat in _stats() if stat[1] == wanted]


def session_members(session: int) -> list[int]:
    """The processes that belong to a session."""
    return [pid for pid, stat in _stats() if stat[3] == str(session)]


def command_of(pid: int) -> str | None:
    """The command line of a process; None where there is no such process."""
    stat = _stat(pid)
    if stat is None:
        return None
    if stat[0] == "Z":
        return f"{_text(f'/proc/{pid}/comm').strip()} (has ended; nobody has waited for it)"
    return _text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def state_of(pid: int) -> str:
    """The state of a process, a letter as in ps; empty where there is no such process."""
    stat = _stat(pid)
    return stat[0] if stat else ""


def socket_names() -> dict[str, str]:
    """The path of each Unix socket and the addresses of each TCP socket of this system.

    The keys are what a descriptor points to: ``socket:[4711]``.
    """
    names = {}
    for line in _text("/proc/self/net/unix").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            names[f"socket:[{fields[6]}]"] = f"bound to {fields[7]}"
    for line in _text("/proc/self/net/tcp").splitlines()[1:]:
        fields = line.split()
        local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
        names[f"socket:[{fields[9]}]"] = f"tcp port {local}, remote port {remote}"
    return names


def _stats() -> list[tuple[int, list[str]]]:
    pids = [int(name) for name in _listed("/proc") if name.isdigit()]
    return [(pid, stat) for pid in pids if (stat := _stat(pid)) is not None]


def _stat(pid: int) -> list[str] | None:
    """State, parent, process group, session, … of a process."""
    # The name before these may hold spaces and parentheses.
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields or None


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
