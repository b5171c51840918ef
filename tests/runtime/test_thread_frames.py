"""A look at the frames of all threads."""

from __future__ import annotations

import gc
import inspect
import sys
import threading

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
    lines, first = inspect.getsourcelines(thread_frames)
    [look] = [first + n for n, line in enumerate(lines) if "return sys._current_frames()" in line]
    collected_at = set()

    def note(phase: str, _: object) -> None:
        frame = sys._getframe(1)
        if frame.f_code is thread_frames.__code__:
            collected_at.add(frame.f_lineno)

    threshold = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(20):
            thread_frames()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    assert look not in collected_at
    assert gc.isenabled()
