"""How many threads of the machine want its cores."""

from __future__ import annotations

import os


def running_threads() -> int:
    """Returns how many threads of this machine run or wait for a core; 0 if that is not known.

    In some microseconds. In a container, those outside of it count as well.

    See also the fourth field of /proc/loadavg in proc(5).
    """
    try:
        descriptor = os.open("/proc/loadavg", os.O_RDONLY)
        try:
            return int(os.read(descriptor, 64).split()[3].partition(b"/")[0])
        finally:
            os.close(descriptor)
    except (OSError, IndexError, ValueError):  # there is no such file, or no descriptor for it
        return 0


def wants_core(native_id: int) -> bool:
    """Returns whether a thread of this process runs or waits for a core, and for nothing else.

    Args:
        native_id: the thread's, see ``threading.Thread.native_id``.

    See also the third field of /proc/pid/stat in proc(5).
    """
    try:
        with open(f"/proc/self/task/{native_id}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"R"
    except (OSError, IndexError):  # it has ended
        return False
