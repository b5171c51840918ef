"""Finds the running workers of this user on this host, and asks what they are doing."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from zrpc.errors import AuthenticationError
from zrpc.services.inspection.listener import NUMBERS, OTHERS, SELF, SOCKET, peer_of
from zrpc.services.inspection.snapshot import Member, Snapshot
from zrpc.transport.address import check_private, is_alive, private_directories
from zrpc.wire.member_id import MemberId

_EXITED = "its process has exited"
_NOT_REACHED = "it is on another host, and did not answer the workers here in time"

# How many workers here ask the same question to those on other hosts: the network may be cut
# between two workers alone.
_ASK_AT_ONCE = 2

# Lists the sockets that are bound on this host.
_BOUND = "/proc/net/unix"


@dataclass(slots=True)
class Answer:
    """The result of asking one worker.

    Attributes:
        directory: the worker's private directory.
        pid: its process id; 0 if not known.
        snapshots: the worker's own, or those of workers on other hosts that it has asked.
        problem: why there is no snapshot; empty if there is one.
    """

    directory: str
    pid: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    problem: str = ""


@dataclass(slots=True)
class MeshView:
    """One mesh, as far as its workers answered; all attributes by member.

    Attributes:
        snapshots: the snapshots of the workers that answered.
        silent: why there is no snapshot of each of the others.
        names: the names of all workers.
        pids: the process ids of the workers on this host.
        directories: the private directories of the workers on this host; not by member.
    """

    snapshots: dict[MemberId, Snapshot]
    silent: dict[MemberId, str] = field(default_factory=dict)
    names: dict[MemberId, str] = field(default_factory=dict)
    pids: dict[MemberId, int] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)

    def has_worker(self, workers: Collection[str]) -> bool:
        """Returns whether it has one of these names or process ids, or none is given."""
        known = {*map(str, self.pids.values()), *self.names.values()}
        return not workers or bool(known & set(workers))

    def seen_again(self, timeout: float) -> MeshView:
        """Returns the same mesh as it is now, as far as it is on this host."""
        answers = ask([Path(s.directory) for s in self.snapshots.values() if s.directory], timeout)
        snapshots = {s.member: s for answer in answers for s in answer.snapshots}
        return MeshView(snapshots, names=self.names)

    def ask_other_hosts(self, timeout: float, question: str = OTHERS) -> None:
        """Asks workers that can't be reached from here through others, for ``timeout`` seconds.

        For each that does not answer, the others say what they last heard of it.
        """
        local = [Path(s.directory) for s in self.snapshots.values() if s.directory]
        if not local or _NOT_REACHED not in self.silent.values():
            return
        answers = ask(local[:_ASK_AT_ONCE], timeout, question)
        for snapshot in (snapshot for answer in answers for snapshot in answer.snapshots):
            if self.silent.pop(snapshot.member, None) is not None:
                self.snapshots[snapshot.member] = snapshot
        for member, why in self.silent.items():
            if why == _NOT_REACHED:
                self.silent[member] = f"{why}; {self._last_sign(member)}"

    def _last_sign(self, member: MemberId) -> str:
        """Returns what the workers that answered know of one that did not."""
        signs = [
            (other.silence, snapshot.name)
            for snapshot in self.snapshots.values()
            for other in snapshot.members
            if other.member == member and other.silence is not None
        ]
        if not signs:
            return "no worker that answered has heard from it"
        silence, name = min(signs)
        if not silence:
            return f"{name} gets its heartbeats: its process runs, or was stopped seconds ago"
        return (
            f"{name} last heard from it {silence:.1f} s ago: its process is stopped, or the "
            "network to it is cut"
        )


def find_meshes(
    workers: Collection[str], timeout: float, numbers: bool = False
) -> tuple[list[MeshView], list[Answer]]:
    """Finds and asks this user's meshes that have a worker on this host.

    Args:
        workers: only meshes with a worker of these process ids or names; empty for all.
        timeout: seconds for the answers of the workers here, and again for those elsewhere.
        numbers: whether to ask for their numbers, and not for what they do.

    Returns:
        The meshes, and the workers on this host that belong to none that is known.

    Raises:
        LookupError: there are none.
    """
    kind = NUMBERS if numbers else ""
    found, failed = meshes(ask(directories(), timeout, SELF + kind))
    chosen = [mesh for mesh in found if mesh.has_worker(workers)]
    failed = [answer for answer in failed if not workers or str(answer.pid) in workers]
    if not chosen and not failed:
        suffix = f" with {' or '.join(workers)}" if workers else ""
        raise LookupError(f"no running mesh of this user{suffix} was found on this host")
    for mesh in chosen:
        mesh.ask_other_hosts(timeout, OTHERS + kind)
    return chosen, failed


def directories() -> list[Path]:
    """Returns the private directories of this user's live workers, wherever they lie."""
    found = {*private_directories(), *_bound_directories()}
    return sorted(path for path in found if _is_ours(path) and is_alive(path))


