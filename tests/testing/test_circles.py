"""A test that does not end because its workers wait for each other says so."""

from __future__ import annotations

import pytest
from waiting_circle import holds_up_its_loop

import zrpc
from zrpc.testing import MeshTimeout, local_mesh


@pytest.mark.filterwarnings("ignore:coroutine 'coroutine' was never awaited")
def test_the_report_of_a_hang_names_the_circle() -> None:
    def hang() -> None:
        with local_mesh(2, timeout=2) as mesh:
            mesh.run(0, zrpc.rpc_sync, "worker0", holds_up_its_loop)

    with pytest.raises(MeshTimeout) as info:
        hang()
    message = str(info.value)
    assert message.count("A circle of waiting over 2 workers: none of these can go on.") == 1
    assert "worker0 (rank 0): a coroutine, which runs coroutine for worker1 (rank 1)" in message
    assert message.index("A circle") < message.index("---- stacks of worker0")
