from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from zrpc.errors import RendezvousError
from zrpc.membership.store_request import StoreThread

SOON = 20.0


@pytest.fixture
def requests() -> Iterator[StoreThread]:
    requests = StoreThread()
    yield requests
    requests.close()


def soon() -> float:
    return time.monotonic() + SOON


def test_all_requests_are_made_in_one_thread(requests: StoreThread) -> None:
    first, second = (requests.request(threading.current_thread, soon()) for _ in range(2))
    assert first is second
    assert first is not threading.current_thread()


def test_closing_ends_the_thread(requests: StoreThread) -> None:
    thread = requests.request(threading.current_thread, soon())
    requests.close()
    assert not thread.is_alive()


def test_errors_are_raised(requests: StoreThread) -> None:
    with pytest.raises(ZeroDivisionError):
        requests.request(lambda: 1 // 0, soon())


def test_a_thread_that_the_system_refuses_is_started_later(
    requests: StoreThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            requests.request(int, soon())
        requests.close()
        with pytest.raises(RuntimeError, match="can't start new thread"):
            requests.request(int, soon())
    assert requests.request(int, soon()) == 0


def test_an_answer_is_not_kept(requests: StoreThread) -> None:
    class Answer:
        pass

    answer = weakref.ref(requests.request(Answer, soon()))
    gc.collect()
    assert answer() is None


@pytest.mark.system
@pytest.mark.usefixtures("no_leaks")
def test_a_request_without_an_answer_holds_up_no_other(requests: StoreThread) -> None:
    answer, threads = threading.Event(), []

    def silent() -> None:
        threads.append(threading.current_thread())
        answer.wait()

    with pytest.raises(RendezvousError, match="found no answer for"):
        requests.request(silent, time.monotonic())
    assert requests.request(int, soon()) == 0
    answer.set()  # then its thread ends, too
    threads[0].join(SOON)
    assert not threads[0].is_alive()
    requests.close()
