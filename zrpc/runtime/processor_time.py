"""The processor time of a thread."""

from __future__ import annotations

import time

from zrpc.runtime.thread_frames import thread_frames


def processor_time_of(ident: int) -> float | None:
    """Returns the processor time that a thread has used, in seconds.

    None if the thread has ended.
    """
    if ident not in thread_frames():
        return None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:
        return None
