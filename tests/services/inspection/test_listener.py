"""Where a worker is asked what it does: who may ask, and what is left afterwards."""

from __future__ import annotations

import contextlib
import contextvars
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import zrpc
from tests.support.hosts import mesh_on_hosts
from tests.support.threads import no_more_threads
from tests.support.waiting import SOON, until
from zrpc.services.inspection import discovery
from zrpc.services.inspection import listener as listening
from zrpc.services.inspection.discovery import ask, directories, meshes
from zrpc.services.inspection.listener import OTHERS, SELF, SOCKET, Listener
from zrpc.services.inspection.snapshot import Snapshot
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh


def directory(mesh: Mesh, worker: int = 0) -> Path:
    membership = mesh.agent(worker).membership
    return Path(membership.records[worker].directory)


LARGE = os.urandom(1 << 20).replace(b"\n", b" ")


class Asked:
    """A listener that notes what it is asked, and answers with a large line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.questions: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.listener = Listener(path, contextvars.Context(), "test-visit", self._answer)

    def _answer(self, question: str) -> Iterator[bytes]:
        self.questions.append(question)
        self.hold.wait()
        yield LARGE


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(tmp_path)
    yield made
    made.listener.close()
    made.hold.set()
    until(lambda: not visits())


def visits() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "test-visit"]


def visit(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(SOON)
    connection.connect(str(path / SOCKET))
    return connection


def test_a_question_in_pieces_and_a_large_answer(asked: Asked) -> None:
    with visit(asked.path) as connection:
        asked.listener.admit()
        connection.sendall(b"se")
        assert asked.questions == []
        connection.sendall(b"lf\n")
        came = bytearray()
        while data := connection.recv(1 << 16):
            came += data
    assert came == LARGE + b"\n"
    assert asked.questions == [SELF]


def is_sent_away(asked: Asked, sent: bytes) -> None:
    """Checks that a visitor who sends this gets no answer, and that its question is not asked."""
    with visit(asked.path) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        asked.listener.admit()
        assert _read(connection) == b""
    assert asked.questions == []


def test_visitors_without_a_question_are_sent_away(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sent in (b"", b"x" * 1000):
        is_sent_away(asked, sent)
    monkeypatch.setattr(listening, "STEP_SECONDS", 0.01)
    with visit(asked.path) as connection:
        asked.listener.admit()
        assert _read(connection) == b""


def test_a_visitor_that_leaves_early_is_no_error(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    with visit(asked.path) as connection:
        connection.sendall(b"self\n")
        asked.listener.admit()
    until(lambda: not visits())
    assert asked.questions == [SELF]
    assert not caplog.records


def test_a_visitor_is_sent_away_if_the_system_refuses_a_thread(asked: Asked) -> None:
    """The tick that admits visitors goes on."""
    with visit(asked.path) as connection, no_more_threads():
        asked.listener.admit()
        assert connection.recv(1) == b""


def test_visitors_are_few_at_the_same_time(asked: Asked) -> None:
    asked.hold.clear()
    connections = [visit(asked.path) for _ in range(listening.MAX_VISITORS + 2)]
    for connection in connections:
        connection.sendall(b"self\n")
    for _ in connections:
        asked.listener.admit()
    until(lambda: len(asked.questions) == len(visits()) == listening.MAX_VISITORS)
    asked.hold.set()
    for connection in connections:
        until(lambda: asked.listener.admit() or _arrived(connection))  # noqa: B023
        connection.close()


def _arrived(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return bool(connection.recv(1))
    return False


def test_another_user_is_refused(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "peer_of", lambda _: (1, os.geteuid() + 1))
    is_sent_away(asked, b"self\n")
    assert "Refused to tell user" in caplog.text


def _read(connection: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        return connection.recv(1)
    return b""


@pytest.mark.zrpc(options={"transport": "tcp"})
def test_a_worker_is_asked_also_if_the_mesh_uses_tcp_and_its_snapshot_travels(mesh: Mesh) -> None:
    [answer] = ask([directory(mesh)], SOON)
    [snapshot] = answer.snapshots
    assert (snapshot.member, snapshot.name) == (0, "worker0")
    assert snapshot.pid == answer.pid == os.getpid()
    assert [member.name for member in snapshot.members] == ["worker0", "worker1"]
    assert stat.S_IMODE(directory(mesh).stat().st_mode) == 0o700
    dumped = snapshot.dump()
    assert Snapshot.parse(dumped) == snapshot
    for wrong in (b"[]", b"{}", b'{"format": 4}', b"x", dumped.replace(b"member", b"rebmem")):
        with pytest.raises(ValueError, match=r"expected|Expecting"):
            Snapshot.parse(wrong)


def test_meshes_are_told_apart_by_their_answers(mesh: Mesh, make_mesh: MakeMesh) -> None:
    other = make_mesh(3)
    expected = {str(directory(m, i)) for m in (mesh, other) for i in range(len(m))}
    paths = [path for path in directories() if str(path) in expected]
    assert len(paths) == 5
    found, rest = meshes(ask(paths, SOON))
    assert sorted(len(view.snapshots) for view in found) == [2, 3]
    assert rest == []
    assert all(view.silent == {} for view in found)


def test_a_directory_that_others_can_read_is_not_asked(mesh: Mesh) -> None:
    path = directory(mesh)
    path.chmod(0o755)
    assert path not in directories()
    path.chmod(0o700)
    assert path in directories()


def test_a_socket_where_this_user_may_not_look_is_none_of_a_worker(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = tmp_path / "bound"
    where = f"/{'x' * 300}/{SOCKET}"  # too long to look at, which fails for root too
    bound.write_text(f"0000000000000000: 00000002 00000000 00010000 0001 01 12345 {where}\n")
    monkeypatch.setattr(discovery, "_BOUND", str(bound))
    assert directory(mesh) in directories()


@pytest.mark.system
@pytest.mark.zrpc(options={"transport": "tcp"})
def test_a_member_asks_other_hosts(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, _ = mesh_on_hosts(make_mesh, monkeypatch, workers=2)
    [here], rest = meshes(ask([directory(mesh)], SOON))
    assert rest == []
    assert list(here.snapshots) == [0]
    assert here.silent == {1: "it is on another host, and did not answer the workers here in time"}
    here.ask_other_hosts(SOON)
    assert {rank: s.name for rank, s in here.snapshots.items()} == {0: "worker0", 1: "worker1"}
    assert here.silent == {}


@pytest.mark.system
def test_a_worker_lost_on_another_host_is_not_waited_for(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, _ = mesh_on_hosts(make_mesh, monkeypatch, workers=2)
    with mesh.agent(0).as_current():
        zrpc.rpc_sync("worker1", max, args=(1, 2))
        lost = threading.Event()
        zrpc.on_worker_lost(lambda _: lost.set())
        mesh.run(1, zrpc.shutdown, graceful=False)
        assert lost.wait(SOON)
    [answer] = ask([directory(mesh)], SOON, OTHERS)
    assert answer.snapshots == []
    [here], _ = meshes(ask([directory(mesh)], SOON))
    assert "worker1 (rank 1) is gone: it left the mesh" in here.silent[1]


@pytest.mark.system
def test_an_error_in_an_answer_ends_the_visit_and_not_the_worker(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[bool] = []  # also what other programs have asked

    def fail(*_: object) -> None:
        failed.append(True)
        raise ValueError("broken")

    with monkeypatch.context() as patched:
        patched.setattr("zrpc.services.inspection.service.take_snapshot", fail)
        [answer] = ask([directory(mesh)], SOON)
        assert answer.problem == "it exited while it was asked"
        until(lambda: [each.exc_info is not None for each in caplog.records] == failed)
    assert mesh.run(0, zrpc.rpc_sync, "worker1", max, (1, 2)) == 2
    [answer] = ask([directory(mesh)], SOON)
    assert answer.snapshots


def test_nothing_is_left(mesh: Mesh) -> None:
    path = directory(mesh)
    assert (path / SOCKET).is_socket()
    connection = visit(path)
    mesh.shutdown()
    assert not path.exists()
    assert _read(connection) == b""
    connection.close()
    assert ask([path], SOON)[0].problem == "it can't be asked: it is starting or exiting"


@pytest.mark.system
def test_workers_answer_in_the_longest_directory_that_leaves_room_for_sockets(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="z", dir="/var/tmp") as base:
        parent = Path(base, "p" * (80 - len(base) - 1))
        parent.mkdir()
        monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(parent))
        mesh = make_mesh(2)
        paths = [directory(mesh, rank) for rank in range(2)]
        assert [path.parent for path in paths] == [parent, parent]
        assert [answer.problem for answer in ask(paths, SOON)] == ["", ""]
        mesh.shutdown()
