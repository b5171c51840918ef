"""A look at the frames of all threads."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

from zrpc.runtime.thread_frames import thread_frames


def test_there_is_the_frame_of_each_thread() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, args=(30,))
    thread.start()
    found = set(thread_frames())
    gate.set()
    thread.join()
    assert {threading.get_ident(), thread.ident} <= found


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
