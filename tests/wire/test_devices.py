"""Tensors on devices in messages: what arrives, and how they are copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.test_pickling import arrived
from tests.wire.test_tensors import views
from zrpc.testing import fake_device
from zrpc.wire.devices import DeviceMap, fetched
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder
from zrpc.wire.unpickling import Decoder

HERE, THERE = "fake:0", "fake:1"
MAP = DeviceMap("a", "b", {"fake:0": "fake:1", "cpu": "fake:0", "fake:1": "cpu"})


def there(obj: Any, devices: DeviceMap = MAP, memory: Any = None) -> Any:
    """Returns the object as it arrives."""
    message, encoder = Message(1), Encoder(None, 1, True)
    encoder.devices, encoder.memory = devices, memory
    encoder.pack(obj, message)
    return Decoder(None, arrived(message)).unpack()


@pytest.fixture(autouse=True)
def _device() -> None:
    fake_device()


def on_device(tensor: torch.Tensor, device: str = HERE) -> torch.Tensor:
    """Returns the same view, of a copy of its storage on a device."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    flat = whole[: whole.nbytes - whole.nbytes % tensor.itemsize].view(tensor.dtype).to(device)
    view = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return torch._neg_view(view) if tensor.is_neg() else view.conj() if tensor.is_conj() else view


@pytest.mark.system
@given(st.lists(views(), min_size=1, max_size=3))
def test_views_arrive_equal_on_the_mapped_device(tensors: list[torch.Tensor]) -> None:
    placed = [on_device(tensor) for tensor in tensors]
    parts = [each[1:] if each.dim() and each.shape[0] > 1 else each for each in placed]
    for found, wanted in zip(there([*placed, *parts, *tensors]), [*tensors, *parts], strict=False):
        assert (str(found.device), found.dtype) == (THERE, wanted.dtype)
        assert found.shape == wanted.shape
        assert torch.equal(found.cpu(), wanted.cpu())


def test_each_device_may_arrive_on_each() -> None:
    for size in (3, 100_000):
        tensor = torch.arange(float(size))
        found = there([tensor, tensor.to(HERE), tensor.to(THERE)])
        assert [str(each.device) for each in found] == ["fake:0", "fake:1", "cpu"]
        for each in found:
            assert torch.equal(each.cpu(), tensor)


def test_tensors_at_the_same_place_of_different_devices_share_nothing() -> None:
    for size in (3, 100_000):
        tensors = [
            torch.full((size,), float(n)).to(device) for n, device in enumerate((HERE, THERE))
        ]
        first, second = there(tensors)
        first.zero_()
        assert second.sum() == size


def test_large_buffers_are_copied_to_the_memory_that_is_given() -> None:
    """All of them, also those of the CPU: so the message has them in one piece."""
    given: list[bytearray] = []

    def memory(destination: int, size: int) -> bytearray:
        assert destination == 1
        given.append(bytearray(size))
        return given[-1]

    large = torch.arange(20_000.0)
    value = [large.to(HERE), large.neg(), b"x" * 100_000, large.to(THERE)[:3]]
    tensor, negative, text, small = there(value, DeviceMap(others="cpu"), memory)
    assert torch.equal(tensor, large)
    assert torch.equal(negative, -large)
    assert text == value[2]
    assert small.tolist() == [0, 1, 2]
    assert [len(each) for each in given] == [160_000]


def test_without_such_memory_only_the_buffers_of_devices_are_copied() -> None:
    tensor, array = torch.arange(3.0).to(HERE), memoryview(b"abc")
    for memory in (None, lambda _: None):
        first, second = fetched([tensor, array], memory)
        assert second is array
        assert bytes(first) == bytes(memoryview(tensor.cpu().numpy()))
    assert fetched([array], None) == [array]


def test_maps_are_equal_if_tensors_arrive_on_the_same_devices() -> None:
    same = DeviceMap("a", "c", {"cpu": "fake:0", "fake:1": "cpu", "fake:0": "fake:1"}, answers=True)
    assert same == MAP
    assert hash(same) == hash(MAP)
    assert {DeviceMap("a", "b"), DeviceMap("a", "b", others="cpu"), MAP} - {same} == {
        DeviceMap(),
        DeviceMap(others="cpu"),
    }
    assert MAP != "a map"
