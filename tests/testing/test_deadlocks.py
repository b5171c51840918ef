"""The report of a hang names deadlocks among the workers."""

from __future__ import annotations

import pytest

import zrpc
from tests.support.waiting_circle import holds_up_its_loop
from zrpc.testing import MeshTimeout, local_mesh


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:coroutine 'coroutine' was never awaited")
def test_the_report_of_a_hang_names_the_deadlock() -> None:
    def hang() -> None:
        with local_mesh(2, timeout=2) as mesh:
            mesh.run(0, zrpc.rpc_sync, "worker0", holds_up_its_loop)

    with pytest.raises(MeshTimeout) as info:
        hang()
    message = str(info.value)
    assert message.count("A circle of waiting over 2 workers: none of these can go on.") == 1
    assert "worker0 (rank 0): a coroutine, which runs coroutine for worker1 (rank 1)" in message
    assert message.index("A circle") < message.index("---- stacks of worker0")
