from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from tests.support.waiting import SOON
from zrpc.errors import RendezvousError
from zrpc.membership.store_request import ask


def test_an_answer_is_not_kept() -> None:
    class Answer:
        pass

    answer = weakref.ref(ask(Answer, time.monotonic() + SOON))
    gc.collect()
    assert answer() is None


@pytest.mark.system
@pytest.mark.usefixtures("no_leaks")
def test_a_request_without_an_answer_holds_up_no_other() -> None:
    answer, threads = threading.Event(), []

    def silent() -> None:
        threads.append(threading.current_thread())
        answer.wait()

    with pytest.raises(RendezvousError, match="found no answer for"):
        ask(silent, time.monotonic())
    assert ask(int, time.monotonic() + SOON) == 0
    answer.set()  # then its thread ends, too
    threads[0].join(SOON)
    assert not threads[0].is_alive()
