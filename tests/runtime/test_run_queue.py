"""Which threads want a core."""

from __future__ import annotations

import threading

from tests.support.waiting import until
from zrpc.runtime.run_queue import running_threads, wants_core


def test_a_thread_that_looks_is_one_of_those_that_run() -> None:
    assert running_threads() >= 1
    assert wants_core(threading.get_native_id())


def test_a_thread_that_waits_or_has_ended_wants_no_core() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    assert thread.native_id is not None
    number = thread.native_id
    until(lambda: not wants_core(number))
    gate.set()
    thread.join()  # the system ends it a moment later
    until(lambda: not wants_core(number))
