"""Shared memory when something fails: processes killed at any moment, forks, peers that say
nonsense, a system without descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import random
import select
import signal
import struct
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.shm.conftest import Lend
from tests.services.shm.sharing import (
    LARGE,
    MIB,
    drop,
    introduce,
    keep,
    kept,
    large,
    own_layer,
    segments_mapped,
    segments_open,
    service_of,
    until_returned,
)
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.services.shm.borrowed import Loans
from zrpc.services.shm.segments import Segment, supports_segments
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message, parse

pytestmark = [
    pytest.mark.skipif(not supports_segments(), reason="needs memfds"),
    pytest.mark.zrpc(workers=2, timeout=90, options={"rpc_timeout": 40}),
]
processes = pytest.mark.zrpc(processes=True)

# -- processes that are killed -----------------------------------------------------------


def send_and_lend(rank: Any, count: Any) -> Any:
    introduce(rank)
    for i in range(count):
        zrpc.rpc_sync(rank, keep, (i, large(i)))
    return own_layer().pool.lent


def until_lost(rank: Any) -> None:
    layer = own_layer()
    until(lambda: rank in layer.agent.membership.lost and layer.pool.lent == 0, collect=True)


def numbers_of_free_segments() -> Any:
    return sorted(own_layer().pool._segments)


def send_on(rank: Any, count: Any) -> Any:
    """Sends to a worker by shared memory, and looks at each answer; the segments used."""
    introduce(rank)
    layer = own_layer()
    numbers = set()
    for i in range(count):
        future = zrpc.rpc_async(rank, torch.neg, (large(100 + i),))
        numbers.update(layer.pool._segments)
        assert torch.equal(future.wait(), -large(100 + i))
    return numbers


def kept_are_equal(count: Any) -> Any:
    return all(torch.equal(kept()[i], large(i)) for i in range(count))


def drop_all() -> Any:
    """Drops what is kept; returns what is mapped then."""
    kept().clear()
    until(lambda: not own_layer().loans._open, collect=True)
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


def write_while_it_dies(rank: Any, pid: Any) -> Any:
    """Has the borrower killed, and its loss noticed, in the middle of a write to a segment."""
    introduce(rank)
    layer = own_layer()
    write = Segment.write
    noticed = []

    def slow(self, offset: Any, buffer: Any) -> None:
        if not noticed:
            os.kill(pid, signal.SIGKILL)
            until(lambda: rank in layer.agent.membership.lost, collect=True)
            # Whether the loss is dealt with now or waits for the end of the write is open.
            with contextlib.suppress(AssertionError):
                until(lambda: layer.pool.lent == 0, within=1, collect=True)
            noticed.append(True)
        write(self, offset, buffer)

    Segment.write = slow  # type: ignore[method-assign]
    try:
        zrpc.rpc_sync(rank, echo, (large(1, 1 << 22),))
    except zrpc.WorkerDied:
        until(lambda: layer.pool.lent == 0, collect=True)
        return bool(noticed)
    finally:
        Segment.write = write  # type: ignore[method-assign]
    return False


@processes
@pytest.mark.zrpc(workers=3)
def test_the_receiver_is_killed_while_the_sender_writes(mesh: Mesh) -> None:
    pid = mesh.pid(1)
    # The mesh knows of it as soon as it is dead: it does not count as an accident.
    waiting = mesh.submit(0, write_while_it_dies, 1, pid)
    assert waiting.result()
    assert mesh.run(0, send_on, 2, 2)
    mesh.kill(1)


def ask_one_that_dies_before_its_answer_is_read(rank: Any, pid: Any) -> Any:
    """The type of the error where the segment of an answer went with its owner."""
    own = own_layer()
    zrpc.rpc_sync(rank, introduce, (own.agent.worker_info.id,))
    until(lambda: not own.loans._open, collect=True)
    own.loans.close()  # forgets what is mapped, so that the answer's segment is mapped anew
    map_it = Loans._map
    tried = []

    def too_late(descriptor: Any) -> Any:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{pid}/fd/{descriptor.fd}"), collect=True)
        tried.append(descriptor)
        return map_it(descriptor)

    Loans._map = staticmethod(too_late)
    try:
        zrpc.rpc_sync(rank, large, (1,))
    except Exception as error:
        return len(tried), type(error).__name__
    finally:
        Loans._map = staticmethod(map_it)
    return None


@processes
def test_a_worker_that_is_killed_before_its_answer_is_read_has_died(mesh: Mesh) -> None:
    asked = mesh.submit(0, ask_one_that_dies_before_its_answer_is_read, 1, mesh.pid(1))
    assert asked.result() == (1, "WorkerDied")
    mesh.kill(1)


def work_until_told(seed: Any, directory: Any) -> Any:
    """Sends large tensors to all and checks each answer; says how many, and what failed."""
    layer = own_layer()
    me = layer.agent.worker_info.id
    stop = os.path.join(directory, "stop")
    chance = random.Random(seed)
    done, dead, kept_results = 0, set(), []
    rounds = 0
    while not os.path.exists(stop) or rounds < 4:
        rounds += 1
        calls = []
        for rank in range(4):
            if rank == me:
                continue
            for _ in range(2):
                value, count = chance.randrange(10_000), LARGE + chance.randrange(LARGE)
                calls.append((rank, value, count))
        futures = [zrpc.rpc_async(r, torch.neg, (large(v, c),)) for r, v, c in calls]
        for (rank, value, count), future in zip(calls, futures, strict=True):
            try:
                result = future.wait()
            except zrpc.WorkerDied:
                dead.add(rank)
                continue
            if not torch.equal(result, -large(value, count)):
                raise AssertionError(f"a wrong answer of {rank} to {value}, {count}")
            done += 1
            if chance.random() < 0.2:
                kept_results.append((result, value, count))
        for result, value, count in kept_results:
            if not torch.equal(result, -large(value, count)):
                raise AssertionError(f"a kept result has changed: {value}, {count}")
        del kept_results[:-6]
        open(os.path.join(directory, f"worker{me}"), "w").close()
    return done, sorted(dead)


# Not strict: it depends on the moment. See the test above for the same without chance.
@processes
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.zrpc(workers=4, options={"shared_memory": 24 * MIB})
def test_random_workers_are_killed_under_load(mesh: Mesh, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    working = {r: mesh.submit(r, work_until_told, seed * 10 + r, str(tmp_path)) for r in range(4)}
    until(lambda: len(os.listdir(tmp_path)) == 4, within=40, collect=True)
    victims = chance.sample(range(4), 2)
    for victim in victims:
        time.sleep(chance.uniform(0, 0.3))  # at any moment
        mesh.kill(victim)
        survivors = set(range(4)) - set(victims)
        for rank in survivors:  # a round later
            with contextlib.suppress(FileNotFoundError):
                (tmp_path / f"worker{rank}").unlink()

        def worked(survivors: Any = survivors) -> Any:
            failed = [e for r in survivors if working[r].done() and (e := working[r].exception())]
            if failed:
                raise failed[0]
            return survivors <= {int(name[6:]) for name in os.listdir(tmp_path)}

        until(worked, within=40, collect=True)
    (tmp_path / "stop").touch()
    for rank in set(range(4)) - set(victims):
        done, dead = working[rank].result()
        assert done > 8
        assert set(dead) <= set(victims)
    first, second = sorted(set(range(4)) - set(victims))
    mesh.run(first, send_on, second, 2)


@processes
def test_nothing_is_open_or_mapped_after_a_shutdown(mesh: Mesh) -> None:
    for rank in range(2):
        mesh.run(rank, send_on, 1 - rank, 3)
        assert mesh.run(rank, lambda: (bool(segments_open()), bool(segments_mapped())))

    def leave() -> Any:
        zrpc.shutdown()
        return segments_open(), segments_mapped()

    assert mesh.run_all(leave) == [([], [])] * 2


def leave_with_a_tensor(rank: Any) -> None:
    introduce(rank)
    keep("held", zrpc.rpc_sync(rank, large, (5,)))


def leave_and_drop() -> Any:
    zrpc.shutdown()
    equal = torch.equal(kept()["held"], large(5))
    mapped = len(segments_mapped())
    drop("held")
    with contextlib.suppress(AssertionError):
        until(lambda: not segments_mapped(), within=1, collect=True)
    return equal, mapped, segments_open(), segments_mapped()


@processes
@pytest.mark.zrpc(leaks=False)
def test_after_a_shutdown_a_tensor_keeps_its_segment_and_nothing_else(mesh: Mesh) -> None:
    for rank in range(2):
        mesh.run(rank, introduce, 1 - rank)
    for rank in range(2):
        mesh.run(rank, leave_with_a_tensor, 1 - rank)
    assert mesh.run_all(leave_and_drop) == [(True, 1, [], [])] * 2


# -- forks -------------------------------------------------------------------------------


def content(tensor: Any) -> Any:
    # Not by torch, whose threads are gone in a child.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class Child:
    """A fork of this process, which answers each question that it is asked."""

    def __init__(self, answer: Any) -> None:
        ask, self._ask = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._ask)  # or its end would never be seen
                while question := os.read(ask, 1):
                    os.write(answers, answer(question))
            finally:
                os._exit(0)
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
    zrpc.rpc_sync(rank, introduce, (own_layer().agent.worker_info.id,))
    expected = content(large(7))
    tensor = zrpc.rpc_sync(rank, large, (7,))
    assert content(tensor) == expected
    received = [tensor]
    del tensor
    child = Child(lambda _: b"=" if content(received[0]) == expected else b"!")
    try:
        answers = [child.ask()]
        received.clear()  # the child has a list of its own
        until(lambda: not own_layer().loans._open, collect=True)
        for i in range(6):
            other = zrpc.rpc_sync(rank, large, (100 + i,))
            assert content(other) == content(large(100 + i))
            other.zero_()
            del other
            answers.append(child.ask())
        return answers
    finally:
        child.end()


@pytest.mark.system
@processes
def test_a_fork_of_the_receiver_goes_on_reading(mesh: Mesh) -> None:
    assert mesh.run(1, fork_and_drop, 0) == [b"="] * 7
    mesh.run(0, lambda: until_returned(own_layer()))


def fork_and_write(rank: Any) -> Any:
    zrpc.rpc_sync(rank, introduce, (own_layer().agent.worker_info.id,))
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


@pytest.mark.system
@processes
def test_a_fork_and_its_parent_do_not_see_what_the_other_writes(mesh: Mesh) -> None:
    assert mesh.run(1, fork_and_write, 0) == (b"=", True)


def fork_and_send(rank: Any) -> Any:
    introduce(rank)
    zrpc.rpc_sync(rank, keep, ("held", large(1)))
    child = Child(lambda _: b"=")
    try:
        for i in range(4):
            assert torch.equal(zrpc.rpc_sync(rank, torch.neg, (large(i),)), -large(i))
        child.ask()
    finally:
        child.end()
    until_returned(own_layer(), 1)
    return own_layer().pool.lent


@pytest.mark.system
@processes
def test_a_fork_of_the_sender_changes_nothing(mesh: Mesh) -> None:
    assert mesh.run(0, fork_and_send, 1) == 1
    assert torch.equal(mesh.run(1, lambda: kept().pop("held")), large(1))


class Stand:
    """In the place of a layer."""

    def __init__(self) -> None:
        self.loans = Loans()


def test_agents_may_start_and_end_while_a_fork_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lent to the others must be kept all the same."""
    layers = weakref.WeakValueDictionary()
    monkeypatch.setattr(SharedMemoryService, "_all", layers)
    stays = [Stand() for _ in range(200)]
    layers.update((id(each), each) for each in stays)
    looks, ended = [], threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            passing = [Stand() for _ in range(10)]
            layers.update((id(each), each) for each in passing)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(100):
            SharedMemoryService._before_fork()
            looks.append(True)
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        thread.join(20)
    assert len(looks) == 100


