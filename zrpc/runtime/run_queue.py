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
