"""What arrives does not depend on torch's modes at the receiver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.targets import echo
from tests.support.travel import LARGE, SMALL, back
from tests.support.ways import by_async, by_remote, by_wait_all
from zrpc.testing import Mesh


class Doubled:
    """A value that torch computes on where it arrives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return Doubled._receive, (self.tensor,)

    @classmethod
    def _receive(cls, tensor: torch.Tensor) -> Doubled:
        return cls(tensor * 2)


MODES: list[Callable[[], Any]] = [
    torch.inference_mode,
    torch.no_grad,
    lambda: _both(torch.inference_mode(), torch.enable_grad()),
]


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def test_what_arrives_does_not_depend_on_modes(shared: Mesh) -> None:
    for call in (rpc.rpc_sync, by_async, by_wait_all, by_remote):
        for mode in MODES:
            for size in (SMALL, LARGE):
                check(call, mode, size)


def check(call: Callable[..., Any], mode: Callable[[], Any], size: int) -> None:
    sent = torch.ones(size, requires_grad=True)
    sparse = torch.ones(3).to_sparse()
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        plain, leaf, doubled, (values, coo) = call(
            1, echo, (sent.detach(), sent, Doubled(sent), (sent[::2], sparse))
        )
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    for tensor in (plain, leaf, doubled.tensor, values, coo):
        assert not tensor.is_inference()
    assert not plain.requires_grad
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert doubled.tensor.requires_grad
    weight = torch.ones(size, requires_grad=True)
    (plain * weight).sum().backward()  # which keeps what has arrived
    assert weight.grad is not None


def test_a_failure_to_read_a_value_leaves_the_modes(shared: Mesh) -> None:
    with torch.inference_mode():
        with pytest.raises(rpc.SerializationError):
            rpc.rpc_sync(1, Unreadable)
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("x",)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_arrives_does_not_depend_on_default_device_and_dtype(shared: Mesh) -> None:
    dense = torch.eye(3)
    layouts = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()]
    sent = [dense, torch.nn.Parameter(dense), dense.t()[:2], torch.ones(LARGE), *layouts]
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            received = back(sent)
    finally:
        torch.set_default_dtype(dtype)
    for tensor, was in zip(received, sent, strict=True):
        assert (tensor.device, tensor.dtype) == (was.device, was.dtype)
        assert torch.equal(tensor.to_dense(), was.to_dense())