# -- workers that leave ------------------------------------------------------------------


@pytest.mark.zrpc(workers=3)
def test_a_worker_that_leaves_keeps_its_tensors(introduced: Mesh) -> None:
    ours = service_of(introduced, 0)
    for i in range(3):
        zrpc.rpc_sync(1, keep, (i, large(i)))
    assert ours.pool.lent == 3
    introduced.agent(1).shutdown(graceful=False)
    until(lambda: ours.pool.lent == 0, collect=True)
    for i in range(10, 16):
        assert torch.equal(zrpc.rpc_sync(2, torch.neg, (large(i),)), -large(i))
    assert kept_are_equal(3)
    kept()[0].zero_()
    assert torch.equal(kept()[1], large(1))
    with pytest.raises(zrpc.WorkerDied):
        zrpc.rpc_sync(1, echo, (large(1),))
    until_returned(ours)


@pytest.mark.zrpc(workers=3)
def test_tensors_of_a_worker_that_has_left_stay(introduced: Mesh) -> None:
    zrpc.rpc_sync(1, send_from, (0, 3))
    introduced.agent(1).shutdown(graceful=False)
    until(lambda: 1 in introduced.agent(0).membership.lost, collect=True)
    introduced.run(2, zrpc.rpc_sync, 0, torch.numel, (large(9),))
    assert kept_are_equal(3)
    drop(*range(3))
    until(lambda: not service_of(introduced, 0).loans._open, collect=True)


