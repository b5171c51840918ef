"""A shift: what one worker does between two quiet moments of its mesh."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zrpc
from zrpc.soak import calls, gradients, references, targets
from zrpc.soak.inventory import socket_directory, under_way
from zrpc.soak.lane import Lane, Tally

__all__ = ["Shift", "prepare", "work"]

_ACTIONS = [*calls.ACTIONS, *references.ACTIONS, *gradients.ACTIONS]
# After a shift's time each lane ends its action: within the time of a call and some more.
_ENDS_WITHIN = 90.0
_STUCK_AFTER = 20.0
# For how long a call that is to be cut off by a death would take, in seconds.
_LONGER_THAN_ALL = 3600.0


@dataclass(frozen=True)
class Shift:
    """What a worker is to do.

    Attributes:
        name: unique in the run; with the worker's name, the seed of its random numbers.
        seconds: for how long.
        lanes: how many threads act at once.
        names: all workers of the mesh, those that are dead included.
        doomed: who may die meanwhile, or is dead.
        dead: whether it is dead already.
        all_once: whether each lane begins with each action once: the first time it is slow, and
            what it makes is kept.
    """

    name: str
    seconds: float
    lanes: int
    names: Sequence[str]
    doomed: str | None = None
    dead: bool = False
    all_once: bool = False


@dataclass
class _Trouble:
    """What is told to nobody but a log, since `prepare`."""

    texts: list[str] = field(default_factory=list)


_trouble = _Trouble()


class _Listener(logging.Handler):
    """Notes what zrpc logs, but for the failures of calls, which the actions ask for."""

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith("On %s: a call failed"):
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + "".join(traceback.format_exception(*record.exc_info))
            _trouble.texts.append(f"logged by {record.name}: {text.rstrip()}")


def prepare() -> str:
    """Makes a worker ready, once in its life: listens to what would only be logged.

    Returns:
        The directory of its sockets.
    """
    logger = logging.getLogger("zrpc")
    logger.addHandler(_Listener(logging.WARNING))
    logger.propagate = False

    def unraisable(event: Any) -> None:
        text = "".join(traceback.format_exception(event.exc_value))
        _trouble.texts.append(f"not raised, in {event.object!r}: {text}")

    def in_thread(event: Any) -> None:
        _trouble.texts.append("".join(traceback.format_exception(event.exc_value)))

    sys.unraisablehook = unraisable
    threading.excepthook = in_thread
    # Each quiet moment collects garbage, which takes long with all of torch's objects.
    gc.collect()
    gc.freeze()
    return socket_directory()


def work(shift: Shift) -> Tally:
    """Does a shift. In the main thread of a worker; returns what was done."""
    me = zrpc.get_worker_info().name
    peers = [name for name in shift.names if name != me]
    until = time.monotonic() + shift.seconds
    tally = Tally()
    waits = _Waits(shift.doomed) if shift.doomed not in (None, me) and not shift.dead else None
    lanes = [
        Lane(
            f"{shift.name}.{me}.{number}",
            f"{shift.name}.{me}.{number}",
            me,
            peers,
            shift.doomed,
            until,
            _ACTIONS,
            shift.all_once,
        )
        for number in range(shift.lanes)
    ]
    for lane in lanes:
        lane.start()
    _join(lanes, until + _STUCK_AFTER)
    if any(lane.is_alive() for lane in lanes):
        tally.violations.append(f"{me} is stuck:\n{under_way()}")
        _join(lanes, until + _ENDS_WITHIN)
    for lane in lanes:
        if lane.is_alive():
            tally.violations.append(f"{me}: {lane.caller} does not end: {_stack(lane)}")
        elif not tally.violations:  # else there would be more of the same
            lane.do(calls.count_marks)
        tally.add(lane.tally)
    if waits is not None:
        waits.check(me, tally)
    texts, _trouble.texts = _trouble.texts, []
    tally.violations += [f"{me}: {text}" for text in texts if not _by_death(text, shift.doomed)]
    return tally


def _join(lanes: Sequence[Lane], until: float) -> None:
    for lane in lanes:
        lane.join(max(0.0, until - time.monotonic()))


def _by_death(text: str, doomed: str | None) -> bool:
    """Whether a future was dropped by an action that had ended with another's error."""
    dropped = "A call failed, and nobody waited for it" in text
    return dropped and doomed is not None and doomed in text and "Died" in text


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "it has ended"


class _Waits:
    """Calls of each kind to a worker that is to die, none of which can be answered before."""

    def __init__(self, doomed: str) -> None:
        self._doomed = doomed
        self._incarnation = zrpc.get_worker_info(doomed).incarnation
        self._lost = threading.Event()
        self._told: list[float] = []
        self._hook = zrpc.on_worker_lost(self._on_lost)
        self._call = zrpc.rpc_async(doomed, targets.rest, (_LONGER_THAN_ALL,), timeout=0)
        self._value = zrpc.remote(doomed, targets.later, (0, _LONGER_THAN_ALL), timeout=0)
        self._method = self._value.rpc_async(timeout=0).add(1)

    def _on_lost(self, worker: zrpc.WorkerInfo) -> None:
        if (worker.name, worker.incarnation) == (self._doomed, self._incarnation):
            self._told.append(time.monotonic())
            self._lost.set()

    def check(self, me: str, tally: Tally) -> None:
        """Waits for the death, and looks at what became of the calls."""
        told = self._lost.wait(_ENDS_WITHIN)
        self._hook.remove()
        if not told:
            tally.violations.append(f"{me}: it was not told that {self._doomed} is lost")
            return
        tally.told += self._told
        for what, wait, kind in [
            ("a call", self._call.wait, zrpc.WorkerDied),
            ("a method", self._method.wait, zrpc.OwnerDied),
            ("a value", lambda: self._value.to_here(timeout=_ENDS_WITHIN), zrpc.OwnerDied),
        ]:
            began = time.monotonic()
            try:
                found: Any = wait()
            except Exception as error:
                found = error
                traceback.clear_frames(error.__traceback__)
            taken = time.monotonic() - began
            right = type(found) is kind and self._doomed in str(found) and taken < 5.0
            if right:
                tally.cut[f"{what} under way"] += 1
            else:
                tally.violations.append(
                    f"{me}: {what} to {self._doomed}, which was killed: expected {kind.__name__} "
                    f"at once, found {found!r} after {taken:.1f} s"
                )
