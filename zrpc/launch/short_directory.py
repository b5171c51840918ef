"""Private directories with paths that are short enough for the sockets of workers."""

from __future__ import annotations

import os
import stat
import tempfile

_RUNTIME_DIRECTORY = "ZRPC_RUNTIME_DIR"
# What the longest path of a socket has after that of the first directory; each x is a random
# character. The last two parts are those of `zrpc.transport.address`.
_PREFIX = "zrpc-"
_LONGEST_END = f"/{_PREFIX}xxxxxxxx/zrpc-inbox-xxxxxxxx/direct"
# Without the zero at its end.
_LONGEST_SOCKET = 107
# The owner of what belongs to users outside of a user namespace: root, in most cases.
_UNMAPPED = 65534
_OTHERS = ("/tmp", "/dev/shm")


def short_directory() -> str:
    """Makes a private directory whose path leaves room for sockets.

    It is in the directory that ``ZRPC_RUNTIME_DIR`` names, or else in that for temporary files,
    ``/tmp`` or ``/dev/shm``: the first one that can be used.

    Raises:
        OSError: None of these can be used.
    """
    tried: dict[str, str] = {}
    for root in _roots(tried):
        room = _LONGEST_SOCKET - len(_LONGEST_END)
        if (size := len(os.fsencode(root))) > room:
            tried[root] = f"its path has {size} bytes, and {room} leave room for sockets"
            continue
        if unsafe := _unsafe(root):
            tried[root] = unsafe
            continue
        try:
            return tempfile.mkdtemp(prefix=_PREFIX, dir=root)
        except OSError as error:
            tried[root] = error.strerror or str(error)
    raise OSError(
        "expected a directory in which the workers' sockets can be made, but tried "
        + ", ".join(f"{root} ({problem})" for root, problem in tried.items())
        + f": name another in {_RUNTIME_DIRECTORY}"
    )


def _unsafe(root: str) -> str:
    """Returns why other users could replace what is in a directory; empty if they can't.

    A worker has the same rules, in `zrpc.transport.address`, but looks only at what is made here.
    """
    try:
        status = os.stat(root)
    except OSError:
        return ""  # it is reported when it is used
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0, _UNMAPPED):
        return f"user {status.st_uid} can replace what is in it, as its owner"
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        return f"others can replace what is in it, as its mode is {mode:04o}"
    return ""


def _roots(tried: dict[str, str]) -> list[str]:
    roots = [named] if (named := os.environ.get(_RUNTIME_DIRECTORY)) else []
    try:
        roots.append(tempfile.gettempdir())
    except FileNotFoundError as error:  # it names all that can't be written to
        tried["the directories for temporary files"] = str(error)
    return list(dict.fromkeys([*roots, *_OTHERS]))