def send_from(rank: Any, count: Any) -> None:
    for i in range(count):
        zrpc.rpc_sync(rank, keep, (i, large(i)))


def test_nothing_is_queued_for_a_worker_that_left_while_it_was_written(
    introduced: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever drop it."""
    ours, network = service_of(introduced, 0), introduced.agent(0).network
    write = Segment.write

    def late(*arguments: Any) -> None:
        if network.knows(1):
            introduced.agent(1).shutdown(graceful=False)
            until(lambda: not network.knows(1), collect=True)
        write(*arguments)

    monkeypatch.setattr(Segment, "write", late)
    with pytest.raises(zrpc.WorkerDied):
        zrpc.rpc_sync(1, echo, (large(1),))
    until(lambda: not network.knows(1), within=3, collect=True)
    assert ours.pool.lent == 0


# -- peers that say nonsense -------------------------------------------------------------

DESCRIPTOR = struct.Struct("<QIIQQ")
PLACE = struct.Struct("<IQQ")
NOTE = struct.Struct("<BQ")


def extension(segment: Any, *places: Any, **changed: Any) -> Any:
    fields = {
        "number": segment.number,
        "pid": os.getpid(),
        "fd": segment.fd,
        "inode": segment.inode,
        "size": segment.size,
        **changed,
    }
    return DESCRIPTOR.pack(*fields.values()) + b"".join(PLACE.pack(*place) for place in places)


TOO_MUCH = 2**64 - 1
HOSTILE = {
    "empty": lambda s: b"",
    "truncated descriptor": lambda s: extension(s)[:-1],
    "no places": extension,
    "half a place": lambda s: extension(s, (0, 0, 64)) + b"x" * 7,
    "place behind the end": lambda s: extension(s, (0, s.size, 1)),
    "place over the end": lambda s: extension(s, (0, 0, 64), (1, s.size - 10, 11)),
    "enormous offset": lambda s: extension(s, (0, TOO_MUCH, 1)),
    "enormous size": lambda s: extension(s, (0, 1, TOO_MUCH)),
    "sum that overflows": lambda s: extension(s, (0, 2**63, 2**63)),
    "larger segment than there is": lambda s: extension(s, (0, s.size, 64), size=2 * s.size),
    "wrong inode": lambda s: extension(s, (0, 0, 64), inode=s.inode + 1, number=10**6),
    "wrong descriptor": lambda s: extension(s, (0, 0, 64), fd=0, number=10**6),
    "no such process": lambda s: extension(s, (0, 0, 64), pid=2**32 - 1, number=10**6),
    "index that isn't": lambda s: extension(s, (5, 0, 64)),
    "size 0 of nothing": lambda s: extension(s, (0, 0, 0), size=0, number=10**6),
}


@pytest.mark.parametrize(
    "hostile",
    [pytest.param(hostile, id=name) for name, hostile in HOSTILE.items()],
)
def test_an_extension_of_nonsense_is_an_error_at_the_caller(
    introduced: Mesh, caplog: pytest.LogCaptureFixture, hostile: Any
) -> None:
    agent = introduced.agent(0)
    ours = service_of(introduced, 0)
    segment = next(iter(ours.pool._segments.values()))
    with caplog.at_level(logging.CRITICAL, logger="zrpc"):
        future = agent.caller.call_async(
            agent.membership.find(1),
            Kind.CALL,
            (echo, (1,), {}),
            20,
            extension=(Tag.SHARED, hostile(segment)),
        )
        with pytest.raises(Exception, match=r".") as caught:
            future.wait()
    assert isinstance(caught.value, (zrpc.ProtocolError, OSError, ValueError, struct.error))
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(1),)), -large(1))
    until_returned(ours)
    until(lambda: not service_of(introduced, 1).loans._open, collect=True)


NOTES = {
    "empty": b"",
    "half": b"\x01\x02",
    "unknown verb": NOTE.pack(99, 0),
    "offer without a descriptor": NOTE.pack(1, 0),
    "offer of nothing": NOTE.pack(1, 0) + DESCRIPTOR.pack(0, 1, 1, 1, 1),
    "offer of size 0": NOTE.pack(1, 0) + DESCRIPTOR.pack(0, os.getpid(), 0, 1, 0),
    "return of what another has": NOTE.pack(3, 0),
    "keep of what another has": NOTE.pack(4, 0),
    "return of what isn't": NOTE.pack(3, TOO_MUCH),
    "keep of what isn't": NOTE.pack(4, TOO_MUCH),
    "closed what isn't": NOTE.pack(5, TOO_MUCH),
}


@pytest.mark.zrpc(workers=3)
def test_words_of_nonsense_change_nothing(
    introduced: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    ours = service_of(introduced, 0)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    number = next(n for n, s in ours.pool._segments.items() if s.borrower == 1)
    assert ours.pool.lent == 1
    before = set(ours.pool._segments)
    with caplog.at_level(logging.CRITICAL, logger="zrpc"):
        for note in NOTES.values():
            head = note[: NOTE.size]
            if len(head) == NOTE.size and head[0] in (3, 4) and head[1:] == bytes(8):
                note = NOTE.pack(head[0], number)
            introduced.agent(2).outbox.post(0, Message(Kind.SEGMENT, body=note))
            # Behind it in the queue: answered when it has been read.
            assert introduced.run(2, zrpc.rpc_sync, 0, echo, (3,)) == 3
            assert ours.pool.lent == 1, note
    assert before <= set(ours.pool._segments)
    for i in range(3):
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(i),)), -large(i))
    assert torch.equal(kept()["held"], large(1))
    drop("held")
    until_returned(ours)


@pytest.mark.zrpc(workers=3)
@pytest.mark.parametrize("data", [b"", b"half", "another's", struct.pack("<Q", TOO_MUCH)])
def test_returns_of_nonsense_change_nothing(
    introduced: Mesh, caplog: pytest.LogCaptureFixture, data: Any
) -> None:
    ours = service_of(introduced, 0)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    if data == "another's":
        number = next(n for n, s in ours.pool._segments.items() if s.borrower == 1)
        data = struct.pack("<Q", number)
    stranger = introduced.agent(2)
    with caplog.at_level(logging.CRITICAL, logger="zrpc"):
        future = stranger.caller.call_async(
            stranger.membership.find(0),
            Kind.CALL,
            (echo, (1,), {}),
            20,
            extension=(Tag.RETURNED, data),
        )
        if len(data) % 8:
            with pytest.raises(zrpc.ProtocolError, match="extension"):
                future.wait()
        else:
            assert future.wait() == 1
    assert ours.pool.lent == 1
    drop("held")
    until_returned(ours)


# -- a system without descriptors --------------------------------------------------------


@pytest.fixture
def no_mappings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Receivers can't map segments that they don't know yet, as without free descriptors."""
    tried = threading.Event()

    def refuse(descriptor: Any) -> None:
        tried.set()
        raise OSError(24, "Too many open files")

    def forget(*layers: Any) -> None:
        for layer in layers:
            layer.loans.close()  # forgets what is mapped
        monkeypatch.setattr(Loans, "_map", staticmethod(refuse))

    forget.tried = tried  # type: ignore[attr-defined]
    forget.undo = monkeypatch.undo  # type: ignore[attr-defined]
    return forget


def test_a_request_that_cant_be_mapped_fails_and_is_returned(
    introduced: Mesh, no_mappings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    no_mappings(service_of(introduced, 1))
    with caplog.at_level(logging.CRITICAL, logger="zrpc"), contextlib.suppress(OSError):
        assert zrpc.rpc_sync(1, torch.numel, (large(1),)) == LARGE
    assert no_mappings.tried.is_set()
    until(lambda: service_of(introduced, 0).pool.lent == 0, "not returned", within=3, collect=True)
    no_mappings.undo()
    assert zrpc.rpc_sync(1, torch.numel, (large(1),)) == LARGE


def test_an_answer_that_cant_be_mapped_fails_at_once(
    introduced: Mesh, no_mappings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    no_mappings(service_of(introduced, 0))
    with caplog.at_level(logging.CRITICAL, logger="zrpc"):
        try:
            assert torch.equal(zrpc.rpc_sync(1, large, (1,), timeout=3), large(1))
        except zrpc.RpcTimeoutError as error:
            raise AssertionError("the caller was not told") from error
        except (OSError, zrpc.ProtocolError):
            pass
    assert no_mappings.tried.is_set()
    until(lambda: service_of(introduced, 1).pool.lent == 0, "not returned", within=3, collect=True)
    no_mappings.undo()
    assert torch.equal(zrpc.rpc_sync(1, large, (2,)), large(2))


def test_a_pass_whose_gradients_cant_be_mapped_fails(
    introduced: Mesh, no_mappings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody answers for them, and they have come: they would be waited for in vain."""
    with dist_autograd.context() as context_id:
        leaf = large(1).requires_grad_()
        loss = zrpc.rpc_sync(1, torch.mul, (leaf, 2.0)).sum()
        no_mappings(service_of(introduced, 0), service_of(introduced, 1))
        with (
            caplog.at_level(logging.CRITICAL, logger="zrpc"),
            pytest.raises(RuntimeError, match=r"messages from .* were lost"),
        ):
            dist_autograd.backward(context_id, [loss])
    assert no_mappings.tried.is_set()
    no_mappings.undo()
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(2),)), -large(2))


def test_a_sender_without_descriptors_uses_frames(
    introduced: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = service_of(introduced, 0)
    ours.pool.close_idle(float("inf"))
    assert len(ours.pool) == 0

    def refuse(*args: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("zrpc.services.shm.segments.os.memfd_create", refuse)
    for i in range(3):
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(i),)), -large(i))
    assert len(ours.pool) == 0


# -- messages that can't be sent -----------------------------------------------------------


def fail_to_send(monkeypatch: pytest.MonkeyPatch, agent: Any, *errors: Any) -> Any:
    """Has an agent's next attempts to send something by shared memory fail."""
    send, left = agent.network.send, list(errors)

    def fail(rank: Any, first: Any, buffers: Any = (), counted: bool = True) -> None:
        extensions = parse(first).extensions
        if left and any(tag in (Tag.SHARED, Tag.RETURNED) for tag, _ in extensions):
            raise left.pop(0)
        send(rank, first, buffers, counted)

    monkeypatch.setattr(agent.network, "send", fail)
    return left


no_memory = pytest.mark.parametrize(
    "error", [zmq.ZMQError(errno.ENOMEM), MemoryError()], ids=["system", "python"]
)


@no_memory
def test_what_a_call_that_is_not_sent_was_lent_is_free_again(
    introduced: Mesh, lends: list[Lend], monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """As memory of this process; the segment is not used again, as a part may have left."""
    ours = service_of(introduced, 0)
    left = fail_to_send(monkeypatch, introduced.agent(0), error)
    with pytest.raises(MemoryError, match="can't be sent"):
        zrpc.rpc_sync(1, torch.neg, (large(1),))
    assert not left
    assert ours.pool.lent == 0
    assert [lend.number in ours.pool._segments for lend in lends] == [False]
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(1),)), -large(1))
    until_returned(ours)


@no_memory
def test_what_an_answer_that_is_not_sent_was_lent_is_free_again(
    introduced: Mesh, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """And so is what it should have returned."""
    ours, theirs = service_of(introduced, 0), service_of(introduced, 1)
    left = fail_to_send(monkeypatch, introduced.agent(1), error)
    with pytest.raises(MemoryError):
        zrpc.rpc_sync(1, torch.neg, (large(1),))
    assert not left
    until_returned(theirs)
    until_returned(ours)
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(1),)), -large(1))
    until_returned(ours)


