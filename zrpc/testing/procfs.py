"""Reads Linux's /proc for processes and descriptors; on other systems finds none."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def descriptors() -> dict[int, str]:
    """Returns this process's open descriptors, and what each points to."""
    found = {}
    for fd in _listed("/proc/self/fd"):
        # It may be closed by now, as the one that listed the directory is.
        with contextlib.suppress(OSError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def polled_by(poller: int) -> set[int]:
    """Returns the descriptors for which an epoll descriptor of this process waits."""
    lines = read_text(f"/proc/self/fdinfo/{poller}").splitlines()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def native_threads(prefix: str) -> dict[int, str]:
    """Returns this process's threads whose names in the system begin with ``prefix``."""
    found = {}
    for tid in _listed("/proc/self/task"):
        name = read_text(f"/proc/self/task/{tid}/comm").strip()
        if name.startswith(prefix):
            found[int(tid)] = name
    return found


def children(parent: int | None = None) -> list[int]:
    """Returns the children of this process or of ``parent``, including zombies."""
    tasks = f"/proc/{parent or 'self'}/task"
    found, before = _children_of(tasks), None
    # A child that ends while the list is read may hide the next one.
    while found != before:
        found, before = _children_of(tasks), found
    return found


def _children_of(tasks: str) -> list[int]:
    # Each child belongs to the thread that forked it.
    texts = (read_text(f"{tasks}/{tid}/children") for tid in _listed(tasks))
    return sorted(int(pid) for text in texts for pid in text.split())


def session_members(session: int) -> list[int]:
    """Returns the processes that belong to a session."""
    return [pid for pid, stat in _stats() if stat[3] == str(session)]


def command_of(pid: int) -> str | None:
    """Returns the command line of a process; None if there is no such process."""
    stat = _stat(pid)
    if stat is None:
        return None
    if stat[0] == "Z":
        return f"{read_text(f'/proc/{pid}/comm').strip()} (a zombie: it was not waited for)"
    return read_text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def state_of(pid: int) -> str:
    """Returns the state of a process, a letter as in ps; empty if there is no such process."""
    stat = _stat(pid)
    return stat[0] if stat else ""


def socket_names() -> dict[str, str]:
    """Returns the path of each Unix socket and the ports of each TCP socket of this system.

    The keys are the targets of descriptors, like ``socket:[4711]``.
    """
    names = {}
    for line in read_text("/proc/self/net/unix").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            names[f"socket:[{fields[6]}]"] = f"bound to {fields[7]}"
    for table in ("tcp", "tcp6"):
        for line in read_text(f"/proc/self/net/{table}").splitlines()[1:]:
            fields = line.split()
            local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
            names[f"socket:[{fields[9]}]"] = f"tcp port {local}, remote port {remote}"
    return names


def read_text(path: str | Path) -> str:
    """Returns the text of a file; empty if it can't be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _stats() -> list[tuple[int, list[str]]]:
    pids = [int(name) for name in _listed("/proc") if name.isdigit()]
    return [(pid, stat) for pid in pids if (stat := _stat(pid)) is not None]


def _stat(pid: int) -> list[str] | None:
    """Returns the state, parent, process group, session, … of a process."""
    # The name before these fields may hold spaces and parentheses.
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields or None


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
