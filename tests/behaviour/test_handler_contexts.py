"""What each handler has of its own: context variables, its current call, and modes of torch.

The modes of a receiver change nothing of what arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import decimal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

import zrpc as rpc
from tests.support.identity import here
from tests.support.targets import Unreadable, echo
from tests.support.travel import LARGE, SMALL, back
from tests.support.ways import WAYS
from zrpc.functions import async_execution
from zrpc.testing import Mesh

ONE_THREAD = pytest.mark.zrpc(options={"num_worker_threads": 1})

# -- context variables ---------------------------------------------------------------------------

variable = contextvars.ContextVar("variable", default="unset")


def set_variable() -> str:
    found = variable.get()
    variable.set("of another handler")
    return found


def set_precision() -> int:
    found = decimal.getcontext().prec
    decimal.getcontext().prec = 5  # in place
    return found


async def set_variable_async() -> str:
    return set_variable()


async def set_precision_async() -> int:
    return set_precision()


class Setter:
    set = staticmethod(set_variable)


SETTERS: list[Callable[[], Any]] = [
    set_variable,
    set_precision,
    lambda: np.seterr(over="raise")["over"],
    set_variable_async,
    set_precision_async,
    async_execution(lambda: rpc.rpc_async(0, len, ("",)).then(lambda _: set_variable())),
]


@ONE_THREAD
def test_what_a_handler_or_a_callback_sets_is_not_seen_by_the_next(caller: Mesh) -> None:
    for setter in SETTERS:
        assert len({rpc.rpc_sync(1, setter) for _ in range(20)}) == 1
    rref = rpc.remote(1, Setter)
    assert {rref.rpc_sync().set() for _ in range(20)} == {"unset"}
    calls = [rpc.rpc_async(1, len, args=("",)) for _ in range(20)]
    futures = [call.then(lambda _: set_variable()) for call in calls]
    assert {future.wait() for future in futures} == {"unset"}


def test_handlers_see_what_was_set_before_their_worker_started(alone: int) -> None:
    def run() -> list[object]:
        variable.set("before")
        decimal.setcontext(decimal.Context(prec=50))
        with rpc.session("me", rank=0, world_size=1):
            variable.set("after")
            setters = (set_variable, set_variable_async, set_precision, set_precision_async)
            found = [{rpc.rpc_sync("me", setter) for _ in range(20)} for setter in setters]
        assert decimal.getcontext().prec == 50
        return found

    assert contextvars.copy_context().run(run) == [{"before"}, {"before"}, {50}, {50}]


# -- the current call ----------------------------------------------------------------------------


def describe() -> tuple[Any, ...]:
    call = rpc.current_call()
    return call.caller, call.cancelled, call.time_remaining(), repr(call)


async def describe_async() -> tuple[Any, ...]:
    await asyncio.sleep(0)
    return describe()


@async_execution
def describe_later() -> Any:
    return rpc.rpc_async(0, echo).then(lambda _: describe())


def test_a_handler_finds_its_call(shared: Mesh) -> None:
    for function in (describe, describe_async, describe_later):
        for timeout in (0, 5):
            caller, cancelled, remaining, text = rpc.rpc_sync(1, function, timeout=timeout)
            assert (caller.id, cancelled) == (0, False)
            assert remaining is None if not timeout else 0 < remaining <= timeout
            assert text == f"<Call from {caller}, waited for>"
    assert rpc.rpc_sync(1, callers_in_turn) == [0, 1, 0]
    with pytest.raises(rpc.RpcError, match="there is no current call"):
        rpc.current_call()


def callers_in_turn() -> list[int]:
    """Is called by worker0, and calls its own worker."""
    callers = (rpc.current_call().caller, rpc.rpc_sync(1, describe)[0], rpc.current_call().caller)
    return [caller.id for caller in callers]


# -- modes of torch ------------------------------------------------------------------------------


def autocast() -> None:
    torch.autocast("cpu").__enter__()
    torch.autocast("cpu", dtype=torch.float16).__enter__()


def no_grad_and_fail() -> None:
    torch.set_grad_enabled(False)
    raise ValueError("on purpose")


LEAVE_MODES: list[Callable[[], object]] = [
    lambda: torch.set_grad_enabled(False) and None,
    autocast,
    lambda: torch.set_autocast_enabled("cpu", True),
    lambda: torch.set_default_device("meta"),
    lambda: BaseTorchFunctionMode().__enter__() and None,
    no_grad_and_fail,
]
NO_MODE = (True, torch.float32, "cpu", 1, 0)


def modes() -> Any:
    x = torch.ones(2, 2, requires_grad=True)
    y = x @ x
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return y.requires_grad, y.dtype, y.device.type, nesting, torch._C._len_torch_function_stack()


@ONE_THREAD
def test_a_mode_that_is_left_on_ends_with_its_handler(caller: Mesh) -> None:
    for leave in LEAVE_MODES:
        for _ in range(20):  # in each of the threads that run handlers
            with contextlib.suppress(ValueError):
                rpc.rpc_sync(1, here(leave))
            assert rpc.rpc_sync(1, here(modes)) == NO_MODE
    with torch.no_grad(), torch.autocast("cpu"):  # nor does it run in those of its caller
        assert rpc.rpc_sync(1, here(modes)) == NO_MODE


# -- what arrives, whatever the modes of the receiver --------------------------------------------


class Doubled:
    """A value that torch computes on where it arrives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor * 2

    def __reduce__(self) -> tuple[Any, ...]:
        return Doubled, (self.tensor,)


@contextlib.contextmanager
def inference_mode_with_grad() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, inference_mode_with_grad])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_arrives_does_not_depend_on_modes(shared: Mesh, mode: Any, size: int) -> None:
    sent = torch.ones(size, requires_grad=True)
    value = sent.detach(), sent, Doubled(sent), (sent[::2], torch.ones(3).to_sparse())
    for call in WAYS:
        with mode():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            plain, leaf, doubled, (values, coo) = call(1, echo, value)
            with pytest.raises(rpc.SerializationError):
                call(1, Unreadable)
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
        received = (plain, leaf, doubled.tensor, values, coo)
        assert not any(tensor.is_inference() for tensor in received)
        required = [tensor.requires_grad for tensor in received[:3]]
        assert (required, leaf.is_leaf) == ([False, True, True], True)
        weight = torch.ones(size, requires_grad=True)
        (plain * weight).sum().backward()  # which keeps what has arrived
        assert weight.grad is not None


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