def _bound_directories() -> Iterable[Path]:
    """Yields the directories whose sockets Linux lists; our temporary directory may differ."""
    try:
        lines = Path(_BOUND).read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        path = line.split(maxsplit=7)[7:]
        if path and path[0].endswith(f"/{SOCKET}"):
            yield Path(path[0]).parent


def _is_ours(path: Path) -> bool:
    try:
        check_private(path)
    except AuthenticationError:
        return False
    return os.path.isdir(path)  # False if we may not look, unlike that of a Path


def ask(paths: Sequence[Path], timeout: float, question: str = SELF) -> list[Answer]:
    """Asks the workers with these private directories, all at the same time.

    The timeout, in seconds, is for all together. The question is about themselves, or about workers
    on other hosts. The answers come in the order of the paths.
    """
    with ThreadPoolExecutor(max(1, len(paths))) as threads:
        return list(threads.map(partial(_ask, timeout=timeout, question=question), paths))


def _ask(path: Path, timeout: float, question: str) -> Answer:
    """Asks one worker; returns its answer, as far as it has arrived in time."""
    answer, data, ended = Answer(str(path)), b"", False
    end = time.monotonic() + timeout
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path / SOCKET))
            answer.pid, user = peer_of(connection)
            if user != os.geteuid():
                raise OSError(errno.EPERM, f"its process is of user {user}")
            connection.sendall(f"{question}\n".encode())
            with contextlib.suppress(TimeoutError):
                while not ended and (left := end - time.monotonic()) > 0:
                    connection.settimeout(left)
                    received = connection.recv(1 << 16)
                    data, ended = data + received, not received
        whole, _, _ = data.rpartition(b"\n")
        answer.snapshots = [Snapshot.parse(line) for line in whole.splitlines()]
        if not answer.snapshots:
            exited = "it exited while it was asked"
            answer.problem = exited if ended else _why_silent(answer.pid, timeout)
    except BlockingIOError:
        answer.problem = "too many ask it already, and it answers none of them"
    except FileNotFoundError:
        answer.problem = "it can't be asked: it is starting or exiting"
    except OSError as error:
        answer.problem = f"it can't be asked: {error.strerror}"
    except ValueError as error:
        answer.problem = str(error)
    return answer


def _why_silent(pid: int, timeout: float) -> str:
    if _state(pid) in ("T", "t"):
        return "its process is stopped (SIGSTOP, or a debugger)"
    return (
        f"no answer within {timeout:g} s: its Python does not get to run, as when a C "
        f"function holds the interpreter's lock; `py-spy dump --pid {pid}` may show where"
    )


def _state(pid: int) -> str:
    """Returns the state of a process, a letter as in ps; empty if not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def meshes(answers: Sequence[Answer]) -> tuple[list[MeshView], list[Answer]]:
    """Groups the answers by mesh; the second list is of those that belong to no known mesh."""
    found: list[MeshView] = []
    for answer in answers:
        for snapshot in answer.snapshots:
            here = {member.directory for member in snapshot.members if member.same_host}
            view = next((each for each in found if each.directories & here), None)
            if view is None:
                found.append(view := MeshView({}))
            view.directories |= here
            view.snapshots[snapshot.member] = snapshot
            view.pids[snapshot.member] = answer.pid
            view.names |= {member.member: member.name for member in snapshot.members}
    by_directory = {answer.directory: answer for answer in answers}
    for view in found:
        view.snapshots = dict(sorted(view.snapshots.items()))
        members = [member for each in view.snapshots.values() for member in each.members]
        for member in sorted(members, key=lambda member: member.member):
            if member.member not in view.snapshots:
                _note_silence(view, member, by_directory.get(member.directory))
    known = {directory for view in found for directory in view.directories}
    return found, [answer for answer in answers if answer.directory not in known]


def _note_silence(view: MeshView, member: Member, asked: Answer | None) -> None:
    """Notes why a member has not answered, as the first worker that lists it knows."""
    if asked is not None and member.same_host:
        view.silent.setdefault(member.member, asked.problem)
        view.pids[member.member] = asked.pid
    else:
        unreached = _EXITED if member.same_host else _NOT_REACHED
        view.silent.setdefault(member.member, member.lost or unreached)
