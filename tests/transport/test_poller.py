"""Waits for descriptors, in one thread or in one in place of another."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.support.waiting import SOON
from zrpc.transport.poller import Poller

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_wait_returns_for_what_poll_reports_unless_it_is_masked() -> None:
    poller, reported = Poller(), []
    reading, writing = os.pipe()
    try:
        poller.watch_readable(reading, lambda: reported.append(reading))
        os.write(writing, b"x")
        poller.wait(SOON)
        poller.mask()
        begun = time.monotonic()
        poller.wait(0.05)
        assert time.monotonic() - begun >= 0.05
        assert reported == []
        poller.poll(SOON)
        assert reported == [reading]  # masked or not
        waiting = threading.Thread(target=poller.wait, args=(2 * SOON,))
        waiting.start()
        poller.unmask()
        waiting.join(SOON)
        assert not waiting.is_alive()
    finally:
        poller.close()
        os.close(reading)
        os.close(writing)
