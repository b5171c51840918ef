"""What code leaves behind in this process: threads, processes, descriptors, socket files."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zrpc.testing.proc import children, command_of, descriptors, native_threads, socket_names
from zrpc.transport.address import PrivateDirectory

__all__ = ["LeakError", "Resources", "files_in", "lasting", "no_leaks", "runtime_directory"]

# What is ending has this long to be gone, in seconds.
_ENDS_WITHIN = 2.0
_LOOK_EVERY = 0.01

# Descriptors that are opened once, by a library, when first needed, and kept until exit.
_LASTING_DESCRIPTORS = (
    "/dev/urandom",  # the random number generators of libraries
    "/dev/random",
    "/dev/nvidia",  # the CUDA driver, from its first use on
    "/dev/shm/torch_",  # a tensor in shared memory has it as long as the tensor lives
    "/memfd:libffi",  # where ctypes puts the machine code of callbacks
)
# Processes of that kind.
_LASTING_PROCESSES = (
    "multiprocessing.resource_tracker",  # watches the shared memory of multiprocessing
    "multiprocessing.forkserver",  # multiprocessing's own way to start processes
    "torch_shm_manager",  # the same for torch's file_system sharing strategy
)
# The threads of a ZeroMQ context. They are no Python threads, and those of other libraries
# (torch's autograd and OpenMP threads stay until exit once they were needed) don't count.
_NATIVE_THREADS = "ZMQbg/"


class LeakError(AssertionError):
    """Something was left behind; the message lists it.

    Args:
        left: a line for each thing.
    """

    def __init__(self, left: list[str]) -> None:
        super().__init__("left behind:\n" + "\n".join(f"- {line}" for line in left))
        self.left = left


@dataclass(frozen=True)
class Resources:
    """What this process has at one moment.

    Descriptors, processes and ZeroMQ's threads are known on Linux only; elsewhere nothing is
    reported of them.

    Example:
        >>> before = Resources.now()
        >>> before.left_behind()
        []
    """

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    descriptors: dict[int, str]
    native_threads: frozenset[int]

    @classmethod
    def now(cls) -> Resources:
        """What there is now."""
        return cls(
            threads=frozenset(threading.enumerate()),
            processes=frozenset(children()),
            descriptors=descriptors(),
            native_threads=frozenset(native_threads(_NATIVE_THREADS)),
        )

    def left_behind(self, within: float | None = None) -> list[str]:
        """What there is beyond this, described, a line for each thing.

        Args:
            within: how long to wait for what is ending, in seconds; default: two. Where
                nothing is left, nothing is waited for.

        What was made inside `lasting` does not count.
        """
        end = time.monotonic() + (_ENDS_WITHIN if within is None else within)
        for thread in self._new_threads():
            thread.join(max(0.0, end - time.monotonic()))
        left = self._differences()
        if left:
            # What only a reference cycle holds is as good as gone.
            gc.collect()
            left = self._differences()
        while left and time.monotonic() < end:
            time.sleep(_LOOK_EVERY)  # no event tells of a descriptor that is closed
            left = self._differences()
        return left

    def _differences(self) -> list[str]:
        return [
            *(_describe_thread(thread) for thread in self._new_threads()),
            *(f"process {pid}: {command}" for pid, command in self._new_processes().items()),
            *(f"descriptor {fd}: {target}" for fd, target in self._new_descriptors().items()),
            *(
                f"native thread {tid}: {name} (a ZeroMQ context that is not terminated)"
                for tid, name in native_threads(_NATIVE_THREADS).items()
                if tid not in self.native_threads | _lasting.native_threads
            ),
        ]

    def _new_threads(self) -> list[threading.Thread]:
        known = self.threads | _lasting.threads
        # What was there before may start further threads: the agents of a mesh that several
        # tests share do, when their pools grow.
        owners = {id(getattr(thread, "owner", thread)) for thread in known}
        return [
            thread
            for thread in threading.enumerate()
            if thread not in known
            and thread is not threading.current_thread()
            and id(getattr(thread, "owner", None)) not in owners
            # A thread of native code that has run Python code once, as torch's autograd
            # threads do for Python hooks: nothing in Python could end it.
            and not isinstance(thread, threading._DummyThread)
        ]

    def _new_processes(self) -> dict[int, str]:
        new = set(children()) - self.processes - _lasting.processes
        commands = {pid: command_of(pid) for pid in sorted(new)}
        return {
            pid: command
            for pid, command in commands.items()
            if command is not None and not any(name in command for name in _LASTING_PROCESSES)
        }

    def _new_descriptors(self) -> dict[int, str]:
        now = descriptors()
        # By what they point to: a file that was closed and opened again, as logs are, is the
        # same though its number differs, and a number that is in use again is not.
        surplus = Counter(now.values())
        surplus.subtract(Counter(self.descriptors.values()))
        surplus.subtract(Counter(_lasting.descriptors.values()))
        names: dict[str, str] | None = None
        new = {}
        for fd, target in sorted(now.items()):
            known = target in (self.descriptors.get(fd), _lasting.descriptors.get(fd))
            if known or surplus[target] <= 0:
                continue
            surplus[target] -= 1
            if target.startswith(_LASTING_DESCRIPTORS) or fd == _resource_tracker():
                continue
            if names is None:
                names = socket_names()
            new[fd] = f"{target} {names.get(target, '')}".rstrip()
        return new


# What `lasting` has seen being made. Replaced as a whole, hence safe to read in any thread.
_lasting = Resources(frozenset(), frozenset(), {}, frozenset())


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """What is made inside is meant to outlive a test, and is never reported as left behind.

    For what is made once, when first needed, and then kept: a server that tests share.

    Example:
        >>> with lasting():
        ...     connection = open("/dev/null")
        >>> connection.close()
    """
    global _lasting
    before = Resources.now()
    try:
        yield
    finally:
        now = Resources.now()
        _lasting = Resources(
            _lasting.threads | (now.threads - before.threads),
            _lasting.processes | (now.processes - before.processes),
            {
                **_lasting.descriptors,
                **dict(now.descriptors.items() - before.descriptors.items()),
            },
            _lasting.native_threads | (now.native_threads - before.native_threads),
        )


@contextlib.contextmanager
def no_leaks() -> Iterator[None]:
    """Checks that the statements inside leave nothing behind in this process.

    Inside, the sockets of agents lie in a directory of their own (``ZRPC_RUNTIME_DIR``).
    After an error nothing is checked: its traceback keeps alive what they were using.

    Raises:
        LeakError: threads, child processes, open descriptors, ZeroMQ contexts or socket files
            were left behind, and were still there two seconds later.

    For one thread at a time: what other threads make meanwhile counts too.

    Example:
        >>> with no_leaks():
        ...     open("/dev/null").close()
    """
    with runtime_directory() as directory:
        before = Resources.now()
        yield
        left = [*before.left_behind(), *files_in(directory)]
    if left:
        raise LeakError(left)


@contextlib.contextmanager
def runtime_directory() -> Iterator[Path]:
    """A private directory, and as long as it exists the one for the sockets of new agents.

    Should this process be killed, it is removed by whoever makes the next one.
    """
    name = "ZRPC_RUNTIME_DIR"
    private = PrivateDirectory("zrpc-tests-")
    path = private.path / "run"  # beside the lock, which is nothing that was left behind
    previous = os.environ.get(name)
    try:
        path.mkdir()
        os.environ[name] = str(path)
        yield path
    finally:
        if previous is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = previous
        private.remove()


def files_in(directory: Path) -> list[str]:
    """The sockets and other files under a directory, described, a line for each."""
    return [
        f"{'socket file' if path.is_socket() else 'file'} {path}"
        for path in sorted(directory.rglob("*"))
        if not path.is_dir()
    ]


def _describe_thread(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    where = ""
    if frame is not None:
        # Innermost last; the last that is not threading's own says most.
        stack = traceback.extract_stack(frame)
        last = next((f for f in reversed(stack) if f.filename != threading.__file__), stack[-1])
        where = f", in {last.name} at {last.filename}:{last.lineno}"
    return f"thread {thread.name}{' (a daemon)' if thread.daemon else ''}{where}"


def _resource_tracker() -> int | None:
    """The descriptor by which multiprocessing talks to its tracker, once there is one."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    fd: int | None = getattr(tracker, "_fd", None)
    return fd
