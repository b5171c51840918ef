"""The ways to call a function on another worker and to get its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc

Call = Callable[..., Any]


def by_async(*args: Any, **kwargs: Any) -> Any:
    return zrpc.rpc_async(*args, **kwargs).wait()


def by_wait_all(*args: Any, **kwargs: Any) -> Any:
    return torch.futures.wait_all([zrpc.rpc_async(*args, **kwargs)])[0]


def by_remote(*args: Any, **kwargs: Any) -> Any:
    return zrpc.remote(*args, **kwargs).to_here()


WAYS: list[Call] = [zrpc.rpc_sync, by_async, by_remote]
# Runs a test of the contract of all calls once for each way, which is its argument `call`.
ways = pytest.mark.parametrize("call", WAYS)
