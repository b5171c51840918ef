"""Threads of gevent and eventlet, which zrpc refuses."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from zrpc.errors import RpcError
from zrpc.runtime.green_threads import check_threads


def monkey(*patched: str) -> SimpleNamespace:
    return SimpleNamespace(is_module_patched=lambda name: name in patched)


def test_threads_of_the_system_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    check_threads()
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey("socket"))
    check_threads()


def test_threads_of_gevent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for patched in ("threading", "queue"):
        monkeypatch.setitem(sys.modules, "gevent.monkey", monkey("socket", patched))
        with pytest.raises(RpcError, match=r"gevent: call .*thread=False, queue=False"):
            check_threads()


def test_threads_of_eventlet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = SimpleNamespace(is_monkey_patched=lambda name: name == "thread")
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)
    with pytest.raises(RpcError, match=r"eventlet: call eventlet\.monkey_patch"):
        check_threads()
