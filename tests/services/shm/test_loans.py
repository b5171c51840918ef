"""How long a segment is lent, and with which message it is returned."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zrpc
from tests.services.shm.conftest import Lend
from tests.services.shm.sharing import (
    LARGE,
    MIB,
    drop,
    introduce,
    keep,
    kept,
    large,
    make,
    negated,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = sends_by_segments


HOLDS = {
    "tensor": lambda t: t,
    "slice": lambda t: t[100:101],
    "view": lambda t: t.view(-1, 4).t(),
    "detached": lambda t: t.detach(),
    "storage": lambda t: t.untyped_storage(),
    "array": lambda t: t.numpy(),
    "slice of an array": lambda t: t.numpy()[3:4],
    "graph": lambda t: t.requires_grad_().mul(t).grad_fn,
    "cycle": lambda t: (lambda cell: cell.append(cell) or cell)([t]),
}


@pytest.mark.system
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_a_loan_lasts_as_long_as_anything_of_the_tensor(
    introduced: Mesh, lends: list[Lend], hold: Any
) -> None:
    theirs = service_of(introduced, 1)
    received = zrpc.rpc_sync(1, make, (1,))
    held = hold(received)
    del received
    numbers = set()
    for i in range(2, 5):
        other = zrpc.rpc_sync(1, make, (i,))
        assert torch.equal(other, large(i))
        numbers.add(lends[-1].number)
        del other
        until_returned(theirs, 1)
    assert theirs.pool.lent == 1
    assert lends[0].number not in numbers
    del held
    until_returned(theirs)


def test_a_clone_does_not_hold_the_loan(introduced: Mesh) -> None:
    clone = zrpc.rpc_sync(1, make, (1,)).clone()
    until_returned(service_of(introduced, 1))
    zrpc.rpc_sync(1, make, (2,))
    assert torch.equal(clone, large(1))


FUNCTIONS = {
    "builtin": torch.numel,
    "python": lambda t: t.numel(),
    "large result": torch.neg,
    "keyword": lambda *, t: t.numel(),
    "array": lambda t: t.numpy().size,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_returned_with_the_answer(
    introduced: Mesh, lends: list[Lend], name: Any
) -> None:
    ours = service_of(introduced, 0)
    for i in range(5):
        if name == "keyword":
            zrpc.rpc_sync(1, FUNCTIONS[name], kwargs={"t": large(i)})
        else:
            zrpc.rpc_sync(1, FUNCTIONS[name], (large(i),))
        assert ours.pool.lent == 0
    assert len({lend.number for lend in lends if lend.pool is ours.pool}) == 1


def test_results_are_returned_with_the_next_call(introduced: Mesh, lends: list[Lend]) -> None:
    for i in range(5):
        received = zrpc.rpc_sync(1, make, (i,))
        del received
    assert len({lend.number for lend in lends}) == 1


def test_what_cant_be_returned_with_an_answer_is_returned_by_itself(introduced: Mesh) -> None:
    for i in range(3):
        zrpc.rpc_sync(1, keep, (i, large(i)))
    drop(0, 1, 2)
    until_returned(service_of(introduced, 0))


@pytest.mark.zrpc(workers=3)
def test_segments_of_one_worker_are_not_returned_with_messages_to_another(introduced: Mesh) -> None:
    introduced.run(0, introduce, 2)
    introduced.run(2, introduce, 1)
    zrpc.rpc_sync(1, keep, (0, large(0)))
    introduced.run(2, zrpc.rpc_sync, 1, keep, (1, large(1)))
    drop(0, 1)
    zrpc.rpc_sync(1, echo, (2,))
    until_returned(service_of(introduced, 0))
    until_returned(service_of(introduced, 2))


@pytest.mark.system
def test_a_receiver_that_keeps_everything_gets_frames_when_the_pool_is_full(
    make_mesh: MakeMesh, lends: list[Lend]
) -> None:
    mesh = make_mesh(options={"shared_memory": 4 * MIB + MIB // 4})
    mesh.run(0, introduce, 1)
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


def test_a_message_larger_than_the_pool_goes_by_frames(
    make_mesh: MakeMesh, lends: list[Lend]
) -> None:
    mesh = make_mesh(options={"shared_memory": 2 * MIB})
    mesh.run(0, introduce, 1)
    lends.clear()
    with mesh.agent(0).as_current():
        assert torch.equal(zrpc.rpc_sync(1, negated, (large(1, 1 << 20),)), -large(1, 1 << 20))
        ours = service_of(mesh, 0).pool
        assert [lend for lend in lends if lend.pool is ours] == []
        zrpc.rpc_sync(1, torch.numel, (large(1),))
        assert [lend.sizes for lend in lends if lend.pool is ours] == [[4 * LARGE]]


@pytest.mark.system
@pytest.mark.parametrize("end", ["collected", "kept"])
def test_a_late_answer_is_returned(
    introduced: Mesh, lends: list[Lend], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = threading.Event(), threading.Event()
    kept()["wait"] = (entered, gate)
    # The callee must not find out first that nobody waits any more: it would not answer then.
    callee = introduced.agent(1)
    monkeypatch.setattr(callee.callee, "drop_abandoned", lambda: None)

    future = zrpc.rpc_async(1, answer_late, timeout=0.3)
    assert entered.wait(20)
    with pytest.raises(zrpc.RpcTimeoutError):
        future.wait()
    if end == "collected":
        del future
    gate.set()
    theirs = service_of(introduced, 1)
    until(lambda: any(lend.pool is theirs.pool for lend in lends), collect=True)
    until_returned(theirs)


def answer_late() -> Any:
    entered, gate = kept()["wait"]
    entered.set()
    assert gate.wait(30)
    return large(1)


class CantBeFound:
    """Something whose unpickling fails at the receiver, with its tensors not looked at."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return explode, (self.tensor,)


def explode(tensor: Any) -> None:
    raise LookupError("there is no such thing here")


def test_a_request_that_cant_be_unpickled_is_returned(introduced: Mesh, lends: list[Lend]) -> None:
    for _ in range(3):
        with pytest.raises(zrpc.SerializationError, match="no such thing"):
            zrpc.rpc_sync(1, echo, (CantBeFound(large(1)),))
    assert len(lends) == 3
    until_returned(service_of(introduced, 0))


def test_an_answer_that_nobody_asks_for_is_returned(introduced: Mesh, lends: list[Lend]) -> None:
    future = zrpc.rpc_async(1, make, (1,))
    until(lambda: lends, collect=True)
    del future
    until_returned(service_of(introduced, 1))


def test_an_answer_whose_call_failed_before_is_returned(
    introduced: Mesh, lends: list[Lend]
) -> None:
    with pytest.raises(ZeroDivisionError):
        zrpc.rpc_sync(1, fail_with, (large(1),))
    assert len(lends) == 1
    until_returned(service_of(introduced, 0))


def fail_with(tensor: Any) -> None:
    raise ZeroDivisionError
