"""Workers that lose each other although both live, and others reach both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import zrpc
from tests.support.io_threads import await_io_thread
from zrpc.membership.failure_detector import Reason
from zrpc.testing import Mesh

__all__ = ["leaving_at_once", "lose_each_other"]


def lose_each_other(mesh: Mesh, one: int, other: int) -> None:
    """Has two workers lose each other, as if the network between them were cut."""
    for this, lost in ((one, other), (other, one)):
        agent, member = mesh.agent(this), mesh.agent(lost).worker_info.member_id
        agent.receiver.in_io_thread(partial(agent.peers.remove, member, Reason.SILENT))
        await_io_thread(agent)
        assert member in agent.membership.lost


@contextlib.contextmanager
def leaving_at_once(mesh: Mesh) -> Iterator[None]:
    """Lets all workers leave at the end: if two have lost each other, none waits for the others."""
    try:
        yield
    finally:
        for rank in range(len(mesh)):
            mesh.run(rank, zrpc.shutdown, graceful=False)
