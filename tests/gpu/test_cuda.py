"""What only CUDA can show: work that is queued while Python goes on, and memory that is reused."""

from __future__ import annotations

import gc

import pytest
import torch

import zrpc as rpc
from tests.gpu import work
from tests.support.targets import echo
from zrpc.testing import Mesh
from zrpc.testing.server import warm_server

pytestmark = [pytest.mark.gpu, pytest.mark.zrpc(timeout=240)]
# Clock cycles of the GPU: some seconds, and some hundredths of a second.
LONG, SHORT = 5 * 10**9, 5 * 10**7
SIZE = 1_000_000


@pytest.fixture(params=["cuda:0"])
def device(device: str) -> str:
    return device


def late(device: str, value: float) -> torch.Tensor:
    """Returns a tensor whose values the GPU writes some time later."""
    tensor = torch.zeros(SIZE, device=device)
    torch.cuda._sleep(SHORT)
    return tensor.add_(value)


def all_are(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def test_the_fork_server_has_not_used_the_gpu(gpu_mesh: Mesh, device: str) -> None:
    assert warm_server().note == ""
    assert gpu_mesh.run(0, lambda: torch.ones(1, device=device).item()) == 1


def test_queued_work_is_done_before_a_tensor_is_sent(gpu_mesh: Mesh, device: str) -> None:
    def call() -> None:
        for value in range(1, 4):
            assert rpc.rpc_sync(1, all_are, (late(device, value), value))
            assert all_are(rpc.rpc_sync(1, late, (device, value)), value)

    gpu_mesh.run(0, call)


def on_a_side_stream(device: str, value: float) -> torch.Tensor:
    with torch.cuda.stream(torch.cuda.Stream(device)):
        tensor = late(device, value)
        assert rpc.rpc_sync(1, all_are, (tensor, value))
    torch.cuda.synchronize(device)  # the caller uses it on another stream
    return tensor


def test_work_of_a_side_stream_is_done_if_the_call_is_made_within_it(
    gpu_mesh: Mesh, device: str
) -> None:
    assert gpu_mesh.run(0, lambda: all_are(on_a_side_stream(device, 3), 3))


def occupy(device: str) -> None:
    """Queues work for seconds on the stream that all handlers use."""
    torch.cuda._sleep(LONG)
    work.occupied = torch.cuda.Event()
    work.occupied.record()


def is_occupied(tensor: torch.Tensor) -> bool:
    return not work.occupied.query()


def test_a_tensor_arrives_while_the_stream_of_the_handlers_is_occupied(
    gpu_mesh: Mesh, device: str
) -> None:
    def call() -> bool:
        tensor = torch.ones(SIZE, device=device)
        rpc.rpc_sync(1, echo, (tensor,))  # so that memory has been reserved
        rpc.rpc_sync(1, occupy, (device,))
        occupied: bool = rpc.rpc_sync(1, is_occupied, (tensor,))
        return occupied

    assert gpu_mesh.run(0, call)


def slowly(tensor: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(SHORT)
    return tensor + 1  # is computed when the argument may be gone


def test_memory_is_not_used_again_while_queued_work_reads_it(gpu_mesh: Mesh, device: str) -> None:
    def call() -> None:
        for _ in range(5):
            tensors = [torch.full((SIZE,), float(number), device=device) for number in range(8)]
            futures = [rpc.rpc_async(1, slowly, (each,)) for each in tensors]
            for number, future in enumerate(futures):
                assert all_are(future.wait(), number + 1)

    gpu_mesh.run(0, call)


def test_shared_memory_that_is_used_often_is_page_locked(gpu_mesh: Mesh, device: str) -> None:
    def call() -> None:
        for number in range(50):
            tensor = torch.full((SIZE,), float(number), device=device)
            assert all_are(rpc.rpc_sync(1, torch.add, (tensor, 1)), number + 1)
        assert work.locked_bytes() >= tensor.nbytes
        assert rpc.rpc_sync(1, work.locked_bytes) >= tensor.nbytes

    gpu_mesh.run(0, call)


def test_memory_that_cuda_does_not_lock_harms_no_kernel(gpu_mesh: Mesh, device: str) -> None:
    assert gpu_mesh.run(0, work.lock_twice, device) == ([True, False], 100)


def allocated(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device)


def test_no_memory_is_held_after_calls(gpu_mesh: Mesh, device: str) -> None:
    def call() -> None:
        rpc.rpc_sync(1, echo, (torch.ones(SIZE, device=device),))
        before = allocated(device), rpc.rpc_sync(1, allocated, (device,))
        for _ in range(10):
            rpc.rpc_sync(1, echo, (torch.ones(SIZE, device=device),))
        assert (allocated(device), rpc.rpc_sync(1, allocated, (device,))) == before

    gpu_mesh.run(0, call)


def test_handlers_have_the_mapped_device_as_the_current_one(gpu_mesh: Mesh) -> None:
    def call() -> None:
        assert rpc.rpc_sync(1, torch.cuda.current_device) == 0

    gpu_mesh.run(0, call)
