"""A store whose host is stopped: nobody waits for it beyond a deadline, or past Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.records import peer_record
from tests.support.waiting import SOON
from zrpc.errors import RendezvousError
from zrpc.membership.rendezvous import exchange, meet
from zrpc.membership.signed_store import SignedStore
from zrpc.services.elastic.join import claim
from zrpc.services.elastic.limits import DEFAULT_LIMITS
from zrpc.services.elastic.log import MembershipLog
from zrpc.services.elastic.state import MembershipState

HOST = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
TIMEOUT = 1.0

pytestmark = pytest.mark.system


class HostedStore:
    """A client's connection to a store that another process hosts."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", HOST], stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())
        self.store = self.connect()

    def connect(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self._port, is_master=False)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def hosted() -> Iterator[HostedStore]:
    hosted = HostedStore()
    yield hosted
    hosted.close()


def run(function: object, *arguments: object) -> object:
    """Returns what a function returns or raises, within a time."""
    outcome: list[object] = []

    def target() -> None:
        try:
            outcome.append(function(*arguments))  # type: ignore[operator]
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(SOON)
    assert outcome, "it waits without limit"
    return outcome[0]


def check_silent(error: object) -> None:
    assert isinstance(error, RendezvousError)
    assert "found no answer" in str(error)
    assert "is stopped, or the network to it is cut" in str(error)


def test_a_rendezvous_ends_at_its_deadline(hosted: HostedStore) -> None:
    hosted.stop()
    check_silent(run(meet, hosted.store, peer_record(0, 2), TIMEOUT))


def test_a_rendezvous_whose_store_falls_silent_ends_at_its_deadline(hosted: HostedStore) -> None:
    entries = SignedStore(hosted.connect(), None)
    stopper = threading.Thread(target=lambda: (entries.get("record/1"), hosted.stop()))
    stopper.start()  # it waits for the record
    check_silent(run(meet, hosted.store, peer_record(1, 2), 3 * TIMEOUT))
    stopper.join()


def test_an_exchange_ends_at_its_deadline(hosted: HostedStore) -> None:
    hosted.stop()
    records = [peer_record(rank, 2) for rank in range(2)]
    check_silent(run(exchange, hosted.store, records, 0, "value", TIMEOUT))


def test_a_claim_ends_at_its_deadline(hosted: HostedStore) -> None:
    def join() -> None:
        deadline = time.monotonic() + TIMEOUT
        log = MembershipLog(SignedStore(hosted.store, None, deadline))
        hosted.stop()
        claim(log, MembershipState(DEFAULT_LIMITS), peer_record(0, 0), deadline)

    check_silent(run(join))


def test_ctrl_c_ends_the_wait(hosted: HostedStore) -> None:
    hosted.stop()
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        meet(hosted.store, peer_record(0, 2), 60)
    assert time.monotonic() - began < SOON
    interrupt.join()
