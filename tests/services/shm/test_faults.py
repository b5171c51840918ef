"""Shared memory when something fails, or a peer says nonsense about it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.shm.conftest import Lend
from tests.services.shm.sharing import (
    LARGE,
    drop,
    keep,
    kept,
    large,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.refusals import refusing
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.services.shm import borrowed
from zrpc.services.shm.borrowed import MAX_KNOWN
from zrpc.services.shm.segments import record
from zrpc.testing import Mesh, faults
from zrpc.testing.procfs import descriptors
from zrpc.transport.descriptors import DescriptorSocket
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message, parse

pytestmark = sends_by_segments

# -- a system without descriptors --------------------------------------------------------


@contextlib.contextmanager
def no_mappings() -> Iterator[None]:
    """Receivers can't map segments that they don't know yet, as without free descriptors."""
    tried = threading.Event()

    def refuse(fd: int) -> None:
        os.close(fd)
        tried.set()
        raise OSError(24, "Too many open files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(borrowed, "_map", refuse)
        yield
    assert tried.is_set()


@pytest.mark.parametrize(
    ("function", "argument", "sender"),
    [(torch.numel, large(1), 0), (large, 1, 1)],
    ids=["request", "answer"],
)
def test_a_message_that_cant_be_mapped_fails_at_once_and_is_returned(
    joined: Mesh, function: Any, argument: Any, sender: int
) -> None:
    errors = (OSError, zrpc.ProtocolError)
    with no_mappings(), pytest.raises(errors, match="Too many open files"):
        zrpc.rpc_sync(1, function, (argument,), timeout=10)
    until_returned(service_of(joined, sender))
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(2),)), -large(2))


def test_a_pass_whose_gradients_cant_be_mapped_fails(joined: Mesh) -> None:
    """They would be waited for in vain. They travel with the answer of the part, or alone."""
    with dist_autograd.context() as context_id:
        leaf = large(1).requires_grad_()
        loss = zrpc.rpc_sync(1, torch.mul, (leaf, 2.0)).sum()
        for rank in range(2):  # what was mapped is not used again
            until_returned(service_of(joined, rank))
            service_of(joined, rank).pool.close_idle(float("inf"))
        why = r"answer can't be read|messages from .* were lost"
        with no_mappings(), pytest.raises(RuntimeError, match=why):
            dist_autograd.backward(context_id, [loss])
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(2),)), -large(2))


# -- messages that can't be sent -----------------------------------------------------------


@contextlib.contextmanager
def failing_to_send(agent: Agent, *errors: Exception) -> Iterator[None]:
    """Has an agent's next attempts to send something by shared memory fail, all of them."""
    left = list(errors)

    def error_for(_: int, first: bytes) -> Exception | None:
        tags = {tag for tag, _ in parse(first).extensions}
        return left.pop(0) if left and tags & {Tag.SHARED, Tag.SEGMENTS} else None

    with refusing(agent, error_for):
        yield
        assert not left


no_memory = pytest.mark.parametrize(
    "error", [zmq.ZMQError(errno.ENOMEM), MemoryError()], ids=["system", "python"]
)


@no_memory
def test_what_a_call_that_is_not_sent_was_lent_is_free_again(
    joined: Mesh, lends: list[Lend], error: Exception
) -> None:
    """As memory of this process; the segment is not used again, as a part may have left."""
    ours = service_of(joined, 0)
    with (
        failing_to_send(joined.agent(0), error),
        pytest.raises(MemoryError, match="can't be sent"),
    ):
        zrpc.rpc_sync(1, torch.neg, (large(1),))
    assert ours.pool.lent == 0
    assert [lend.number in ours.pool.segments for lend in lends] == [False]
    # Nor does the peer keep the descriptor. It learns that before it has looked for descriptors.
    joined.agent(0).network.wake()
    until(lambda: not ours.pool.retired)
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(1),)), -large(1))
    until_returned(ours)
    until(lambda: not service_of(joined, 1).loans.knows(0, lends[0].number))


@no_memory
def test_what_an_answer_that_is_not_sent_had_is_free_again(joined: Mesh, error: Exception) -> None:
    """And so is what it should have returned."""
    ours, theirs = service_of(joined, 0), service_of(joined, 1)
    with failing_to_send(joined.agent(1), error), pytest.raises(MemoryError):
        zrpc.rpc_sync(1, torch.neg, (large(1),))
    until_returned(theirs)
    until_returned(ours)
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(1),)), -large(1))


