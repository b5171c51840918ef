"""Threads of gevent and eventlet, which zrpc refuses."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from zrpc.errors import RpcError
from zrpc.runtime.green_threads import check_threads


@pytest.mark.parametrize(
    ("module", "patched", "advice"),
    [
        ("gevent.monkey", "threading", r"gevent: call .*thread=False, queue=False"),
        ("gevent.monkey", "queue", r"gevent: call .*thread=False, queue=False"),
        ("eventlet.patcher", "thread", r"eventlet: call eventlet\.monkey_patch"),
    ],
)
def test_threads_that_a_library_has_replaced_are_refused(
    monkeypatch: pytest.MonkeyPatch, module: str, patched: str, advice: str
) -> None:
    parts = {"socket"}
    found = SimpleNamespace(is_module_patched=parts.__contains__)
    found.is_monkey_patched = found.is_module_patched
    monkeypatch.setitem(sys.modules, module, found)
    check_threads()
    parts.add(patched)
    with pytest.raises(RpcError, match=advice):
        check_threads()
