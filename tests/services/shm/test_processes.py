"""Shared memory between processes: workers that are killed or fork, and containers."""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zrpc
from tests.services.shm.sharing import (
    keep,
    kept,
    kept_are_equal,
    large,
    own_layer,
    processes,
    segments_mapped,
    segments_open,
    send_on,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.forks import exit_code, fork
from tests.support.programs import SCRIPT_DEADLINE, Programs
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.options import ZmqRpcBackendOptions
from zrpc.services.shm import borrowed
from zrpc.services.shm.segments import Segment
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing import Mesh
from zrpc.testing.procfs import descriptors, socket_names
from zrpc.transport.address import DESCRIPTORS

pytestmark = [*sends_by_segments, pytest.mark.system]


def send_and_lend(rank: Any, count: Any) -> Any:
    for i in range(count):
        zrpc.rpc_sync(rank, keep, (i, large(i)))
    return own_layer().pool.lent


def until_lost(rank: Any) -> None:
    layer = own_layer()
    until(lambda: rank in layer.agent.membership.lost and layer.pool.lent == 0, collect=True)


def numbers_of_free_segments() -> Any:
    return sorted(own_layer().pool.segments)


def drop_all() -> Any:
    """Drops what is kept; returns what is mapped then."""
    kept().clear()
    until(lambda: not own_layer().loans.open, collect=True)
    return segments_mapped()


@processes
@pytest.mark.zrpc(workers=3)
def test_the_receiver_is_killed_while_it_holds_tensors(mesh: Mesh) -> None:
    assert mesh.run(0, send_and_lend, 1, 4) == 4
    lent = set(mesh.run(0, numbers_of_free_segments))
    mesh.kill(1)
    mesh.run(0, until_lost, 1)
    used = mesh.run(0, send_on, 2, 5)
    assert used
    # What it had is closed; of the segments before, only such as were free may be used again.
    assert len(used & lent) <= len(lent) - 4
    mesh.run(2, send_on, 0, 3)
    assert mesh.run(0, lambda: len(segments_open())) <= 6


@processes
@pytest.mark.zrpc(workers=3)
def test_the_sender_is_killed_while_receivers_hold_tensors(mesh: Mesh) -> None:
    mesh.run(0, send_and_lend, 1, 4)
    mesh.run(0, send_and_lend, 2, 4)
    its = set(mesh.run(0, segments_open))
    mesh.kill(0)
    for rank in (1, 2):
        mesh.run(rank, until_lost, 0)
    mesh.run(1, send_on, 2, 5)
    mesh.run(2, send_on, 1, 5)
    for rank in (1, 2):
        assert mesh.run(rank, kept_are_equal, 4)
        assert its & set(mesh.run(rank, segments_mapped))
        assert not its & set(mesh.run(rank, drop_all))


def ask_one_that_dies_before_its_answer_is_read(rank: Any, pid: Any) -> Any:
    map_it = borrowed._map
    tried = []

    def late(fd: Any) -> Any:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"))
        tried.append(fd)
        return map_it(fd)

    borrowed._map = late
    try:
        answer = zrpc.rpc_sync(rank, large, (1,))
        return len(tried), answer.equal(large(1))
    finally:
        borrowed._map = map_it


@processes
def test_an_answer_that_is_read_after_its_sender_was_killed_is_not_lost(mesh: Mesh) -> None:
    asked = mesh.submit(0, ask_one_that_dies_before_its_answer_is_read, 1, mesh.pid(1))
    assert asked.result() == (1, True)
    mesh.kill(1)


def test_nothing_is_queued_for_a_worker_that_left_while_it_was_written(
    joined: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever drop it."""
    ours, network = service_of(joined, 0), joined.agent(0).network
    write = Segment.write

    def late(*arguments: Any) -> None:
        if network.knows(1):
            joined.agent(1).shutdown(graceful=False)
            until(lambda: not network.knows(1), collect=True)
        write(*arguments)

    monkeypatch.setattr(Segment, "write", late)
    with pytest.raises(zrpc.WorkerDied):
        zrpc.rpc_sync(1, echo, (large(1),))
    until(lambda: not network.knows(1), within=3, collect=True)
    until(lambda: ours.pool.lent == 0)


def content(tensor: Any) -> Any:
    # Not by torch, whose threads are gone in a child.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class Child:
    """A fork of this process, which answers each question that it is asked."""

    def __init__(self, answer: Any) -> None:
        ask, self._ask = os.pipe()
        self._answers, answers = os.pipe()

        def work() -> None:
            os.close(self._ask)  # or its end would never be seen
            while question := os.read(ask, 1):
                os.write(answers, answer(question))

        self._pid = fork(work)
        os.close(ask)
        os.close(answers)

    def ask(self, question: bytes = b"?") -> Any:
        os.write(self._ask, question)
        if not select.select([self._answers], [], [], 20)[0]:
            os.kill(self._pid, signal.SIGKILL)
        return os.read(self._answers, 1)

    def end(self) -> None:
        os.close(self._ask)
        os.close(self._answers)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def fork_and_drop(rank: Any) -> Any:
    """The child goes on to read a tensor that this process drops."""
    expected = content(large(7))
    tensor = zrpc.rpc_sync(rank, large, (7,))
    assert content(tensor) == expected
    received = [tensor]
    del tensor
    child = Child(lambda _: b"=" if content(received[0]) == expected else b"!")
    try:
        answers = [child.ask()]
        received.clear()  # the child has a list of its own
        until(lambda: not own_layer().loans.open, collect=True)
        for i in range(6):
            other = zrpc.rpc_sync(rank, large, (100 + i,))
            assert content(other) == content(large(100 + i))
            other.zero_()
            del other
            answers.append(child.ask())
        return answers
    finally:
        child.end()


@processes
def test_a_fork_of_the_receiver_goes_on_reading(mesh: Mesh) -> None:
    assert mesh.run(1, fork_and_drop, 0) == [b"="] * 7
    mesh.run(0, lambda: until_returned(own_layer()))


def fork_and_write(rank: Any) -> Any:
    tensor = zrpc.rpc_sync(rank, large, (7,))
    before = content(tensor)

    def answer(question: Any) -> Any:
        if question == b"w":
            ctypes.memset(tensor.data_ptr(), 0xFF, tensor.numel() * tensor.element_size())
        return b"=" if content(tensor) == before else b"!"

    child = Child(answer)
    try:
        tensor[-1] = -1
        seen_by_child = child.ask()
        tensor[-1] = large(7)[-1]
        child.ask(b"w")
        return seen_by_child, content(tensor) == before
    finally:
        child.end()


@processes
def test_a_fork_and_its_parent_do_not_see_what_the_other_writes(mesh: Mesh) -> None:
    assert mesh.run(1, fork_and_write, 0) == (b"=", True)


def test_a_fork_does_not_hold_descriptors_that_wait_for_its_parent(joined: Mesh) -> None:
    paths = socket_names()
    ours = {link for link in descriptors().values() if paths.get(link, "").endswith(DESCRIPTORS)}
    assert len(ours) == len(joined)
    child = Child(lambda _: b"!" if ours & set(descriptors().values()) else b"=")
    assert child.ask() == b"="
    child.end()


def test_a_fork_keeps_no_memory_of_segments_but_what_it_can_read(joined: Mesh) -> None:
    zrpc.rpc_sync(1, keep, ("held", large(7)))
    zrpc.rpc_sync(1, torch.numel, (large(8),))
    held, expected = kept()["held"], content(large(7))
    assert len(segments_open()) == 2

    def answer(question: bytes) -> bytes:
        found = segments_open() if question == b"o" else segments_mapped()
        return b"%d" % len(found) if content(held) == expected else b"!"

    child = Child(answer)
    assert (child.ask(b"o"), child.ask(b"m")) == (b"1", b"1")
    child.end()
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(9),)), -large(9))


def test_agents_may_start_and_end_while_a_fork_begins() -> None:
    """What is lent to the others must be kept; an error would be one that can't be raised."""
    agent: Any = SimpleNamespace(options=ZmqRpcBackendOptions())
    stays = [SharedMemoryService(agent) for _ in range(200)]
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            _passing = [SharedMemoryService(agent) for _ in range(10)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert [exit_code(fork(lambda: None)) for _ in range(20)] == [0] * 20
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        thread.join(20)
    assert len(stays) == 200


CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

WORKER = """
    import json, os
    import torch, zrpc

    rank = int(os.environ["RANK"])
    zrpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    sent = torch.ones(1 << 18)
    for _ in range(3 * (1 - rank)):
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (sent,)), -sent)
    traffic = zrpc.stats().traffic["shared_memory"]
    zrpc.shutdown()
    found = [link for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")
             and "memfd:zrpc" in (link := os.readlink(f"/proc/self/fd/{fd}"))]
    print(json.dumps([os.getpid(), traffic.bytes_sent, traffic.bytes_received, found]))
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_containers_with_one_directory_share_memory(tmp_path: Path, free_port: int) -> None:
    made = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"needs a namespace of processes: {made.stderr}")
    programs = Programs(tmp_path, free_port)
    script = programs.write(WORKER)
    workers = [
        subprocess.Popen(
            [*CONTAINER, sys.executable, script],
            env=programs.env(rank, 2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=SCRIPT_DEADLINE)[0] for worker in workers]
        assert programs.left() == []
    finally:
        for worker in workers:
            worker.kill()
        programs.close()
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    nbytes = 3 * 4 << 18
    # In its own eyes each is the first process. The results come the same way.
    assert results[0] == [1, nbytes, nbytes, []], outputs
    assert results[1][0] == 1, outputs
