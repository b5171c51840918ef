"""Workers that run out of descriptors, memory or threads: their callers are told, they go on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.observed import answers_heartbeats
from tests.support.refusals import refusing
from tests.support.threads import no_more_threads
from tests.support.waiting import until
from zrpc.agent.current import current_agent
from zrpc.services.inspection.service import InspectionService
from zrpc.testing import Mesh
from zrpc.transport import fd_reserve as reserves
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc of Linux")

PATIENT = {"rpc_timeout": 20}
LARGE = 1 << 22  # elements of a tensor that goes by shared memory: 16 MiB
_M_ARENA_MAX = -8  # of mallopt(3): how many arenas, each with memory of its own, threads share


# -- what the workers of a mesh of processes do ------------------------------------------------


def held_files() -> list[int]:
    """Those of this process; each of these functions is sent with globals of its own."""
    found: list[int] = vars(reserves).setdefault("held_by_test", [])
    return found


def open_too_many() -> None:
    """Opens files until there are no descriptors left."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    while True:
        held_files().append(os.open(os.devnull, os.O_RDONLY))


def use_up_descriptors() -> None:
    with contextlib.suppress(OSError):
        open_too_many()


def await_release() -> None:
    """Waits until the reserve is given up, which is for whoever connects."""
    until(lambda: reserves.reserve.released)


def await_hiding(hidden: bool) -> None:
    """Waits until nobody can connect any more, or everybody again."""
    directory = current_agent().network.directory
    assert directory is not None
    until(lambda: directory.socket_path.exists() is not hidden)


def await_heartbeats(rank: int) -> None:
    """Waits until all connections to a peer are made: that of the heartbeats comes last."""
    until(lambda: answers_heartbeats(rank))


def close_files() -> None:
    while held_files():
        os.close(held_files().pop())


def limit_memory(mebibytes: int | None) -> None:
    """Allows the process so much more memory than it has; None for any amount."""
    limit = resource.RLIM_INFINITY
    if mebibytes is not None:
        # Else a thread that first allocates now could reserve 64 MiB of it for itself.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def allocate_bytes() -> bytes:
    return bytes(1 << 50)


def many_bytes(size: int) -> list[bytes]:
    """Fits into the memory once, but not pickled beside it."""
    return [bytes(size)]


def attempt(to: str, function: Any, *args: Any) -> tuple[str, str, str]:
    """Calls; returns the type of the error, its text and that of its cause."""
    try:
        rpc.rpc_sync(to, function, args)
    except Exception as error:
        return type(error).__name__, str(error), str(error.__cause__)
    return "no error", "", ""


def attempt_large(to: str, size: int) -> tuple[str, str, str]:
    return attempt(to, torch.numel, torch.ones(size))


def attempt_bytes(to: str, size: int) -> tuple[str, str, str]:
    return attempt(to, len, bytes(size))


def call(to: str) -> Any:
    return rpc.rpc_sync(to, max, (1, 2))


def send_large(to: str, size: int) -> int:
    return rpc.rpc_sync(to, torch.numel, (torch.ones(size),))


# -- tests -------------------------------------------------------------------------------------


@pytest.mark.zrpc(workers=5, processes=True, options=PATIENT)
def test_no_descriptors_left(mesh: Mesh) -> None:
    assert mesh.run("worker0", call, "worker1") == 2
    assert mesh.run("worker0", send_large, "worker1", LARGE) == LARGE
    # Nobody may connect just when there are none: libzmq would abort, see how-to/overload.md.
    mesh.run("worker0", await_heartbeats, 1)
    mesh.run("worker1", await_heartbeats, 0)  # by what it could not import any more later
    # A handler that needs one too many: its caller is told whose, and what to do.
    kind, text, cause = mesh.run("worker0", attempt, "worker1", open_too_many)
    assert (kind, "Too many open files" in text) == ("OSError", True)
    assert "name=worker1" in cause
    assert "no file descriptors left (it may have 300)" in cause
    assert "ulimit -n" in cause
    # New peers, in both directions.
    mesh.run("worker1", await_release)
    assert mesh.run("worker2", call, "worker1") == 2
    assert mesh.run("worker1", call, "worker3") == 2
    for name in ("worker0", "worker2", "worker3"):
        mesh.run(name, await_heartbeats, 1)
    # None at all. The I/O thread needs one to map a segment that it doesn't know yet.
    mesh.run("worker1", use_up_descriptors)
    mesh.run("worker1", await_hiding, True)
    kind, text, cause = mesh.run("worker0", attempt_large, "worker1", 4 * LARGE)
    assert kind == "OSError"
    assert "ulimit -n" in cause
    kind, text, _ = mesh.run("worker1", attempt, "worker4", max, 1, 2)
    assert kind == "OSError"
    assert "ulimit -n" in text
    waiting = mesh.submit("worker4", call, "worker1")  # can't connect as yet
    assert mesh.run("worker0", call, "worker1") == 2
    # And after that all is well again.
    mesh.run("worker1", close_files)
    assert waiting.result() == 2
    mesh.run("worker1", await_hiding, False)
    assert mesh.run("worker0", send_large, "worker1", 4 * LARGE) == 4 * LARGE
    assert mesh.run("worker1", call, "worker4") == 2


