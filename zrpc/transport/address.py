"""Where a worker can be reached on its host, and by whom.

A worker's Unix socket is in a private directory of its own, beside a lock file that the worker
holds as long as it lives. The system releases the lock however the process ends. So a peer on the
same host can check at any time whether a worker lives, without a message to it, and the directory
of a killed worker can be recognized and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import socket
import stat
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from zrpc.errors import AuthenticationError, RpcError

# The sockets for direct connections and for file descriptors, next to that of the inbox.
DIRECT = "direct"
DESCRIPTORS = "files"

_PREFIX = "zrpc-inbox-"
# The owner of what belongs to users outside of a user namespace: root, in most cases.
_UNMAPPED = 65534
_LOCK = "alive"
# A directory without a lock belongs to a worker that is starting, or was killed while starting.
_START_SECONDS = 60
# sun_path holds 108 bytes, with the final zero.
_LONGEST_PATH = 107
# What a socket's path has after that of the parent; each x is a random character.
_LONGEST_END = f"/{_PREFIX}xxxxxxxx/{DIRECT}"
# The parents of private directories if the temporary directory can't be used.
_SECOND_CHOICES = (Path("/tmp"), Path("/dev/shm"))


def _parent() -> Path:
    """Returns the directory in which the private ones are made.

    It is ``ZRPC_RUNTIME_DIR``, unless that makes a socket's path too long, or the temporary
    directory, or another one if that can't be used. A temporary directory in which others could
    replace our files is not used; a volume of Kubernetes mounted there may be one.
    """
    places = _places()
    return next((place for place in places if not _problem(place)), places[0])


def preferred_parent() -> Path:
    """Returns the directory in which private ones are made if it is safe and its path short."""
    return _places()[0]


def _places() -> list[Path]:
    named = [Path(name)] if (name := os.environ.get("ZRPC_RUNTIME_DIR")) else []
    if named and not _is_too_long(named[0]):
        return named
    # If none can be written to, as in a container with read-only files, there is no temporary one.
    with contextlib.suppress(FileNotFoundError):
        named.append(Path(tempfile.gettempdir()))
    return list(dict.fromkeys([*named, *_SECOND_CHOICES]))


def _is_too_long(parent: Path) -> bool:
    return len(os.fsencode(parent)) + len(_LONGEST_END) > _LONGEST_PATH


def _problem(parent: Path) -> str:
    """Returns why private directories can't be made in it; empty if they can."""
    try:
        status = parent.stat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(status.st_mode):
        return "Not a directory"
    if _is_too_long(parent):
        size, room = len(os.fsencode(parent)), _LONGEST_PATH - len(_LONGEST_END)
        return f"its path has {size} bytes, and {room} leave room for sockets"
    if unsafe := _unsafe(status):
        return unsafe
    return "" if os.access(parent, os.W_OK | os.X_OK) else "it can't be written to"


def host_key(parent: Path | None = None) -> str:
    """Returns a string that is equal for workers that can use each other's Unix sockets.

    It names the running system (its boot id) and the directory that holds the sockets, by device
    and inode. So containers that each have a /tmp of their own have different keys.
    """
    status = (parent or _parent()).stat()
    return f"{_boot_id()}/{status.st_dev}/{status.st_ino}"


def network_key() -> str:
    """Returns a string that is equal for workers that can reach each other by loopback.

    It names the running system and its network namespace: containers mostly have one each.
    """
    try:
        namespace = os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:  # /proc is not mounted
        return _boot_id()
    return f"{_boot_id()}/{namespace}"


