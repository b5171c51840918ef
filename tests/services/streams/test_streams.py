"""Streams of plain generators."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zrpc as rpc
from zrpc.testing import Mesh
from tests.support.waiting import SOON, until
from tests.support.identity import Same

def count(n: int) -> Iterator[int]:
    yield from range(n)

class Llm:
    def gen(self, n):
        for i in range(n):
            yield i, "tok"

def test_a(caller: Mesh) -> None:
    assert list(rpc.rpc_stream("worker1", count, args=(3,))) == [0, 1, 2]
    assert list(rpc.rpc_stream("worker1", count, args=(1000,))) == list(range(1000))
    assert list(rpc.rpc_stream("worker0", count, args=(1000,), prefetch=1)) == list(range(1000))
    r = rpc.remote("worker1", Llm)
    assert [i for i, _ in r.rpc_stream().gen(500)] == list(range(500))

def fails(n):
    yield from range(n)
    raise KeyError("x")
def test_b(caller: Mesh) -> None:
    s = rpc.rpc_stream("worker1", fails, args=(3,))
    assert [next(s) for _ in range(3)] == [0,1,2]
    with pytest.raises(KeyError):
        next(s)
    with pytest.raises(TypeError, match="rpc_sync"):
        next(rpc.rpc_stream("worker1", max, args=(3,4)))
    with pytest.raises(rpc.SerializationError, match="rpc_stream"):
        rpc.rpc_sync("worker1", count, args=(3,))
    with pytest.raises(rpc.RpcError, match="can't be sent"):
        rpc.rpc_sync("worker1", list, args=(s,))

def tensors(n):
    for i in range(n):
        yield torch.full((1<<18,), float(i))
def test_t(caller: Mesh) -> None:
    for i, t in enumerate(rpc.rpc_stream("worker1", tensors, args=(20,))):
        assert t[5] == i
class Note(Same):
    def __init__(self):
        self.made = []; self.closed = threading.Event()
    def gen(self):
        try:
            i = 0
            while True:
                self.made.append(i)
                yield i
                i += 1
        finally:
            self.closed.set()
def test_c(caller: Mesh) -> None:
    for way in range(5):
        n = Note()
        s = rpc.rpc_stream("worker1", n.gen, prefetch=7)
        assert next(s) == 0
        until(lambda: len(n.made) >= 7)
        time.sleep(.1)
        assert len(n.made) <= 8
        assert not n.closed.is_set()
        if way == 0: s.close()
        elif way == 1: del s
        elif way == 2:
            for x in s: break
        elif way == 3:
            with s: pass
        elif way == 4:
            break  # shutdown
        assert n.closed.wait(SOON)
