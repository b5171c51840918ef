"""A phase: what one worker does between two idle moments of its mesh."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zrpc
from zrpc.bench.soak import calls, gradients, references, targets
from zrpc.bench.soak.client import Client, Tally
from zrpc.bench.soak.resources import outstanding_work, socket_directory
from zrpc.testing.stacks import other_stacks, stacks_of

_ACTIONS = [*calls.ACTIONS, *references.ACTIONS, *gradients.ACTIONS]
# When a phase is over, each client must complete its action within this time: longer than the
# timeout of a call.
_STOP_SECONDS = 90.0
_STUCK_SECONDS = 20.0
# The duration of calls that a death cuts off.
_LONG_SECONDS = 3600.0


@dataclass(frozen=True)
class Phase:
    """The settings of a phase for one worker.

    Attributes:
        name: unique in the run; with the worker's name, the seed of its random numbers.
        seconds: the duration of the phase.
        clients: the number of client threads.
        names: the names of all workers of the mesh, including dead ones.
        doomed: the worker that may die meanwhile, or is dead.
        dead: whether it is already dead.
        warm_up: whether each client starts with each action once. An action is slow the first
            time, and some objects that it then creates are kept.
    """

    name: str
    seconds: float
    clients: int
    names: Sequence[str]
    doomed: str | None = None
    dead: bool = False
    warm_up: bool = False


# Errors since `prepare` that would otherwise only be logged.
_unreported: list[str] = []


class _LogCollector(logging.Handler):
    """A collector of what zrpc logs, except the failures of calls, which the actions provoke."""

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith("On %s: a call of "):
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + "".join(traceback.format_exception(*record.exc_info))
            _unreported.append(f"logged by {record.name}: {text.rstrip()}")


def prepare() -> str:
    """Prepares a worker, once: collects errors that would otherwise only be logged.

    Returns:
        The directory of its sockets.
    """
    logger = logging.getLogger("zrpc")
    logger.addHandler(_LogCollector(logging.WARNING))
    logger.propagate = False

    def unraisable(event: Any) -> None:
        text = "".join(traceback.format_exception(event.exc_value))
        _unreported.append(f"not raised, in {event.object!r}: {text}")

    def in_thread(event: Any) -> None:
        _unreported.append("".join(traceback.format_exception(event.exc_value)))

    sys.unraisablehook = unraisable
    threading.excepthook = in_thread
    # Garbage is collected in each idle moment, which is slow with all of torch's objects.
    gc.collect()
    gc.freeze()
    return socket_directory()


def run_phase(phase: Phase) -> Tally:
    """Runs a phase in the main thread of a worker; returns what was done."""
    me = zrpc.get_worker_info().name
    peers = [name for name in phase.names if name != me]
    until = time.monotonic() + phase.seconds
    tally = Tally()
    doomed_calls = None
    if phase.doomed not in (None, me) and not phase.dead:
        doomed_calls = _DoomedCalls(phase.doomed)
    names = [f"{phase.name}.{me}.{number}" for number in range(phase.clients)]
    clients = [
        Client(name, me, peers, phase.doomed, until, _ACTIONS, phase.warm_up) for name in names
    ]
    for client in clients:
        client.start()
    _join(clients, until + _STUCK_SECONDS)
    if any(client.is_alive() for client in clients):
        tally.violations.append(f"{me} is stuck:\n{outstanding_work()}\n{other_stacks(())}")
        _join(clients, until + _STOP_SECONDS)
    for client in clients:
        if client.is_alive():
            stack = stacks_of(client.client_name)
            tally.violations.append(f"{me}: {client.client_name} does not stop: {stack}")
        elif not tally.violations:  # otherwise it would only report more of the same
            client.perform(calls.count_marks)
        tally.add(client.tally)
    if doomed_calls is not None:
        doomed_calls.check(me, tally)
    texts = _unreported.copy()
    del _unreported[: len(texts)]
    tally.violations += [
        f"{me}: {text}" for text in texts if not _caused_by_death(text, phase.doomed)
    ]
    return tally


def _join(clients: Sequence[Client], until: float) -> None:
    for client in clients:
        client.join(max(0.0, until - time.monotonic()))


def _caused_by_death(text: str, doomed: str | None) -> bool:
    """Returns whether a text is about a future that an action dropped after another one failed."""
    dropped = "A call failed, and nobody waited for it" in text
    return dropped and doomed is not None and doomed in text and "Died" in text


class _DoomedCalls:
    """Calls of each kind to a worker that will be killed; none can be answered before that."""

    def __init__(self, doomed: str) -> None:
        self._doomed = doomed
        self._incarnation = zrpc.get_worker_info(doomed).incarnation
        self._lost = threading.Event()
        self._notified_at: list[float] = []
        self._hook = zrpc.on_worker_lost(self._on_lost)
        self._call = zrpc.rpc_async(doomed, targets.rest, (_LONG_SECONDS,), timeout=0)
        self._value = zrpc.remote(doomed, targets.later, (0, _LONG_SECONDS), timeout=0)
        self._method = self._value.rpc_async(timeout=0).add(1)

    def _on_lost(self, worker: zrpc.WorkerInfo) -> None:
        if (worker.name, worker.incarnation) == (self._doomed, self._incarnation):
            self._notified_at.append(time.monotonic())
            self._lost.set()

    def check(self, me: str, tally: Tally) -> None:
        """Waits for the death, then checks the errors of the calls."""
        notified = self._lost.wait(_STOP_SECONDS)
        self._hook.remove()
        if not notified:
            tally.violations.append(f"{me}: it was not notified that {self._doomed} is lost")
            return
        tally.notified_at += self._notified_at
        for what, wait, expected in [
            ("a call", self._call.wait, zrpc.WorkerDied),
            ("a method", self._method.wait, zrpc.OwnerDied),
            ("a value", lambda: self._value.to_here(timeout=_STOP_SECONDS), zrpc.OwnerDied),
        ]:
            began = time.monotonic()
            try:
                found: Any = wait()
            except Exception as error:
                found = error
                traceback.clear_frames(error.__traceback__)
            taken = time.monotonic() - began
            right = type(found) is expected and self._doomed in str(found) and taken < 5.0
            if right:
                tally.cut_off[f"{what} in flight"] += 1
            else:
                tally.violations.append(
                    f"{me}: {what} to {self._doomed}, which was killed: expected "
                    f"{expected.__name__} at once, found {found!r} after {taken:.1f} s"
                )