@functools.cache  # it stays the same until the machine starts again
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class PrivateDirectory:
    """A directory of mode 0700 for one worker's socket, with the lock that shows that it lives.

    Args:
        prefix: the beginning of its name. Directories with this prefix whose workers were killed
            are removed first.
        parent: the directory that it is made in. Default: see `_parent`.
    """

    # All of this process, for _after_fork.
    _open: ClassVar[weakref.WeakSet[PrivateDirectory]] = weakref.WeakSet()

    def __init__(self, prefix: str = _PREFIX, parent: Path | None = None) -> None:
        parent = parent or _parent()
        _check_parent(parent)
        if _problem(parent):
            raise _no_place({place: _problem(place) for place in _places()})
        _remove_left_behind(parent, prefix)
        self.path = _make(parent, prefix)
        # The file gets its name after it is locked, or a peer could take it for the lock of a
        # dead worker.
        new = self.path / "new"
        self._lock_fd = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)
        self._open.add(self)

    @property
    def socket_path(self) -> Path:
        """The path for the worker's socket."""
        return self.path / "inbox"

    def hide_socket(self, hidden: bool) -> None:
        """Hides the socket from peers that are not connected yet, or shows it again."""
        visible, invisible = self.socket_path, self.path / "hidden"
        with contextlib.suppress(OSError):  # already done
            os.rename(*((visible, invisible) if hidden else (invisible, visible)))

    def remove(self) -> None:
        """Removes the directory with everything in it, and releases the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Releases the lock: the worker counts as dead."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def _after_fork(cls) -> None:
        # Otherwise a child would still hold the lock when its parent has died.
        for directory in list(cls._open):
            directory.release()


os.register_at_fork(after_in_child=PrivateDirectory._after_fork)


def _make(parent: Path, prefix: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise _no_place({parent: error.strerror or str(error)}) from error


def _no_place(problems: Mapping[Path, str]) -> RpcError:
    found = ", ".join(f"{place} ({problem})" for place, problem in problems.items())
    return RpcError(
        "expected a directory for sockets in which new ones can be made, found "
        f"{found}: make it one, or name another in ZRPC_RUNTIME_DIR"
    )


def private_directories() -> list[Path]:
    """Returns all private directories, of living and dead workers, of this user and others."""
    return sorted(_parent().glob(f"{_PREFIX}*"))


def is_alive(directory: Path) -> bool:
    """Returns whether the worker of this host with this private directory lives."""
    try:
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # can't be opened (out of descriptors, for example): no sign of death
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def check_private(path: Path) -> None:
    """Refuses a peer's directory that another user could have made.

    Accepts a directory that no longer exists: failure detection deals with that peer.

    Raises:
        AuthenticationError: it belongs to another user, is open to others, or is not a directory.
    """
    try:
        status = path.lstat()
    except OSError:
        return
    private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if status.st_uid != os.geteuid() or not private:
        raise AuthenticationError(
            f"expected a private directory of this user ({os.geteuid()}) at {path}, found one of "
            f"user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}: start all "
            "workers as one user, or with transport='tcp' and a cluster secret"
        )


def _unsafe(status: os.stat_result) -> str:
    """Returns why other users could replace what is in a directory; empty if they can't.

    `zrpc.launch.short_directory` has the same rules.
    """
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0, _UNMAPPED):
        return f"user {status.st_uid} can replace what is in it, as its owner"
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        return f"others can replace what is in it, as its mode is {mode:04o}"
    return ""


def _check_parent(parent: Path) -> None:
    """Refuses an unsafe directory; a missing one is reported when it is used."""
    if parent.exists() and (unsafe := _unsafe(parent.stat())):
        raise AuthenticationError(
            "expected a directory for sockets in which others can't replace anything, found "
            f"{parent} ({unsafe}): `chmod go-w {parent}`, or name another one in ZRPC_RUNTIME_DIR"
        )


def _remove_left_behind(parent: Path, prefix: str) -> None:
    """Removes the directories of this user's workers that were killed."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(parent)  # not by glob: /tmp may have thousands of entries
    for path in [parent / name for name in names if name.startswith(prefix)]:
        with contextlib.suppress(OSError):  # another worker removes it, for example
            status = path.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue
            has_lock, age = (path / _LOCK).exists(), time.time() - status.st_mtime
            if not is_alive(path) if has_lock else age > _START_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def interface_towards(host: str) -> str:
    """Returns the address of this host's interface that leads to ``host``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # for datagrams this sends nothing, and chooses the route
            name: str = probe.getsockname()[0]
            return name
    except OSError:
        return "127.0.0.1"
