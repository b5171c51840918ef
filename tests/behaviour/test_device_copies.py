"""How tensors on devices are copied: how often, by which thread, in which order, and failures."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.testing import Mesh, Operation, fake_device

SAME = {"fake:0": "fake:0", "fake:1": "fake:1"}
SMALL, LARGE = 3, 100_000
SIZES = pytest.mark.parametrize("size", [SMALL, LARGE])

pytestmark = pytest.mark.zrpc(workers=3, options={"device_maps": {"*": SAME}})


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    fake_device()  # not in processes that only collect this file


def copies(operations: list[Operation]) -> list[Operation]:
    return [each for each in operations if each.name in ("to_cpu", "from_cpu")]


def ways(operations: list[Operation]) -> list[tuple[str, int]]:
    return [(each.name, each.nbytes) for each in copies(operations)]


def on_device(size: int = SMALL) -> torch.Tensor:
    return torch.arange(float(size)).to("fake:1")


# -- how often, and which bytes ----------------------------------------------------------------


@SIZES
def test_a_tensor_is_copied_once_at_each_end(mesh: Mesh, size: int) -> None:
    tensor = on_device(size)
    half = tensor[size // 2 :]
    with fake_device().record() as operations:
        first, [second], view = mesh.run(0, rpc.rpc_sync, 1, echo, (tensor, [tensor], half))
    assert ways(operations) == [("to_cpu", 4 * size), ("from_cpu", 4 * size)] * 2
    assert first is second
    first.zero_()
    assert not view.any()


@SIZES
def test_only_the_elements_of_a_view_are_copied(mesh: Mesh, size: int) -> None:
    whole = on_device(3 * size)
    with fake_device().record() as operations:
        found = mesh.run(0, rpc.rpc_sync, 1, torch.sum, (whole[size : 2 * size],))
    sent, arrived, *result = copies(operations)
    assert 4 * size <= sent.nbytes <= 4 * size + 64
    assert arrived.nbytes == sent.nbytes
    assert [each.nbytes for each in result] == [4, 4]
    assert found.item() == whole[size : 2 * size].sum().item()


@pytest.mark.zrpc(options={"device_maps": {"*": SAME}, "shared_memory": 0})
def test_large_tensors_are_copied_as_often_without_shared_memory(mesh: Mesh) -> None:
    tensor = on_device(LARGE)
    with fake_device().record() as operations:
        assert torch.equal(mesh.run(0, rpc.rpc_sync, 1, echo, (tensor,)), tensor)
    assert [each.name for each in copies(operations)] == ["to_cpu", "from_cpu"] * 2


def test_tensors_on_the_cpu_touch_no_device(mesh: Mesh) -> None:
    with fake_device().record() as operations:
        for size in (SMALL, LARGE):
            assert mesh.run(0, rpc.rpc_sync, 1, echo, (torch.ones(size),)).is_cpu
    assert operations == []


# -- which thread, and which stream --------------------------------------------------------------


def with_thread(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    return threading.get_ident(), tensor + 1


@SIZES
def test_the_threads_that_call_and_handle_copy(caller: Mesh, size: int) -> None:
    """Those that receive never do: they wait for no device.

    On the stream of handlers, copies to the device would queue behind a collective that waits.
    """

    tensor, own = on_device(size), threading.get_ident()
    with fake_device().record() as operations:
        handler, _ = rpc.rpc_sync(1, with_thread, (tensor,))
    sent, arrived, *_ = found = copies(operations)
    assert [each.name for each in found] == ["to_cpu", "from_cpu", "to_cpu", "from_cpu"]
    assert [each.thread for each in found] == [own, handler, handler, own]
    allocated = next(each for each in operations if each.name == "allocate")
    assert sent.stream == 0
    assert arrived.stream == allocated.stream > 0
    # Its memory isn't used again while the handler's stream uses it.
    noted = next(each for each in operations if each.name == "aten::record_stream")
    assert (noted.thread, noted.stream) == (arrived.thread, 0)


def test_no_device_is_synchronized(caller: Mesh) -> None:
    with fake_device().record() as operations:
        rref = rpc.remote(1, echo, (on_device(LARGE),))
        rpc.rpc_sync(2, torch.add, (rref.to_here(), on_device(LARGE)))
        assert [*rpc.rpc_stream(1, items, (2,))]
    assert copies(operations)
    assert "synchronize" not in {each.name for each in operations}


def items(count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield on_device(SMALL) + number


# -- order ---------------------------------------------------------------------------------------


@SIZES
def test_a_call_sends_what_was_queued_before_it(caller: Mesh, size: int, gate: Gate) -> None:
    tensor = on_device(size)
    for _ in range(10):
        tensor.add_(1)
    future = rpc.rpc_async(1, gate.wait_inside, (tensor,))
    tensor.zero_()
    gate.open()
    assert torch.equal(future.wait().cpu(), torch.arange(float(size)) + 10)


# -- failed allocations --------------------------------------------------------------------------

NO_ROOM = "fake:1 out of memory"


@SIZES
def test_no_memory_for_an_argument_is_its_calls_error(caller: Mesh, size: int, gate: Gate) -> None:
    other = rpc.rpc_async(1, gate.wait_inside, (on_device(1),))
    gate.await_entry()
    tensor = on_device(size)
    with fake_device().out_of_memory(above=8):
        failing = [rpc.rpc_async(1, torch.add, (tensor, 1)) for _ in range(3)]
        small = rpc.rpc_async(1, torch.numel, (torch.ones(size),))
        for each in failing:
            with pytest.raises(torch.OutOfMemoryError, match=NO_ROOM):
                each.wait()
        assert small.wait() == size
    gate.open()
    assert other.wait().tolist() == [0]
    assert rpc.rpc_sync(1, torch.numel, (tensor,)) == size


def make_late(gate: Gate, size: int) -> torch.Tensor:
    tensor = on_device(size)
    gate.wait_inside()
    return tensor


@SIZES
def test_no_memory_for_a_result_is_its_calls_error(caller: Mesh, size: int, gate: Gate) -> None:
    late = rpc.rpc_async(1, make_late, (gate, size))
    rref = rpc.remote(1, make_late, (gate, size))
    gate.await_entry(2)
    with fake_device().out_of_memory(above=8):
        gate.open()
        for wait in (late.wait, rref.to_here):
            with pytest.raises(torch.OutOfMemoryError, match=NO_ROOM):
                wait()
        assert rpc.rpc_sync(1, torch.numel, (torch.ones(size),)) == size
    assert torch.equal(rref.to_here(), on_device(size))


# -- what is left --------------------------------------------------------------------------------


HELD: list[weakref.ref[torch.Tensor]] = []


def hold(tensor: torch.Tensor) -> torch.Tensor:
    HELD.append(weakref.ref(tensor))
    return tensor


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return hold(hold(tensor).neg())


@SIZES
def test_device_memory_is_freed_after_a_call(caller: Mesh, size: int) -> None:
    HELD.clear()
    hold(rpc.rpc_sync(1, negated, (hold(on_device(size)),)))
    assert len(HELD) == 4
    until(lambda: all(each() is None for each in HELD), "the tensors are freed")


@SIZES
def test_device_memory_is_freed_after_a_time_out(caller: Mesh, size: int, gate: Gate) -> None:
    tensor = on_device(size)
    held = weakref.ref(tensor)
    cancelled = rpc.rpc_async(1, gate.wait_inside, (tensor,))
    gate.await_entry()
    late = rpc.rpc_async(1, gate.wait_inside, (tensor,), timeout=0.05)
    with pytest.raises(rpc.RpcTimeoutError):
        late.wait()
    cancelled.cancel()
    gate.open()
    assert rpc.rpc_sync(1, torch.numel, (tensor,)) == size
    del tensor, late, cancelled
    until(lambda: held() is None, "the tensor is freed", collect=True)
