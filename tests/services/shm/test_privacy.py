"""Nobody else sees what a holder writes to a tensor from shared memory."""

from __future__ import annotations

import pytest
import torch

import zrpc
from tests.services.shm.conftest import Lend
from tests.services.shm.sharing import (
    LARGE,
    drop,
    keep,
    kept,
    large,
    make,
    sends_by_segments,
    service_of,
    until_returned,
)
from zrpc.testing import Mesh

pytestmark = sends_by_segments


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


@pytest.mark.system
def test_what_is_written_to_a_returned_segment_is_not_in_the_next_message(
    joined: Mesh, lends: list[Lend]
) -> None:
    for i in range(6):
        received = zrpc.rpc_sync(1, make, (i, LARGE - i))
        assert torch.equal(received, large(i, LARGE - i))
        received.fill_(float("nan"))
        del received
        until_returned(service_of(joined, 1))
    assert len({lend.number for lend in lends}) == 1
