"""Which resource a worker has run out of, and what to do."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator

# What zrpc needs for anything that it must not leave half done, such as the start of a thread.
_SPARE_FRAMES = 200
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def advice(error: BaseException) -> str | None:
    """Returns which resource has run out and what to do; None if the error has another cause.

    The errors that it was raised from count as well, the first cause before the others.
    """
    for one in reversed([*_with_causes(error)]):
        try:
            number, text = getattr(one, "errno", None), str(one)
        except Exception:  # a user's error class may fail here
            continue
        if number == errno.EMFILE:
            return (
                "the process has no file descriptors left (it may have "
                f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}): close what is not needed, or "
                "raise the limit with `ulimit -n` before it starts"
            )
        if number == errno.ENFILE:
            return "the system has no file descriptors left: raise fs.file-max"
        if isinstance(one, MemoryError) or number == errno.ENOMEM or "allocate memory" in text:
            return (
                "the process has no memory left: send or keep less at once, or give it more "
                "(`ulimit -v`, the memory limit of its container)"
            )
        if isinstance(one, RuntimeError) and "can't start new thread" in text:
            return (
                "the system allows no more threads: raise the limit with `ulimit -u`, or the pids "
                "limit of its container"
            )
    return None


def allow_descriptors(more: int) -> tuple[int, int] | None:
    """Lets this process open ``more`` file descriptors; raises its soft limit if it must.

    Returns:
        None if it may open them now; otherwise the limit that it needs, and the one that it has.
    """
    try:
        needed = len(os.listdir("/proc/self/fd")) + more
    except OSError:  # /proc is not mounted
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return None
    if hard != resource.RLIM_INFINITY and needed > hard:
        return needed, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None


def out_of_descriptors(error: BaseException) -> bool:
    """Returns whether an operation failed because no file descriptor was left."""
    return getattr(error, "errno", None) in _NO_DESCRIPTORS


def stack_is_full() -> bool:
    """Returns whether few frames are left on this thread's stack, see `sys.getrecursionlimit`."""
    try:
        sys._getframe(max(0, sys.getrecursionlimit() - _SPARE_FRAMES))
    except ValueError:  # it is not that deep
        return False
    return True


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__
