"""The fork server for meshes of processes."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import Forked
from tests.support.waiting import until
from zrpc.launch.channel import Channel
from zrpc.launch.starter import Starter
from zrpc.testing import server
from zrpc.testing.procfs import children, state_of
from zrpc.testing.server import warm_server

pytestmark = pytest.mark.system

SCRIPT = """
import os, signal
from zrpc.testing import local_mesh
with local_mesh(2, processes=True, timeout=60) as mesh:
    print(mesh.run(0, os.getppid), mesh.run(0, os.getenv, "ZRPC_RUNTIME_DIR"))
    mesh.run(1, signal.pause)
"""


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    """A server in the place of the shared one, whose children other tests need."""
    monkeypatch.setattr(server, "_server", None)
    monkeypatch.setattr(server, "_PRELOAD", ())  # no worker is forked
    yield warm_server()
    warm_server().close()


def test_a_dead_server_is_replaced(first: Starter) -> None:
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert os.path.isdir(warm_server().make_directory())
    assert warm_server() is warm_server()
    assert warm_server().pid != first.pid


def test_a_server_that_takes_no_more_requests_is_replaced(
    first: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Channel, "receive", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            first.make_directory()
    assert os.path.isdir(warm_server().make_directory())


def test_server_and_workers_exit_with_a_killed_test_process(tmp_path: Path) -> None:
    script, output, tests = tmp_path / "script.py", tmp_path / "output", Forked()
    script.write_text(SCRIPT)
    killed = tests.start(script, env=os.environ, out=output)
    try:
        until(lambda: output.read_text().endswith("\n"), within=60)
        server, home = output.read_text().split()
        workers = children(int(server))
        # A pidfd is readable when its process has exited.
        ends = [os.pidfd_open(pid) for pid in (int(server), *workers)]
        assert len(workers) == 2
        assert os.path.isdir(home)
    finally:
        tests.send_signal(signal.SIGKILL)
        assert tests.wait(killed, 20) == -signal.SIGKILL
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    while ends:
        ready = [fd for fd, _ in poll.poll(20_000)]
        assert ready, "expected the server and all workers to exit, but one still runs"
        for fd in ready:
            poll.unregister(fd)
            ends.remove(fd)
            os.close(fd)
    assert state_of(int(server)) in ("", "Z")
    assert not os.path.exists(home)
