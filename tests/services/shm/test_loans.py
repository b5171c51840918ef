"""How long a segment is lent, and with which message it is returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc
from tests.services.shm.conftest import Lend
from tests.services.shm.sharing import (
    LARGE,
    MIB,
    drop,
    keep,
    kept,
    large,
    make,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.gates import Gate
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = sends_by_segments


FUNCTIONS = [torch.numel, lambda t: t.numel(), torch.neg, lambda t: t.numpy().size]


def test_arguments_are_returned_with_the_answer(joined: Mesh, lends: list[Lend]) -> None:
    ours = service_of(joined, 0)
    for function in FUNCTIONS:
        for i in range(3):
            zrpc.rpc_sync(1, function, (large(i),))
            assert ours.pool.lent == 0
    zrpc.rpc_sync(1, lambda *, t: t.numel(), kwargs={"t": large(0)})
    assert ours.pool.lent == 0
    assert len({lend.number for lend in lends if lend.pool is ours.pool}) == 1


def test_results_are_returned_with_the_next_call(joined: Mesh, lends: list[Lend]) -> None:
    for i in range(5):
        received = zrpc.rpc_sync(1, make, (i,))
        del received
    assert len({lend.number for lend in lends}) == 1


def test_what_cant_be_returned_with_an_answer_is_returned_by_itself(joined: Mesh) -> None:
    for i in range(3):
        zrpc.rpc_sync(1, keep, (i, large(i)))
    drop(0, 1, 2)
    until_returned(service_of(joined, 0))


@pytest.mark.zrpc(workers=3)
def test_segments_of_one_worker_are_not_returned_with_messages_to_another(joined: Mesh) -> None:
    zrpc.rpc_sync(1, keep, (0, large(0)))
    joined.run(2, zrpc.rpc_sync, 1, keep, (1, large(1)))
    drop(0, 1)
    zrpc.rpc_sync(1, echo, (2,))
    until_returned(service_of(joined, 0))
    until_returned(service_of(joined, 2))


@pytest.mark.system
def test_a_receiver_that_keeps_everything_gets_frames_when_the_pool_is_full(
    make_mesh: MakeMesh, lends: list[Lend]
) -> None:
    mesh = make_mesh(options={"shared_memory": 4 * MIB + MIB // 4})
    lends.clear()
    layer = service_of(mesh, 0)
    with mesh.agent(0).as_current():
        for i in range(12):
            zrpc.rpc_sync(1, keep, (i, large(i)))
            assert layer.pool.size <= 4 * MIB + MIB // 4
        assert all(torch.equal(kept()[i], large(i)) for i in range(12))
        assert len({lend.number for lend in lends}) == len(lends) == layer.pool.lent == 4
        for i in range(12):
            kept()[i].fill_(i)
        assert all(kept()[i].sum() == i * LARGE for i in range(12))
        # One is dropped: its segment is used, and the others' are not.
        number = lends[2].number
        kept()[2] = None
        until_returned(layer, 3)
        zrpc.rpc_sync(1, keep, ("new", large(99)))
        assert lends[-1].number == number
        assert torch.equal(kept()["new"], large(99))
        assert all(kept()[i].sum() == i * LARGE for i in range(12) if i != 2)
        kept().clear()
        until_returned(layer)


@pytest.mark.system
def test_a_late_answer_is_returned(
    joined: Mesh, lends: list[Lend], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The callee must not find out first that nobody waits any more: it would not answer then.
    monkeypatch.setattr(joined.agent(1).callee, "drop_abandoned", lambda: None)
    with Gate() as gate:
        future = zrpc.rpc_async(1, gate.wait_inside, (large(1),), timeout=0.3)
        gate.await_entry()
        with pytest.raises(zrpc.RpcTimeoutError):
            future.wait()
    theirs = service_of(joined, 1)
    until(lambda: any(lend.pool is theirs.pool for lend in lends), collect=True)
    until_returned(theirs)


class CantBeFound:
    """Something whose unpickling fails at the receiver, with its tensors not looked at."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return explode, (self.tensor,)


def explode(tensor: Any) -> None:
    raise LookupError("there is no such thing here")


def test_a_request_that_cant_be_unpickled_is_returned(joined: Mesh, lends: list[Lend]) -> None:
    for _ in range(3):
        with pytest.raises(zrpc.SerializationError, match="no such thing"):
            zrpc.rpc_sync(1, echo, (CantBeFound(large(1)),))
    assert len(lends) == 3
    until_returned(service_of(joined, 0))


@pytest.mark.zrpc(workers=4)
def test_receivers_of_one_tensor_do_not_see_each_other(joined: Mesh, lends: list[Lend]) -> None:
    sent = large(1)
    for rank in range(1, 4):
        zrpc.rpc_sync(rank, keep, (rank, sent))
    assert sorted(lend.borrower for lend in lends) == [1, 2, 3]
    kept()[1].fill_(1)
    kept()[2].fill_(2)
    assert torch.equal(kept()[3], sent)
    assert torch.equal(sent, large(1))
    assert kept()[1].sum() == LARGE
    drop(1, 2, 3)
    until_returned(service_of(joined, 0))
