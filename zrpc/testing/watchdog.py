"""The end of a test that hangs: stacks, then the workers' end, then the test's."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from zrpc.testing.circles import circles
from zrpc.testing.stacks import other_stacks

if TYPE_CHECKING:
    from zrpc.testing.mesh import Mesh

__all__ = ["MeshTimeout", "Watchdog"]

# What waits for a mesh has its error at once; only what is still stuck then is interrupted.
_FIRST_INTERRUPT = 0.25
_INTERRUPT_EVERY = 1.0
_GIVE_UP_AFTER = 15.0
# Seconds that stand for no deadline: as many as `MeshSpec` takes, what waits in C holds them.
_NEVER = 3e7

# Its default action is to do nothing, so that one that arrives late does no harm.
_SIGNAL = signal.SIGURG


class MeshTimeout(TimeoutError):
    """A test with a mesh was not over by its deadline; the message holds all stacks.

    See also `zrpc.testing.MeshSpec`, whose ``timeout`` it is.
    """


class Watchdog:
    """Lets no hang of a test, or of its meshes, outlive a deadline.

    At the deadline its thread collects the stacks of all workers, fails what waits for them,
    and ends them. A main thread that waits for something else, inside `interruptible`, is
    interrupted by a signal. Where even that does not help (it hangs in C code that no
    signal ends), ``give_up`` is called.

    Args:
        seconds: the time until the deadline, from now.
        give_up: called with the report, in the watchdog's thread, at the very end.

    Use it as a context manager, in the thread that is to be interrupted; that must be the
    main thread, else there is no interrupting. The other methods may be called from any
    thread.
    """

    def __init__(self, seconds: float, give_up: Callable[[str], None]) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        # Set once, by the watchdog's thread, before it fails the meshes.
        self.timed_out: MeshTimeout | None = None
        self._give_up = give_up
        # The lock guards _meshes, and that no mesh comes in once timed_out is set.
        self._lock = threading.Lock()
        self._meshes: list[Mesh] = []
        self._closed = threading.Event()
        # Written by the main thread only: which stretch may be interrupted; None for none.
        self._stretch: object | None = None
        self._thread = threading.Thread(target=self._run, name="zrpc-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._previous: Any = signal.signal(_SIGNAL, self._interrupt)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.forbid_interrupt()
        self._closed.set()
        self._thread.join()
        if self._in_main:
            # None: the handler was not set from Python, and can't be put back from here.
            signal.signal(_SIGNAL, self._previous or signal.SIG_DFL)

    def remaining(self) -> float:
        """Seconds until the deadline, 0 once it has passed."""
        return max(0.0, self.deadline - time.monotonic())

    def suspend(self) -> None:
        """Has the deadline pass without effect: somebody looks at the test in a debugger."""
        self.deadline = time.monotonic() + _NEVER
        self._closed.set()

    def watch(self, mesh: Mesh) -> None:
        """Has the mesh ended at the deadline.

        Raises:
            MeshTimeout: that has passed.
        """
        with self._lock:
            if self.timed_out is not None:
                raise self.timed_out
            self._meshes.append(mesh)

    @property
    def meshes(self) -> list[Mesh]:
        """The meshes that it watches, in the order of their making."""
        with self._lock:
            return list(self._meshes)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """The stretch of code in which the deadline interrupts the main thread."""
        self.allow_interrupt()
        try:
            yield
        finally:
            self.forbid_interrupt()

    def allow_interrupt(self) -> None:
        """Begins such a stretch; without effect after the deadline.

        What ends a test after its deadline must have its time.
        """
        self._stretch = object()

    def forbid_interrupt(self) -> None:
        """Ends such a stretch."""
        self._stretch = None

    def _run(self) -> None:
        """Runs in the watchdog's thread."""
        if self._closed.wait(self.seconds):
            return
        stuck = self._stretch
        with self._lock:
            meshes = list(self._meshes)
            try:
                report = _report(self.seconds, meshes)
            except Exception:  # nothing may keep the deadline from being one
                report = f"no report: {traceback.format_exc()}"
            self.timed_out = error = MeshTimeout(report)
        for mesh in meshes:
            mesh.fail(error)
        # A main thread that waited for a mesh is on its way out now. Any other is interrupted
        # before the workers end, so that the test fails of this and not of what their end
        # does to it.
        if self._closed.wait(_FIRST_INTERRUPT):
            return
        self._interrupt_main(stuck)
        for mesh in meshes:
            mesh.end()
        give_up_at = time.monotonic() + _GIVE_UP_AFTER
        while not self._closed.wait(_INTERRUPT_EVERY):
            if time.monotonic() > give_up_at:
                self._give_up(report)
                return
            self._interrupt_main(stuck)

    def _interrupt_main(self, stuck: object | None) -> None:
        """Interrupts the main thread where it still is in that stretch of code."""
        if self._in_main and stuck is not None and self._stretch is stuck:
            ident = threading.main_thread().ident
            assert ident is not None  # the main thread runs
            signal.pthread_kill(ident, _SIGNAL)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between two instructions of whatever it does."""
        __tracebackhide__ = True
        if self.timed_out is not None and self._stretch is not None:
            # Once: what follows is the way out, which must have its time.
            self._stretch = None
            raise self.timed_out


def _report(seconds: float, meshes: Sequence[Mesh]) -> str:
    busy = [line for mesh in meshes for line in mesh.busy()]
    names = {name for mesh in meshes for name in mesh.names}
    waiting = circles({pid for mesh in meshes for pid in mesh.pids()})
    return "\n".join(
        [
            f"not finished within {seconds:g} s (the timeout of the mesh's test)",
            *(f"- {line}" for line in busy or ["no worker was running anything"]),
            "",
            *([waiting, ""] if waiting else []),
            *(mesh.stacks() for mesh in meshes),
            "---- other threads of this process ----",
            other_stacks(names),
        ]
    )


def print_and_go_on(report: str) -> None:
    """The ``give_up`` of a script: the report on stderr, as nothing more can be done."""
    print(report, file=sys.stderr, flush=True)