@pytest.mark.zrpc(processes=True, options=PATIENT)
def test_no_memory_left(mesh: Mesh) -> None:
    for _ in range(3):
        assert mesh.run("worker0", send_large, "worker1", LARGE) == LARGE
    mesh.run("worker1", limit_memory, 100)
    attempts = [
        mesh.run("worker0", attempt, "worker1", torch.empty, 1 << 50),
        mesh.run("worker0", attempt, "worker1", allocate_bytes),
        mesh.run("worker0", attempt, "worker1", many_bytes, 60 << 20),
        mesh.run("worker0", attempt_large, "worker1", 16 * LARGE),  # a segment of 256 MiB
    ]
    kinds = [kind for kind, _, _ in attempts]
    assert kinds == ["RuntimeError", "MemoryError", "MemoryError", "OSError"]
    for _, _, cause in attempts:
        assert "On WorkerInfo(id=1, name=worker1): the process has no memory left" in cause
        assert "ulimit -v" in cause
    # At the caller itself: it can't send, and it can't read an answer.
    kind, text, _ = mesh.run("worker1", attempt_bytes, "worker0", 60 << 20)
    assert kind == "MemoryError"
    kind, text, _ = mesh.run("worker1", attempt, "worker0", torch.ones, 16 * LARGE)
    assert kind == "ProtocolError"
    assert "no memory left" in text
    assert mesh.run("worker0", call, "worker1") == 2
    mesh.run("worker1", limit_memory, None)
    assert mesh.run("worker0", send_large, "worker1", 16 * LARGE) == 16 * LARGE


def ask_often() -> None:
    """Asks its callees after calls that wait, so often."""
    current_agent().service(InspectionService).rules.seconds = 0.1


@pytest.mark.zrpc(processes=True, options={**PATIENT, "shared_memory": 0})
@pytest.mark.parametrize("mebibytes", [60, 160], ids=["libzmq", "zrpc"])
def test_a_message_that_there_is_no_memory_for(mesh: Mesh, mebibytes: int) -> None:
    """It is lost, to libzmq or when it is copied; the caller is told before its deadline."""
    mesh.run("worker0", ask_often)
    assert mesh.run("worker0", call, "worker1") == 2
    mesh.run("worker1", limit_memory, mebibytes)
    kind, text, _ = mesh.run("worker0", attempt_bytes, "worker1", 100 << 20)
    assert kind == "RpcError"
    assert "is lost: a connection broke, or there was no memory" in text
    mesh.run("worker1", limit_memory, None)
    assert mesh.run("worker0", attempt_bytes, "worker1", 100 << 20)[0] == "no error"


@pytest.mark.filterwarnings("ignore:.*security")
@pytest.mark.zrpc(processes=True, options={**PATIENT, "transport": "tcp", "security": "none"})
def test_a_message_in_chunks_that_there_is_no_memory_for(mesh: Mesh) -> None:
    """Its caller is told at once, whether the call or the answer is lost; a shutdown ends."""
    assert mesh.run("worker0", call, "worker1") == 2
    mesh.run("worker1", limit_memory, 100)
    kind, text, _ = mesh.run("worker0", attempt_large, "worker1", 16 * LARGE)
    assert (kind, "the function has not run" in text) == ("RpcError", True)
    kind, text, _ = mesh.run("worker1", attempt, "worker0", torch.ones, 16 * LARGE)
    assert (kind, "the function has run" in text) == ("RpcError", True)
    mesh.run("worker1", limit_memory, None)
    assert mesh.run("worker0", send_large, "worker1", 16 * LARGE) == 16 * LARGE


