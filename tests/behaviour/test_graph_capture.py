"""Calls in code that torch records: by ``torch.jit.trace``, ``torch.export``, ``torch.fx``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import zrpc
from zrpc.errors import SerializationError
from zrpc.testing import Mesh

pytestmark = [pytest.mark.system, pytest.mark.zrpc(workers=2, timeout=60)]

X = torch.ones(3)


class Model:
    """A value on worker1."""

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def weight(self) -> torch.Tensor:
        return torch.full((3,), 2.0, requires_grad=True)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


WAYS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: zrpc.rpc_sync("worker1", double, (x,)),
    lambda x: zrpc.rpc_async("worker1", double, (x,)).wait(),
    lambda x: zrpc.rpc_async("worker1", double, (x,)).then(lambda f: f.wait() * 1).wait(),
    lambda x: zrpc.remote("worker1", double, (x,)).to_here(),
    lambda x: zrpc.remote("worker1", Model).rpc_sync().double(x),
    lambda x: zrpc.remote("worker1", Model).rpc_sync().weight(),
]


class Calling(torch.nn.Module):
    """A module that makes a call."""

    def __init__(self, call: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self._call(x) + x


def test_a_call_is_a_constant_of_a_trace_and_a_warning_says_so(caller: Mesh) -> None:
    for call in WAYS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("always", torch.jit.TracerWarning)
            traced: Any = torch.jit.trace(Calling(call), X)
        assert traced(torch.zeros(3)).tolist() == [2, 2, 2]
        assert caught
        for each in caught:
            assert "does not record calls to other workers" in str(each.message)
            assert each.filename == __file__


def test_a_tensor_whose_shape_is_traced_is_sent_as_any(caller: Mesh) -> None:
    def call(x: torch.Tensor) -> Any:
        return zrpc.rpc_sync("worker1", double, (x[: x.shape[0] - 1].expand(2, -1).t(),)).sum() + x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.jit.trace(call, X)(X).tolist() == [9, 9, 9]


def test_a_call_in_a_module_that_is_recorded_is_an_error_that_says_why(caller: Mesh) -> None:
    for call in WAYS:
        text = r"outside of torch\.export, .* calls to other"
        with pytest.raises(SerializationError, match=text):
            torch.export.export(Calling(call), (X,), strict=False)
        text = "zrpc is never compiled, since its calls run on other"
        with pytest.raises(Exception, match=text):
            torch.export.export(Calling(call), (X,), strict=True)
        for mode in ("real", "fake", "symbolic"):
            text = r"outside of make_fx, .* calls to other workers"
            with pytest.raises(SerializationError, match=text):
                make_fx(Calling(call), tracing_mode=mode)(X)
    for call in WAYS[:-1]:  # the last one's arguments are not recorded
        text = r"Proxy of torch\.fx\..* in torch\.fx\.wrap"
        with pytest.raises(SerializationError, match=text):
            torch.fx.symbolic_trace(Calling(call))


def by_worker(x: torch.Tensor) -> Any:
    return zrpc.rpc_sync("worker1", double, (x,))


torch.fx.wrap("by_worker")


def test_a_function_that_calls_can_be_wrapped_for_a_symbolic_trace(caller: Mesh) -> None:
    graph = torch.fx.symbolic_trace(lambda x: by_worker(x) + 1)
    assert graph(X).tolist() == [3, 3, 3]


def test_calls_under_other_modes_of_the_dispatcher_go_through(caller: Mesh) -> None:
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert zrpc.rpc_sync("worker1", double, (X,)).tolist() == [2, 2, 2]
