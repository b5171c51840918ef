"""A store whose host is stopped: nobody waits for it beyond a deadline, or past Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.records import peer_record
from tests.support.waiting import SOON, until
from zrpc.errors import RendezvousError
from zrpc.launch import Task
from zrpc.membership.rendezvous import meet
from zrpc.membership.signed_store import SignedStore
from zrpc.membership.store_request import ask
from zrpc.testing.procfs import state_of
from zrpc.testing.server import warm_server

HOST = """
import signal
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""

pytestmark = pytest.mark.system


class HostedStore:
    """A client's connection to a store that another process hosts."""

    def __init__(self, script: Path) -> None:
        script.write_text(HOST)
        port, output = os.pipe()
        self._pid = warm_server().spawn(Task.script(str(script)), stdout=output)
        os.close(output)
        with open(port) as file:
            self._port = int(file.readline())
        self.store = self.connect()

    def connect(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self._port, is_master=False)

    def stop(self) -> None:
        warm_server().send_signal(self._pid, signal.SIGSTOP)
        threads = Path(f"/proc/{self._pid}/task")
        until(lambda: all(state_of(int(thread.name)) == "T" for thread in threads.iterdir()))

    def close(self) -> None:
        warm_server().send_signal(self._pid, signal.SIGKILL)
        warm_server().wait(self._pid, SOON)


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[HostedStore]:
    hosted = HostedStore(tmp_path / "host.py")
    yield hosted
    hosted.close()


def test_a_rendezvous_whose_store_falls_silent_ends_at_its_deadline(hosted: HostedStore) -> None:
    entries = SignedStore(hosted.connect(), None)
    stopper = threading.Thread(target=lambda: (entries.get("record/-/1"), hosted.stop()))
    stopper.start()  # it waits for the record
    with pytest.raises(RendezvousError, match=r"found no answer .* or the network to it is cut"):
        meet(hosted.store, peer_record(1, 2), 3.0)
    stopper.join()


def test_ctrl_c_ends_the_wait(hosted: HostedStore) -> None:
    hosted.stop()
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        meet(hosted.store, peer_record(0, 2), 60)
    assert time.monotonic() - began < SOON
    interrupt.join()


def test_an_answer_is_not_kept() -> None:
    class Answer:
        pass

    answer = weakref.ref(ask(Answer, time.monotonic() + SOON))
    gc.collect()
    assert answer() is None


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
