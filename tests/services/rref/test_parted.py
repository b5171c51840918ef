"""An owner that has lost a worker, while others still reach both and bring its RRefs."""

from __future__ import annotations

from typing import Any

import pytest

import zrpc
from tests.support.observed import stats_of
from tests.support.parting import leaving_at_once, lose_each_other
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.testing import Mesh, faults

# Without heartbeats, nobody decides which of the two must go.
OPTIONS = {"heartbeat_timeout": 0, "rpc_timeout": 10.0}
pytestmark = pytest.mark.zrpc(workers=3, timeout=30, faults=True, options=OPTIONS)


def fetch(rref: zrpc.RRef[Any]) -> Any:
    return rref.to_here()


def bring(rref: zrpc.RRef[Any]) -> Any:
    """Gives an RRef to its owner."""
    return zrpc.rpc_sync(rref.owner(), fetch, (rref,))


@pytest.mark.parametrize("use", [bring, fetch])
def test_a_value_whose_creator_is_lost_before_its_call_has_arrived(mesh: Mesh, use: Any) -> None:
    with leaving_at_once(mesh), mesh.agent(1).as_current():
        zrpc.rpc_sync("worker0", echo, (1,))
        with faults.drop(mesh, 1, 0):
            rref = zrpc.remote("worker0", list)
        lose_each_other(mesh, 0, 1)
        with pytest.raises(zrpc.OwnerDied, match=r"worker1 .*is gone.* it had asked for the value"):
            zrpc.rpc_sync("worker2", use, (rref,))


def test_a_value_that_was_freed_with_the_loss_of_its_user(mesh: Mesh) -> None:
    with leaving_at_once(mesh), mesh.agent(1).as_current():
        rref = zrpc.rpc_sync("worker0", zrpc.RRef, (5,))
        lose_each_other(mesh, 0, 1)
        until(lambda: not stats_of(mesh, 0).rrefs_owned)
        with pytest.raises(zrpc.RpcError, match="no longer here"):
            zrpc.rpc_sync("worker2", bring, (rref,))
