"""A look at the frames of all threads."""

from __future__ import annotations

import gc
import sys
from types import FrameType

from zrpc.runtime.thread_frames import thread_frames


def test_no_garbage_is_collected_meanwhile() -> None:
    enabled = []

    def note(_: FrameType, event: str, function: object) -> None:
        if event == "c_call" and function is sys._current_frames:
            enabled.append(gc.isenabled())

    sys.setprofile(note)
    try:
        thread_frames()
    finally:
        sys.setprofile(None)
    assert enabled == [False]
    assert gc.isenabled()
