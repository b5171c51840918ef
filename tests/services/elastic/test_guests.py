"""Workers that join and are gone again, many times, leave nothing in those that stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zrpc as rpc
from tests.services.elastic import calls
from tests.services.elastic.conftest import Elastic
from tests.support.programs import Forked
from tests.support.waiting import until
from zrpc.agent import peers
from zrpc.agent.agent import Agent
from zrpc.membership.failure_detector import Reason
from zrpc.membership.secret import ClusterSecret, new_secret
from zrpc.services.elastic.limits import ElasticLimits
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing.leaks import Resources
from zrpc.transport.address import PrivateDirectory, private_directories

pytestmark = pytest.mark.system

# The first ones are there for what is opened once.
FIRST, GUESTS = 2, 4
# Of a tensor that is sent by shared memory, or as a large message.
ELEMENTS = 1 << 17
LATE = 60.0  # for a process on a busy machine
# In the store: single entries, two snapshots and the events from the last but one on, notes.
MAX_ENTRIES = 20

SCRIPT = """
import sys, time
import zrpc

name, store, transport = sys.argv[1:]
options = zrpc.ZmqRpcBackendOptions(
    init_method=f"file://{store}", init_timeout=60, transport=transport
)
zrpc.init_rpc(name, rpc_backend_options=options)
time.sleep(300)  # it is killed
"""


def call(agent: Agent, to: str) -> None:
    """Uses another worker for some of everything."""
    with agent.as_current():
        ones = torch.ones(ELEMENTS)
        assert torch.equal(rpc.rpc_sync(to, torch.add, (ones, 1)), ones + 1)
        assert rpc.remote(to, torch.ones, (3,)).to_here().sum() == 3


def rest(agents: list[Agent]) -> None:
    """Waits until none of these knows any other worker, nor keeps shared memory for later."""
    for agent in agents:
        until(lambda agent=agent: len(agent.membership.living) == len(agents), within=LATE)
        shared = agent.service(SharedMemoryService)
        kept_seconds, shared.idle_seconds = shared.idle_seconds, 0.0
        until(lambda shared=shared: len(shared.pool) == 0, within=LATE)
        shared.idle_seconds = kept_seconds


def check(agents: list[Agent], have_guest: Callable[[str], None]) -> None:
    """Invites guests, and checks that nothing of them is left in the workers that stay."""
    call(agents[0], agents[1].worker_info.name)
    call(agents[1], agents[0].worker_info.name)
    for number in range(FIRST):
        have_guest(f"first{number}")
    rest(agents)
    before = Resources.now()
    for number in range(GUESTS):
        have_guest(f"guest{number}")
    rest(agents)
    assert before.left_behind(within=LATE) == []


@pytest.mark.parametrize("graceful", [True, False], ids=["gracefully", "at once"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_guests_that_leave(elastic: Elastic, transport: str, graceful: bool) -> None:
    """Nor do they leave much in the store: a few events, and no note of what each has read."""
    elastic.options["transport"] = transport
    elastic.limits = ElasticLimits(snapshot_events=2, snapshot_events_per_member=0)
    agents = elastic.join_all(2)

    def have_guest(name: str) -> None:
        guest = elastic.join(name)
        elastic.agents.remove(guest)
        for agent in agents:
            call(agent, name)
            call(guest, agent.worker_info.name)
        guest.shutdown(graceful=graceful)

    check(agents, have_guest)
    assert elastic.store.num_keys() <= MAX_ENTRIES


@pytest.fixture
def forked() -> Iterator[Forked]:
    made = Forked()
    yield made
    made.kill()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_guests_that_are_killed(
    elastic: Elastic, forked: Forked, tmp_path: Path, transport: str
) -> None:
    secret, file, script = new_secret(), str(tmp_path / "store"), tmp_path / "guest.py"
    script.write_text(SCRIPT)
    elastic.options["transport"] = transport
    elastic.secret, elastic.store = ClusterSecret(secret), dist.FileStore(file, -1)
    agents = elastic.join_all(2)

    def have_guest(name: str) -> None:
        env = {**os.environ, "ZRPC_SECRET": secret}
        pid = forked.start(script, [name, file, transport], env=env, out=tmp_path / "output")
        for agent in agents:
            names = agent.get_worker_infos
            told = (tmp_path / "output").read_text
            until(lambda names=names: name in [each.name for each in names()], told, within=LATE)
            call(agent, name)
        with agents[0].as_current():
            outstanding = rpc.rpc_async(name, signal.pause)
            forked.send_signal(signal.SIGKILL)
            with pytest.raises(rpc.WorkerDied):
                outstanding.wait()
        forked.wait(pid, LATE)

    check(agents, have_guest)
    # Each new worker removes what those have left that were killed: here, the last one.
    assert len(private_directories()) == len(agents) + 1
    PrivateDirectory().remove()


def test_the_mailbox_that_tells_a_worker_that_it_was_declared_dead_is_closed(
    elastic: Elastic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_SEND_SECONDS", 0.5)
    first, second = elastic.join_all(2)
    member = second.membership.own_id
    # As if its process had seemed to have ended.
    first.receiver.in_io_thread(lambda: first.peers.remove(member, Reason.ENDED))
    until(lambda: member in first.membership.lost)
    with pytest.raises(rpc.WorkerDied, match="declared this worker dead"):
        calls.call(second, "w0")  # it was told by a mailbox
    until(lambda: not first.network.knows(member), "that mailbox is closed")
