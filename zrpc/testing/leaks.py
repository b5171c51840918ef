"""Finds leaks of this process: threads, child processes, descriptors, socket files."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zrpc.runtime.context_thread import ContextThread
from zrpc.runtime.thread_frames import thread_frames
from zrpc.testing import procfs
from zrpc.transport.address import PrivateDirectory

# What is stopping has this long to be gone.
_WAIT_SECONDS = 2.0
_POLL_SECONDS = 0.01

# What the CUDA driver opens besides, at its first use, and nothing tells that it is the driver's.
_DRIVERS_DEVICE = "/dev/nvidia"
_DRIVERS_DESCRIPTORS = ("anon_inode:[event", "pipe:")
_DRIVERS_SOCKET = "@cuda-"
# Descriptors that a library opens once, when it first needs them, and keeps until exit.
_LASTING_DESCRIPTORS = (
    "/dev/urandom",  # the random number generators of libraries
    "/dev/random",
    _DRIVERS_DEVICE,  # from its first use on
    "/dev/shm/torch_",  # kept by a tensor in shared memory while the tensor lives
    "/memfd:libffi",  # holds the machine code of ctypes callbacks
)
# Processes that a library starts once, and keeps until exit.
_LASTING_PROCESSES = (
    "multiprocessing.resource_tracker",  # tracks the shared memory of multiprocessing
    "multiprocessing.forkserver",  # starts multiprocessing's processes
    "torch_shm_manager",  # tracks that of torch's file_system sharing strategy
)
# What the agents of another mesh open whenever they need it, and nothing tells whose it is.
_AGENTS_DESCRIPTORS = ("anon_inode:[event", "/memfd:zrpc-")
_AGENTS_DIRECTORY = "/zrpc-inbox-"  # that of an agent's sockets
# The threads of a ZeroMQ context aren't Python threads. The native threads of other libraries
# don't count: torch's autograd and OpenMP threads, once started, stay until exit.
_NATIVE_THREADS = "ZMQbg/"


class LeakError(AssertionError):
    """Something was left behind; the message lists it.

    Args:
        left: one line for each thing.
    """

    def __init__(self, left: list[str]) -> None:
        super().__init__("left behind:\n" + "\n".join(f"- {line}" for line in left))
        self.left = left


@dataclass(frozen=True)
class Resources:
    """The resources of this process at one moment.

    Descriptors, processes and ZeroMQ's threads are known on Linux only, and not reported on
    other systems.

    Example:
        >>> before = Resources.now()
        >>> before.left_behind()
        []
    """

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    descriptors: frozenset[tuple[int, str]]  # with what each points to
    native_threads: frozenset[int]

    @classmethod
    def now(cls) -> Resources:
        """Returns the current resources."""
        return cls(
            threads=frozenset(threading.enumerate()),
            processes=frozenset(procfs.children()),
            descriptors=frozenset(procfs.descriptors().items()),
            native_threads=frozenset(procfs.native_threads(_NATIVE_THREADS)),
        )

    def left_behind(self, within: float | None = None) -> list[str]:
        """Returns a description of each resource made since then that still exists.

        Args:
            within: how many seconds to wait for resources that are going away; default: two.
                Returns at once if nothing is left.

        Resources made inside `lasting` do not count.
        """
        deadline = time.monotonic() + (_WAIT_SECONDS if within is None else within)
        for thread in self._new_threads():
            with contextlib.suppress(RuntimeError):  # Ctrl-C has cut its start short
                thread.join(max(0.0, deadline - time.monotonic()))
        left = self._differences()
        if left:
            # Objects that only a reference cycle holds don't count.
            gc.collect()
            left = self._differences()
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # closing a descriptor raises no event
            left = self._differences()
        return left

    def _differences(self) -> list[str]:
        return [
            *(_describe_thread(thread) for thread in self._new_threads()),
            *(f"process {pid}: {command}" for pid, command in self._new_processes().items()),
            *(f"descriptor {fd}: {target}" for fd, target in self._new_descriptors().items()),
            *(
                f"native thread {tid}: {name} (a ZeroMQ context that is not terminated)"
                for tid, name in procfs.native_threads(_NATIVE_THREADS).items()
                if tid not in self.native_threads | _lasting.native_threads
            ),
        ]

    def _new_threads(self) -> list[threading.Thread]:
        known = self.threads | _lasting.threads
        # What existed before may start further threads: the pools of agents grow, in a mesh that
        # several tests share.
        owners = {id(getattr(thread, "owner", thread)) for thread in known}
        return [
            thread
            for thread in threading.enumerate()
            if thread not in known
            and thread is not threading.current_thread()
            and id(getattr(thread, "owner", None)) not in owners
            # A native thread that has run Python code once, as torch's autograd threads do for
            # Python hooks. Nothing in Python could stop it.
            and not isinstance(thread, threading._DummyThread)
        ]

    def _new_processes(self) -> dict[int, str]:
        new = set(procfs.children()) - self.processes - _lasting.processes
        commands = {pid: procfs.command_of(pid) for pid in sorted(new)}
        return {
            pid: command
            for pid, command in commands.items()
            if command is not None and not any(name in command for name in _LASTING_PROCESSES)
        }

    def _new_descriptors(self) -> dict[int, str]:
        now, known = procfs.descriptors(), self.descriptors | _lasting.descriptors
        # Compare targets, not numbers: a file that was closed and reopened, as logs are, is the
        # same under another number, and a number that was reused is not.
        surplus = Counter(now.values())
        surplus.subtract(target for _, target in [*self.descriptors, *_lasting.descriptors])
        new = {}
        for fd, target in sorted(now.items() - known):
            if surplus[target] > 0:
                surplus[target] -= 1
                if not (target.startswith(_LASTING_DESCRIPTORS) or fd == _resource_tracker()):
                    new[fd] = target
        if not new:
            return {}
        names = procfs.socket_names()
        beside = _BesideAnotherMesh(self) if self._another_mesh_lives() else None
        began_cuda = _uses_cuda(now.items()) and not _uses_cuda(self.descriptors)
        return {
            fd: f"{target} {names.get(target, '')}".rstrip()
            for fd, target in new.items()
            if not (began_cuda and _may_be_drivers(target, names.get(target, "")))
            and not (beside and beside.may_have_opened(fd, target, names.get(target)))
        }

    def _another_mesh_lives(self) -> bool:
        """Returns whether agents that were there before are in this process."""
        return any(isinstance(each, ContextThread) and each.is_alive() for each in self.threads)


def _uses_cuda(descriptors: Iterable[tuple[int, str]]) -> bool:
    return any(target.startswith(_DRIVERS_DEVICE) for _, target in descriptors)


def _may_be_drivers(target: str, name: str) -> bool:
    return target.startswith(_DRIVERS_DESCRIPTORS) or _DRIVERS_SOCKET in name


class _BesideAnotherMesh:
    """Tells which new descriptors agents that lived before may have opened.

    TCP sockets are known by the pollers of those agents and their ZeroMQ contexts, which were
    there before. Of other kinds that agents open, any may be theirs.
    """

    def __init__(self, before: Resources) -> None:
        pollers = [fd for fd, target in before.descriptors if "[eventpoll]" in target]
        self._polled = {fd for poller in pollers for fd in procfs.polled_by(poller)}
        self._own_directory = os.environ.get("ZRPC_RUNTIME_DIR", "")

    def may_have_opened(self, fd: int, target: str, name: str | None) -> bool:
        """Returns whether that may be; a socket without a name is of no TCP connection."""
        if fd in self._polled or target.startswith(_AGENTS_DESCRIPTORS):
            return True
        if name is None:
            return target.startswith("socket:")
        of_test = self._own_directory and self._own_directory in name
        return _AGENTS_DIRECTORY in name and not of_test


# The resources made inside `lasting`. Replaced as a whole, and so safe to read in any thread.
_lasting = Resources(frozenset(), frozenset(), frozenset(), frozenset())


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Exempts resources that are made inside from the search for leaks.

    For resources that are made once, when first needed, and then kept, like a server that
    tests share.

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
            _lasting.descriptors | (now.descriptors - before.descriptors),
            _lasting.native_threads | (now.native_threads - before.native_threads),
        )


@contextlib.contextmanager
def no_leaks() -> Iterator[None]:
    """Checks that the statements inside leave nothing behind in this process.

    Inside, the sockets of agents are in a directory of their own (``ZRPC_RUNTIME_DIR``).
    After an error nothing is checked, because the traceback keeps the statements' objects alive.

    If CUDA is first used inside, pipes and descriptors for events don't count: its driver keeps
    some.

    Beside another mesh whose workers are threads, and that lived before, descriptors of the kinds
    that such workers open don't count: sockets that aren't TCP, and those for events and memory.

    Raises:
        LeakError: threads, child processes, open descriptors, ZeroMQ contexts or socket files
            were left behind, and still existed two seconds later.

    For one thread at a time: resources that other threads make meanwhile count too.

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
    """Creates a private directory, in which new agents put their sockets until it is removed.

    If this process is killed, the next process that creates such a directory removes it.
    """
    name = "ZRPC_RUNTIME_DIR"
    private = PrivateDirectory("zrpc-tests-")
    path = private.path / "run"  # beside the lock, which would count as a leak
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
    """Returns a description of each socket and other file under a directory."""
    return [
        f"{'socket file' if path.is_socket() else 'file'} {path}"
        for path in sorted(directory.rglob("*"))
        if not path.is_dir()
    ]


def _describe_thread(thread: threading.Thread) -> str:
    where = ""
    if (frame := thread_frames().get(thread.ident or 0)) is not None:
        # The innermost call that isn't in the module threading says most.
        stack = traceback.extract_stack(frame)
        last = next((f for f in reversed(stack) if f.filename != threading.__file__), stack[-1])
        where = f", in {last.name} at {last.filename}:{last.lineno}"
    return f"thread {thread.name}{' (a daemon)' if thread.daemon else ''}{where}"


def _resource_tracker() -> int | None:
    """Returns multiprocessing's descriptor for its resource tracker, if there is one."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    return getattr(getattr(module, "_resource_tracker", None), "_fd", None)
