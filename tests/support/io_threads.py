"""The I/O threads of workers: held up, or waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tests.support.gates import Gate
from tests.support.waiting import SOON
from zrpc.agent.agent import Agent
from zrpc.testing import Mesh


@contextlib.contextmanager
def io_thread_held(mesh: Mesh, worker: int | str) -> Iterator[None]:
    """Holds a worker's I/O thread; next, it looks at what was dropped, and then at messages."""
    with Gate() as gate:
        mesh.agent(worker).receiver.in_io_thread(gate.wait_inside)
        gate.await_entry()
        yield


def await_io_thread(agent: Agent) -> None:
    """Waits until the I/O thread of a worker has done what it was asked to do before."""
    done = threading.Event()
    agent.receiver.in_io_thread(done.set)
    assert done.wait(SOON)


def await_io_threads(mesh: Mesh) -> None:
    """Waits until the I/O thread of each worker has done what it was asked to do before."""
    for name in mesh:
        await_io_thread(mesh.agent(name))