@pytest.fixture
def failures(caller: Mesh) -> Iterator[list[Exception]]:
    """The errors of worker1's next attempts to send, the last one first."""
    errors: list[Exception] = []
    with refusing(caller.agent(1), lambda *_: errors.pop() if errors else None):
        yield errors


@pytest.mark.system
def test_messages_wait_for_descriptors(caller: Mesh, failures: list[Exception]) -> None:
    failures += [zmq.ZMQError(errno.EMFILE)] * 3
    assert rpc.rpc_sync(1, max, (1, 2), timeout=20) == 2
    assert not failures
    failures += [zmq.ZMQError(errno.EMFILE)] * 2
    caller.agent(1).outbox.post(0, Message(Kind.CANCEL, 2**60))  # without an answer
    until(lambda: not failures and not len(caller.agent(1).outbox))
    failures += [zmq.ZMQError(errno.ENOMEM)]
    with pytest.raises(MemoryError, match="no memory to send") as info:
        rpc.rpc_sync(1, max, (1, 2), timeout=20)
    assert "name=worker1" in str(info.value.__cause__)
    assert rpc.rpc_sync(1, max, (1, 2), timeout=20) == 2


def test_a_call_that_can_not_be_sent(mesh: Mesh, failures: list[Exception], gate: Gate) -> None:
    """Its caller gets the error. Others in flight don't fail, and no reference leaks."""
    with mesh.agent(1).as_current():
        other = rpc.rpc_async(1, gate.wait_inside, ("done",))
        rref = rpc.RRef(1)
        for number in (errno.EMFILE, errno.ENOMEM, None):
            # Kept nowhere else: its traceback would keep the RRef.
            failures += [MemoryError() if number is None else zmq.ZMQError(number)]
            expected = OSError if number == errno.EMFILE else MemoryError
            with pytest.raises(expected, match="the call can't be sent"):
                rpc.rpc_async(0, repr, (rref,))
        gate.open()
        assert other.wait() == "done"
        assert rpc.rpc_sync(0, max, (1, 2)) == 2
        del rref
        until(lambda: not rpc.stats().rrefs_owned, collect=True)


class Large:
    """What can't be unpickled for lack of memory."""

    def __reduce__(self) -> Any:
        return allocate_bytes, ()


def test_no_memory_to_unpickle(caller: Mesh) -> None:
    with pytest.raises(MemoryError) as info:
        rpc.rpc_sync(1, repr, (Large(),))
    text = "On WorkerInfo(id=1, name=worker1): the process has no memory left"
    assert text in str(info.value.__cause__)
    with pytest.raises(MemoryError):
        rpc.rpc_sync(1, Large)
    assert rpc.rpc_sync(1, max, (1, 2)) == 2


async def coroutine() -> int:
    return 3


@pytest.mark.system
@pytest.mark.filterwarnings("error::RuntimeWarning")  # of coroutines that nobody awaits
def test_no_threads_left(caller: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that never had one in its pool runs one call at a time; its log says why, once."""
    ask_often()
    with no_more_threads():
        for _ in range(20):  # too long for a thread that receives, as far as others can have them
            rpc.rpc_sync(1, time.sleep, (0.005,))
        futures = [rpc.rpc_async(1, time.sleep, (0.005,)) for _ in range(10)]
        assert rpc.rpc_sync(1, rpc.rpc_sync, (0, max, (1, 2))) == 2
        rpc.wait_all(futures)
        with pytest.raises(rpc.RpcTimeoutError) as info:
            rpc.rpc_sync(1, rpc.rpc_sync, (1, call, ("worker1",)), timeout=2)
        assert "no thread beyond 1 (see `ulimit -u`)" in str(info.value)
        with pytest.raises(RuntimeError, match="can't start new thread") as info:
            rpc.rpc_sync(1, coroutine)
        assert "ulimit -u" in str(info.value.__cause__)
    assert caplog.text.count("thread for zrpc-worker1-worker; a call waits") == 1
    assert (call("worker1"), rpc.rpc_sync(1, coroutine)) == (2, 3)