def note(verb: int, number: int) -> bytes:
    return struct.pack("<BQ", verb, number)


def test_a_segment_that_may_be_lent_again_is_not_returned_twice(joined: Mesh) -> None:
    """Of a message that can't be sent a part may have left, by which the owner has heard of it."""
    ours, theirs = service_of(joined, 0), service_of(joined, 1)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    number = next(n for n, s in ours.pool.segments.items() if 1 in s.borrowers)
    part = Message(Kind.RESULT, extensions=[(Tag.SEGMENTS, note(1, number))])
    theirs.undo_carry(0, part)
    joined.agent(1).network.wake()
    until_returned(ours)
    assert number not in ours.pool.segments
    for i in range(3):
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(10 + i),)), -large(10 + i))
    assert torch.equal(kept()["held"], large(1))


def test_what_a_fork_may_read_is_not_used_again(joined: Mesh) -> None:
    """But another tensor is. The owner hears of both with the same message."""
    ours, theirs = service_of(joined, 0), service_of(joined, 1)
    zrpc.rpc_sync(1, keep, ("forked", large(1)))
    (forked,) = (n for n, s in ours.pool.segments.items() if 1 in s.borrowers)
    theirs.loans.keep_all()
    zrpc.rpc_sync(1, keep, ("other", large(2)))
    (other,) = (n for n, s in ours.pool.segments.items() if 1 in s.borrowers and n != forked)
    drop("forked", "other")
    until_returned(ours)
    assert forked not in ours.pool.segments
    assert other in ours.pool.segments


@pytest.mark.system
def test_an_answer_that_is_sent_later_keeps_its_segment(joined: Mesh) -> None:
    theirs = service_of(joined, 1)
    with failing_to_send(joined.agent(1), *[zmq.ZMQError(errno.EMFILE)] * 2):
        value = zrpc.rpc_sync(1, large, (1,))
    assert torch.equal(value, large(1))
    assert theirs.pool.lent == 1


# -- peers that say nonsense ---------------------------------------------------------------

RECORD = struct.Struct("<QQ")
NOTE = struct.Struct("<BQ")


def extension(segment: Any, *places: Any, number: Any = None) -> Any:
    offsets, sizes = zip(*places, strict=True) if places else ((), ())
    return record(segment.number if number is None else number, offsets, sizes)


TOO_MUCH = 2**64 - 1
HOSTILE = {
    "empty": lambda s: b"",
    "truncated number": lambda s: extension(s)[:-1],
    "no places": extension,
    "fewer places than it says": lambda s: RECORD.pack(s.number, 2),
    "enormous number of places": lambda s: RECORD.pack(s.number, TOO_MUCH),
    "half a place": lambda s: extension(s, (0, 64)) + b"x" * 7,
    "two segments": lambda s: extension(s, (0, 64)) * 2,
    "place behind the end": lambda s: extension(s, (s.size, 1)),
    "place over the end": lambda s: extension(s, (0, 64), (s.size - 10, 11)),
    "enormous offset": lambda s: extension(s, (TOO_MUCH, 1)),
    "enormous size": lambda s: extension(s, (1, TOO_MUCH)),
    "sum that overflows": lambda s: extension(s, (2**63, 2**63)),
    "segment that has not come": lambda s: extension(s, (0, 64), number=10**6),
    "size 0 of nothing": lambda s: extension(s, (0, 0), number=10**6),
}


def call_with(agent: Agent, to: int, tag: Tag, data: bytes) -> Any:
    """Calls ``echo`` with an extension; returns the result."""
    body, member = (echo, (1,), {}), agent.membership.find(to)
    return agent.caller.call(member, Kind.CALL, body, 20, extension=(tag, data))


def test_an_extension_of_nonsense_is_an_error_at_the_caller(joined: Mesh) -> None:
    agent, ours = joined.agent(0), service_of(joined, 0)
    errors = (zrpc.ProtocolError, OSError, ValueError, struct.error)
    for hostile in HOSTILE.values():
        assert zrpc.rpc_sync(1, torch.numel, (large(1),)) == LARGE
        segment = next(iter(ours.pool.segments.values()))
        with pytest.raises(errors, match=r"."):
            call_with(agent, 1, Tag.SHARED, hostile(segment))
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(1),)), -large(1))
        until_returned(ours)
        until(lambda: not service_of(joined, 1).loans.open, collect=True)


