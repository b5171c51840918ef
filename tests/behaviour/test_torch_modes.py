"""Modes of torch that a handler leaves on do not reach the handlers after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

import zrpc
from tests.support.identity import here
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=2, timeout=60, options={"num_worker_threads": 1})


def no_grad() -> None:
    torch.set_grad_enabled(False)


def autocast() -> None:
    torch.autocast("cpu").__enter__()
    torch.autocast("cpu", dtype=torch.float16).__enter__()


def autocast_outside_of_a_block() -> None:
    torch.set_autocast_enabled("cpu", True)


def default_device() -> None:
    torch.set_default_device("meta")


def function_mode() -> None:
    BaseTorchFunctionMode().__enter__()


def modes() -> Any:
    x = torch.ones(2, 2, requires_grad=True)
    y = x @ x
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return y.requires_grad, y.dtype, y.device.type, nesting, torch._C._len_torch_function_stack()


def fail() -> None:
    no_grad()
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    "leave", [no_grad, autocast, autocast_outside_of_a_block, default_device, function_mode, fail]
)
def test_a_mode_that_is_left_on_ends_with_its_handler(
    mesh: Mesh, leave: Callable[[], None]
) -> None:
    def leave_often() -> Any:
        found = []
        for _ in range(20):  # in each of the threads that run handlers
            future = zrpc.rpc_async("worker1", here(leave))
            with contextlib.suppress(ValueError):
                future.wait()
            found.append(zrpc.rpc_sync("worker1", here(modes)))
        return found

    assert mesh.run(0, leave_often) == [(True, torch.float32, "cpu", 1, 0)] * 20


def test_a_handler_does_not_run_in_the_modes_of_its_caller(mesh: Mesh) -> None:
    def call() -> Any:
        with torch.no_grad(), torch.autocast("cpu"):
            return zrpc.rpc_sync("worker1", here(modes))

    assert mesh.run(0, call) == (True, torch.float32, "cpu", 1, 0)
