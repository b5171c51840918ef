"""Workloads: the steps of one call, counted as what its thread enters and executes of zrpc.

What less than half of the calls do is left out, such as the work of each tenth of a second. If
calls do something differently often, the least counts. Polling is left out: how often a thread
polls depends on the other process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import zrpc
from zrpc.actors import actor
from zrpc.bench import targets
from zrpc.bench.session import PEER, Sample, Session

_WARM_UP_CALLS = 500
_COUNTED_CALLS = 200
# The thread that handles calls changes now and then.
_TRIES = 20
_ROOT = os.path.dirname(zrpc.__file__)
_OWN = os.path.dirname(__file__)
_POLLING = {"Poller.poll"}

# By module and function: how often it was entered, or how many of its lines were executed.
Counts = Counter[tuple[str, str]]
# One for each call, which begins as `targets.nothing` is entered. Used by the observed thread.
_records: list[Counts] = []


def caller(session: Session, kind: int = 0) -> Sample:
    """Counts the steps of an empty call in the thread that makes it; see `_call_of`."""
    call = _call_of(session, kind)

    def count(lines: bool) -> Counts:
        _observe(lines)
        for _ in range(_COUNTED_CALLS):
            targets.nothing()
            call()
        return _observed()[1]

    return _measure(call, count)


def callee(session: Session, kind: int = 0) -> Sample:
    """Counts the steps of an empty call in the thread that handles it; see `_call_of`."""
    rpc_sync = session.rpc.rpc_sync
    call = _call_of(session, kind)

    def count(lines: bool) -> Counts:
        for _ in range(_TRIES):
            begun = rpc_sync(PEER, _observe, args=(lines,))
            for _ in range(_COUNTED_CALLS):
                call()
            ended, counts = rpc_sync(PEER, _observed)
            if begun == ended and counts:
                return Counter(counts)
        raise RuntimeError(
            f"expected one thread to handle {_COUNTED_CALLS} calls in {_TRIES} tries"
        )

    return _measure(call, count)


def _call_of(session: Session, kind: int) -> Callable[[], Any]:
    """Returns what makes an empty call: of a function (0), an RRef's method (1), an actor's (2)."""
    if kind == 0:
        return partial(session.rpc.rpc_sync, PEER, targets.nothing)
    cls: Any = targets.Quiet if kind == 1 else actor(targets.Quiet, concurrency=1)
    method: Callable[[], Any] = session.rpc.remote(PEER, cls).rpc_sync().nothing
    return method


def _measure(call: Callable[[], Any], count: Callable[[bool], Counts]) -> Sample:
    for _ in range(_WARM_UP_CALLS):
        call()
    entered, lines = count(False), count(True)
    more: dict[str, float] = {
        "modules": len({module for module, _ in entered}),
        "lines": lines.total(),
    }
    return Sample(entered.total(), entered.total(), _COUNTED_CALLS, more)


def _observe(lines: bool) -> int:
    """Begins to observe this thread: its lines, or the functions that it enters."""
    _records[:] = [Counter()]
    if not lines:
        sys.setprofile(_on_event)
        return threading.get_ident()
    sys.settrace(_on_frame)
    frame = sys._getframe().f_back
    while frame is not None:  # those that were entered before, such as the loop of the handlers
        frame.f_trace = _on_line if _is_ours(frame) else None
        frame = frame.f_back
    return threading.get_ident()


def _observed() -> tuple[int, Counts]:
    """Ends it; returns the thread, and the counts of a usual call."""
    sys.setprofile(None)
    sys.settrace(None)
    whole = _records[1:-1]
    usual = Counter[tuple[str, str]]()
    for name in {name for record in whole for name in record}:
        found = [record[name] for record in whole if name in record]
        if len(found) > len(whole) / 2:
            usual[name] = min(found)
    return threading.get_ident(), usual


def _on_event(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        _on_frame(frame, event, argument)
        if _is_ours(frame):
            _note(frame)


def _on_frame(frame: FrameType, event: str, argument: Any) -> Any:
    if frame.f_code is targets.nothing.__code__:
        _records.append(Counter())
    return _on_line if _is_ours(frame) else None


def _on_line(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line":
        _note(frame)
    return _on_line


def _note(frame: FrameType) -> None:
    _records[-1][frame.f_code.co_filename, frame.f_code.co_qualname] += 1


def _is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    inside = code.co_filename.startswith(_ROOT) and not code.co_filename.startswith(_OWN)
    return inside and code.co_qualname not in _POLLING
