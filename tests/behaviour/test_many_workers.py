"""More workers than torch's RPC can start on one machine."""

from __future__ import annotations

import operator
import os

import pytest
import torch

import zrpc as rpc
from zrpc.testing import Mesh


def call_everybody(count: int) -> list[int]:
    futures = [rpc.rpc_async(f"worker{i}", operator.add, (i, 1)) for i in range(count)]
    return torch.futures.wait_all(futures)


# In CI fewer than 64, whose 8000 connections by TCP take a minute on two cores.
_ON_ONE_HOST = int(os.environ.get("ZRPC_MANY_WORKERS", "40"))
_OVER_TCP = int(os.environ.get("ZRPC_MANY_WORKERS", "24"))
# All connect at once. With few cores that takes longer than a worker may be silent, which is left
# at its default.
_PATIENT = {"init_timeout": 120, "rpc_timeout": 240, "transport": "tcp"}


@pytest.mark.zrpc(workers=_ON_ONE_HOST, processes=True, timeout=120, options={"init_timeout": 60})
def test_many_processes_in_which_everybody_calls_everybody(mesh: Mesh) -> None:
    expected = [list(range(1, _ON_ONE_HOST + 1))] * _ON_ONE_HOST
    assert mesh.run_all(call_everybody, _ON_ONE_HOST) == expected


@pytest.mark.zrpc(workers=_OVER_TCP, processes=True, timeout=300, options=_PATIENT)
def test_many_processes_over_tcp_with_keys(mesh: Mesh) -> None:
    expected = [list(range(1, _OVER_TCP + 1))] * _OVER_TCP
    assert mesh.run_all(call_everybody, _OVER_TCP) == expected