NOTES = {
    "empty": lambda held: b"",
    "half": lambda held: b"\x01\x02",
    "unknown verb": lambda held: NOTE.pack(99, 0),
    "return of what another has": lambda held: NOTE.pack(1, held),
    "keep of what another has": lambda held: NOTE.pack(2, held),
    "return of what isn't": lambda held: NOTE.pack(1, TOO_MUCH),
    "keep of what isn't": lambda held: NOTE.pack(2, TOO_MUCH),
    "closed what isn't": lambda held: NOTE.pack(3, TOO_MUCH),
}


@pytest.mark.zrpc(workers=3)
def test_notes_of_nonsense_change_nothing(joined: Mesh) -> None:
    ours, stranger = service_of(joined, 0), joined.agent(2)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    (held,) = (n for n, s in ours.pool.segments.items() if 1 in s.borrowers)
    for what, hostile in NOTES.items():
        data = hostile(held)
        stranger.outbox.post(0, Message(Kind.SEGMENT, extensions=[(Tag.SEGMENTS, data)]))
        if what in ("half", "unknown verb"):
            with pytest.raises(zrpc.ProtocolError, match=r"extension|known verb"):
                call_with(stranger, 0, Tag.SEGMENTS, data)
        else:
            assert call_with(stranger, 0, Tag.SEGMENTS, data) == 1
        assert (ours.pool.lent, held in ours.pool.segments) == (1, True), what
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(2),)), -large(2))
    assert torch.equal(kept()["held"], large(1))


@pytest.mark.zrpc(workers=3)
def test_a_peer_that_sends_too_many_descriptors_harms_only_itself(joined: Mesh) -> None:
    hostile = joined.agent(2)
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    place = hostile.network.endpoint(0)

    def kept_open() -> int:
        return sum("memfd:hostile" in link for link in descriptors().values()) - 1

    numbers = itertools.count()

    def flood() -> int:
        with contextlib.suppress(BlockingIOError):
            while True:
                hostile.network.descriptors.send(2, place, next(numbers), fd)
        return kept_open()

    until(lambda: flood() == MAX_KNOWN)
    other = service_of(joined, 1)
    for i in range(3):  # while there is no room for descriptors
        flood()
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(i),)), -large(i))
    until(lambda: zrpc.rpc_sync(1, large, (1,)).numel() == LARGE and other.sent_bytes)
    until(lambda: kept_open() == MAX_KNOWN)  # one more while another one comes in its place
    hostile.shutdown(graceful=False)
    until(lambda: kept_open() == 0)
    os.close(fd)
    # One that is lost, and sends more.
    directory = hostile.network.directory.path
    directory.mkdir()
    again = DescriptorSocket(directory)
    ours, theirs = os.pipe()
    again.send(2, place, 0, theirs)
    os.close(theirs)
    assert os.read(ours, 1) == b""  # nobody has the other end
    again.close()
    os.close(ours)
    shutil.rmtree(directory)


# -- messages that are lost ----------------------------------------------------------------


def lose(mesh: Mesh, sender: int, function: Any, argument: Any) -> None:
    """Loses the next message of a worker to the other one: a call, or its answer."""
    with faults.drop(mesh, sender, 1 - sender), pytest.raises(zrpc.RpcTimeoutError):
        zrpc.rpc_sync(1, function, (argument,), timeout=0.2)


@pytest.mark.system
@pytest.mark.zrpc(faults=True)
def test_a_segment_comes_back_if_a_message_is_lost(caller: Mesh) -> None:
    """If it brings the segment, or returns it. One that is in use stays lent."""
    lender, borrower = service_of(caller, 0), service_of(caller, 1)
    lose(caller, 0, torch.numel, large(1))
    assert lender.pool.lent == 1
    lose(caller, 1, large, 1)
    assert borrower.pool.lent == 1
    used = zrpc.rpc_sync(1, large, (2,))
    assert borrower.pool.lent == 2
    with faults.drop(caller, 0, 1) as fault:
        del used
        until(lambda: fault.happened == 1, "it is returned", collect=True)
    used = zrpc.rpc_sync(1, large, (3,))
    for each in (lender, borrower):
        each.check_seconds = 0.1
    until_returned(lender)
    until_returned(borrower, lent=1)
    for _ in range(3):  # it is asked again and again, and has it
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (used,)), -large(3))
    until_returned(borrower, lent=1)
    assert torch.equal(used, large(3))