def test_a_segment_that_may_be_lent_again_is_not_returned_twice(introduced: Mesh) -> None:
    """Of a message that can't be sent a part may have left, by which the owner has heard of it."""
    ours, theirs = service_of(introduced, 0), service_of(introduced, 1)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    number = next(n for n, s in ours.pool._segments.items() if s.borrower == 1)
    part = Message(Kind.RESULT, extensions=[(Tag.RETURNED, struct.pack("<Q", number))])
    theirs.undo_carry(0, part)
    introduced.agent(1).network.wake()
    until_returned(ours)
    assert number not in ours.pool._segments
    for i in range(3):
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(10 + i),)), -large(10 + i))
    assert torch.equal(kept()["held"], large(1))
    drop("held")
    until_returned(ours)


def test_what_a_fork_may_read_is_not_returned_with_a_message(
    introduced: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But another tensor is, and of the first the owner hears as well, by a message of its own."""
    ours, theirs = service_of(introduced, 0), service_of(introduced, 1)
    zrpc.rpc_sync(1, keep, ("forked", large(1)))
    (forked,) = (n for n, s in ours.pool._segments.items() if s.borrower == 1)
    theirs.loans.keep_all()
    zrpc.rpc_sync(1, keep, ("other", large(2)))
    (other,) = (n for n, s in ours.pool._segments.items() if s.borrower == 1 and n != forked)
    monkeypatch.setattr(theirs, "after_turn", lambda: None)
    drop("forked", "other")
    until(lambda: len(theirs.loans.ended) == 2, collect=True)
    message = Message(Kind.CANCEL, 2**60)
    theirs.carry(0, message)
    assert message.extensions == [(Tag.RETURNED, struct.pack("<Q", other))]
    monkeypatch.undo()
    introduced.agent(1).outbox.post(0, message)
    until_returned(ours)
    assert forked not in ours.pool._segments
    assert other in ours.pool._segments


def test_an_answer_that_is_sent_later_keeps_its_segment(
    introduced: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = service_of(introduced, 1)
    left = fail_to_send(monkeypatch, introduced.agent(1), *[zmq.ZMQError(errno.EMFILE)] * 2)
    value = zrpc.rpc_sync(1, large, (1,))
    assert not left
    assert torch.equal(value, large(1))
    assert theirs.pool.lent == 1
    del value
    until_returned(theirs)


def test_a_segment_that_can_not_be_written_is_free_again(
    introduced: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = service_of(introduced, 0)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Segment, "write", fail)
        with pytest.raises(MemoryError, match="can't be sent"):
            zrpc.rpc_sync(1, torch.neg, (large(1),))
    assert ours.pool.lent == 0
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(1),)), -large(1))
    until_returned(ours)
