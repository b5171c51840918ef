"""The fork server for meshes of processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from zrpc.launch.channel import Channel
from zrpc.launch.starter import DEFAULT_PRELOAD
from zrpc.testing import server
from zrpc.testing.plugin import MakeMesh
from zrpc.testing.procfs import children, state_of
from zrpc.testing.server import warm_server

SCRIPT = """
import os, signal
from zrpc.testing import local_mesh
with local_mesh(2, processes=True, timeout=60) as mesh:
    print(mesh.run(0, os.getppid), mesh.run(0, os.getenv, "ZRPC_RUNTIME_DIR"), flush=True)
    mesh.run(1, signal.pause)
"""


@pytest.mark.zrpc(processes=True, timeout=120)  # two servers import torch
def test_a_dead_server_is_replaced(monkeypatch: pytest.MonkeyPatch, make_mesh: MakeMesh) -> None:
    # The shared one has children that other tests need, and that end with it.
    monkeypatch.setattr(server, "_server", None)
    # Without what takes long and no worker here needs.
    monkeypatch.setattr(server, "_PRELOAD", DEFAULT_PRELOAD)
    first = warm_server()
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert make_mesh(workers=1).run(0, os.getppid) == warm_server().pid != first.pid
    assert warm_server() is warm_server()


@pytest.mark.system
def test_a_server_that_takes_no_more_requests_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_server", None)
    monkeypatch.setattr(server, "_PRELOAD", ())
    first = warm_server()
    with monkeypatch.context() as patched:
        patched.setattr(Channel, "receive", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            first.make_directory()
    try:
        assert os.path.isdir(warm_server().make_directory())
    finally:
        warm_server().close()


@pytest.mark.system
def test_server_and_workers_exit_with_a_killed_test_process() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE) as process:
        try:
            server, home = process.stdout.readline().decode().split()
            workers = children(int(server))
            # A pidfd is readable when its process has exited.
            ends = [os.pidfd_open(pid) for pid in (int(server), *workers)]
            assert len(workers) == 2
            assert os.path.isdir(home)
        finally:
            process.kill()  # otherwise the end of this block would wait for it
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
