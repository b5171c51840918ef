"""Ends a test that hangs: reports the stacks, stops the workers, then interrupts the test."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from zrpc.services.inspection.discovery import ask, directories, meshes
from zrpc.services.inspection.report import Report
from zrpc.testing.spec import NO_DEADLINE_SECONDS
from zrpc.testing.stacks import other_stacks

if TYPE_CHECKING:
    from zrpc.testing.mesh import Mesh

# A wait for a mesh fails at once. Only a thread that is still stuck after this is interrupted.
_FIRST_INTERRUPT_SECONDS = 0.25
_INTERRUPT_SECONDS = 1.0
_LAST_RESORT_SECONDS = 15.0
# How long workers may take to describe what they wait for.
_ANSWER_SECONDS = 1.0

# The default action of this signal is to do nothing, so a late one does no harm.
_SIGNAL = signal.SIGURG
# Those that the main thread is in, and what handled the signal before. They may end in any order.
# Only the main thread changes these.
_entered: list[Watchdog] = []
_previous: list[Any] = []


class MeshTimeout(TimeoutError):
    """A test with a mesh did not finish by its deadline; the message holds all stacks.

    The deadline is the ``timeout`` of `zrpc.testing.MeshSpec`.
    """


class Watchdog:
    """Ensures that no hang of a test, or of its meshes, outlives a deadline.

    At the deadline the watchdog's thread collects the stacks of all workers, fails all waits
    for them, and stops them. If the main thread waits for something else, inside
    `interruptible`, it is interrupted by a signal. If that does not help either, because the
    main thread hangs in C code that no signal ends, ``last_resort`` is called. A coroutine that is
    suspended is cancelled instead. If the main thread has left the code that has entered the
    watchdog without ending it, as between two cells of a notebook, nothing is interrupted.

    Args:
        seconds: the time until the deadline, from now.
        last_resort: called at the very end with the report, in the watchdog's thread.
        entry: the code that may be interrupted; None if `interruptible` says all about that.

    Use it as a context manager, in the main thread: no other thread can be interrupted. The
    other methods may be called from any thread.
    """

    def __init__(
        self, seconds: float, last_resort: Callable[[str], None], entry: Entry | None = None
    ) -> None:
        self._entry = entry
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        # Set once, by the watchdog's thread, before it fails the meshes.
        self.timed_out: MeshTimeout | None = None
        self._last_resort = last_resort
        # The lock guards _meshes, and that no mesh is added once timed_out is set.
        self._lock = threading.Lock()
        self._meshes: list[Mesh] = []
        self._closed = threading.Event()
        # Whether the main thread may be interrupted now. Only the main thread writes it.
        self.may_interrupt = False
        # Whether the main thread has left the code that has entered, and need not be interrupted.
        self._left = False
        self._thread = threading.Thread(target=self._run, name="zrpc-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            if not _entered:
                _previous.append(signal.signal(_SIGNAL, _interrupt))
            _entered.append(self)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.may_interrupt = False
        self._closed.set()
        self._thread.join()
        if self._in_main:
            _entered.remove(self)
            if not _entered:
                # None: the handler was not set from Python, and can't be put back from here.
                signal.signal(_SIGNAL, _previous.pop() or signal.SIG_DFL)

    def remaining(self) -> float:
        """Returns the seconds until the deadline; 0 if it has passed."""
        return max(0.0, self.deadline - time.monotonic())

    def suspend(self) -> None:
        """Lifts the deadline, because a debugger has been entered."""
        self.deadline = time.monotonic() + NO_DEADLINE_SECONDS
        self._closed.set()

    def watch(self, mesh: Mesh) -> None:
        """Adds a mesh that is stopped at the deadline.

        Raises:
            MeshTimeout: the deadline has passed.
        """
        with self._lock:
            if self.timed_out is not None:
                raise self.timed_out
            self._meshes.append(mesh)

    @property
    def meshes(self) -> list[Mesh]:
        """The meshes that it watches, oldest first."""
        with self._lock:
            return list(self._meshes)

    @contextlib.contextmanager
    def interruptible(self, cleanup: bool = False) -> Iterator[None]:
        """Lets the deadline interrupt the main thread within a ``with`` statement.

        Args:
            cleanup: whether its body cleans up. If that begins after the deadline, it has its time.
        """
        self.may_interrupt = not cleanup or self.remaining() > 0
        try:
            yield
        finally:
            self.may_interrupt = False

    def _run(self) -> None:
        """Runs in the watchdog's thread."""
        if self._closed.wait(self.seconds):
            return
        with self._lock:
            meshes = list(self._meshes)
            try:
                report = _report(self.seconds, meshes)
            except Exception:  # nothing may keep the deadline from taking effect
                report = f"no report: {traceback.format_exc()}"
            self.timed_out = error = MeshTimeout(report)
        for mesh in meshes:
            mesh._fail_waits(error)
        # A main thread that waited for a mesh is unwinding now. One that waits for something
        # else is interrupted before the workers are stopped, so that the test fails with this
        # error and not with a consequence of their end.
        if self._closed.wait(_FIRST_INTERRUPT_SECONDS):
            return
        self._interrupt_main()
        for mesh in meshes:
            mesh._abort()
        last_resort_at = time.monotonic() + _LAST_RESORT_SECONDS
        while not (self._left or self._closed.wait(_INTERRUPT_SECONDS)):
            if time.monotonic() > last_resort_at:
                self._last_resort(report)
                return
            self._interrupt_main()

    def _interrupt_main(self) -> None:
        """Interrupts the main thread if it may be."""
        if self._in_main and self.may_interrupt:
            ident = threading.main_thread().ident
            assert ident is not None  # the main thread runs
            signal.pthread_kill(ident, _SIGNAL)

    def _interrupt(self, frame: FrameType | None) -> None:
        """Runs in the main thread, between two instructions."""
        __tracebackhide__ = True
        if self.timed_out is None or not self.may_interrupt:
            return
        # Only once: the clean-up that follows must have its time.
        self.may_interrupt = False
        entry = self._entry
        if entry is not None and not entry.runs_in(frame):
            self._left = entry.has_returned()
            if self._left or entry.cancel_task():
                return
        raise self.timed_out


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Handles the signal: interrupts the main thread for the watchdogs that ask for that."""
    __tracebackhide__ = True
    for each in reversed(_entered):
        each._interrupt(frame)


def _report(seconds: float, meshes: Sequence[Mesh]) -> str:
    work = [line for mesh in meshes for line in mesh._work_in_progress()]
    names = {name for mesh in meshes for name in mesh.names}
    deadlocks = _describe_deadlocks({pid for mesh in meshes for pid in mesh._process_ids()})
    return "\n".join(
        [
            f"not finished within {seconds:g} s (the mesh's timeout)",
            *(f"- {line}" for line in work or ["no worker was running anything"]),
            "",
            *([deadlocks, ""] if deadlocks else []),
            *(mesh._stacks() for mesh in meshes),
            "---- other threads of this process ----",
            other_stacks(names),
        ]
    )


def _describe_deadlocks(pids: Collection[int]) -> str:
    """Describes the deadlocks in meshes that have a worker in these processes.

    Returns an empty text if there are none. Takes a second at most. May be called from any
    thread but those in which workers receive.
    """
    found, _ = meshes(ask(directories(), _ANSWER_SECONDS))
    reports = [Report(mesh) for mesh in found if set(pids) & set(mesh.pids.values())]
    return "\n\n".join("\n".join(lines) for report in reports for lines in report.cycles())


def print_report(report: str) -> None:
    """The ``last_resort`` of a script: prints the report on stderr and changes nothing."""
    print(report, file=sys.stderr, flush=True)


_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Entry:
    """The frame that has entered a context manager, and the asyncio task that it was entered in.

    A call that `contextlib` makes counts as that of its caller.

    Args:
        frame: the frame that calls ``__enter__``, in the present thread.
    """

    def __init__(self, frame: FrameType | None) -> None:
        while frame is not None and frame.f_globals.get("__name__") == "contextlib":
            frame = frame.f_back
        assert frame is not None  # something other than contextlib has called it
        self._code = frame.f_code
        # Not the frame itself: it would keep the variables of a function that has returned. But
        # that of a generator is needed, since nothing else finds it while it is suspended.
        self._id = id(frame)
        self._suspended = frame if self._code.co_flags & _SUSPENDED else None
        self._task: asyncio.Task[Any] | None = None
        if self._code.co_flags & _ASYNC and asyncio._get_running_loop() is not None:
            self._task = asyncio.current_task()

    def runs_in(self, frame: FrameType | None) -> bool:
        """Returns whether the frame that has entered is this one, or one of its callers."""
        # An id may be that of a later frame, but hardly of the same code.
        while frame is not None and (id(frame) != self._id or frame.f_code is not self._code):
            frame = frame.f_back
        return frame is not None

    def has_returned(self) -> bool:
        """Returns whether the frame has returned, given that it does not run."""
        frame = self._suspended
        if frame is None:
            return True
        if self._task is not None and self._code.co_flags & inspect.CO_COROUTINE:
            return self._task.done()
        return dis.opname[self._code.co_code[frame.f_lasti]].startswith("RETURN_")

    def cancel_task(self) -> bool:
        """Cancels the coroutine that has entered and is suspended.

        Returns:
            False if there is none: raise an error instead.
        """
        task = self._task
        if task is None or task.done() or asyncio._get_running_loop() is not task.get_loop():
            return False
        if asyncio.current_task() is task:
            return False
        task.get_loop().call_soon_threadsafe(task.cancel)  # wakes the loop too
        return True
