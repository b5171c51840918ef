"""The fake device: a device of torch, made in Python, to test device maps without one."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import io
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.forks import exit_code, fork
from zrpc.testing import FakeDevice, Mesh, fake_device


@pytest.fixture
def device() -> FakeDevice:
    return fake_device()


def test_there_is_one_in_a_process(device: FakeDevice) -> None:
    assert fake_device() is device
    assert torch.get_device_module("fake").device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    with device.record() as operations:
        (torch.ones(3).to("fake:1") + 1).cpu()
        torch.get_device_module("fake").synchronize(1)
    torch.ones(1, device="fake")  # is not recorded any more
    made = [("allocate", 12), ("from_cpu", 12), ("allocate", 12), ("aten::add.out", 0)]
    expected = [*made, ("to_cpu", 12), ("synchronize", 0)]
    assert [(each.name, each.nbytes) for each in operations] == expected


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.usefixtures("device")
def test_a_tensor_is_the_same_there_and_back(index: int) -> None:
    tensor = torch.arange(6).reshape(2, 3)
    there = tensor.to(f"fake:{index}")
    assert type(there) is torch.Tensor
    assert there.device == torch.device("fake", index)
    assert torch.equal(there.cpu(), tensor)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(2, 3, device=f"fake:{1 - index}")
    with pytest.raises(RuntimeError, match="expected fake:0 to fake:1, found fake:2"):
        there.to("fake:2")


@pytest.mark.usefixtures("device")
def test_views_share_memory_with_their_base() -> None:
    base = torch.zeros(2, 3, device="fake:1")
    view = base.t()[1:]
    assert view.stride() == (1, 3)
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    view.add_(1)
    assert base.tolist() == [[0, 1, 1], [0, 1, 1]]
    assert base.to(torch.complex64).mul(1j).conj().cpu().imag.tolist() == [[0, -1, -1]] * 2


# torch makes the threads of backward passes before the first one of a process. So those on the
# device are in processes of their own.


def learn() -> None:
    here = torch.nn.Linear(3, 2)
    there = copy.deepcopy(here).to("fake")
    assert type(there.weight) is torch.nn.Parameter
    for model, device in (here, "cpu"), (there, "fake"):
        optimizer = torch.optim.Adam(model.parameters())
        loss = torch.nn.functional.mse_loss(
            model(torch.ones(4, 3, device=device)), torch.zeros(4, 2, device=device)
        )
        loss.backward()
        optimizer.step()
    assert there.weight.grad is not None
    assert there.weight.grad.device == torch.device("fake:0")
    assert torch.equal(there.weight.cpu(), here.weight)


def convolve() -> None:
    here = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.GroupNorm(2, 4))
    there = copy.deepcopy(here).to("fake")
    images = torch.rand(2, 2, 5, 5)
    for model, device in (here, "cpu"), (there, "fake"):
        model(images.to(device)).pow(3).sum().backward()
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad.cpu(), rtol=1e-3, atol=1e-3)


def use_checkpoints_and_autocast() -> None:
    for device in "cpu", "fake":
        leaf = torch.ones(2, device=device, requires_grad=True)
        with torch.autocast(device):
            checkpoint(torch.sin, leaf, use_reentrant=False).sum().backward()
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad.cpu(), torch.ones(2).cos())


@pytest.mark.zrpc(workers=1, processes=True)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("passes", [learn, convolve, use_checkpoints_and_autocast])
def test_backward_passes_have_the_cpus_gradients(mesh: Mesh, passes: Callable[[], None]) -> None:
    mesh.run(0, passes)


@pytest.mark.usefixtures("device")
def test_tensors_are_copied_saved_and_loaded() -> None:
    tensor = torch.ones(3, device="fake:1")
    assert copy.deepcopy(tensor).device == tensor.device
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.load(file).device == tensor.device
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu"), torch.ones(3))


@pytest.mark.usefixtures("device")
def test_a_result_may_have_another_size_than_the_tensor_it_is_written_to() -> None:
    result = torch.empty(0, device="fake:1")
    torch.add(torch.ones(3, device="fake:1"), 1, out=result)
    assert result.tolist() == [2, 2, 2]


@pytest.mark.usefixtures("device")
def test_a_sparse_tensor_can_be_on_the_first_device() -> None:
    sparse = torch.eye(2).to_sparse().to("fake:0")
    assert sparse._values().device == torch.device("fake:0")
    assert torch.equal(sparse.cpu().to_dense(), torch.eye(2))


@pytest.mark.usefixtures("device")
def test_each_thread_has_its_own_device() -> None:
    module = torch.get_device_module("fake")
    found = []
    with module.device("fake:1"):
        assert torch.ones(1, device="fake").device == torch.device("fake:1")
        thread = threading.Thread(target=lambda: found.append(module.current_device()))
        thread.start()
        thread.join()
    assert (found, module.current_device()) == ([0], 0)


@pytest.mark.system
@pytest.mark.usefixtures("device")
def test_its_memory_can_not_be_read_as_the_cpus() -> None:
    address = torch.ones(2, device="fake").data_ptr()

    def read() -> None:
        faulthandler.disable()
        ctypes.string_at(address, 8)

    assert exit_code(fork(read)) == -signal.SIGSEGV
