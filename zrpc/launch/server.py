"""The fork server's own process: a single thread that forks, reaps and reports.

It starts as ``python -c``, imports what workers need, then answers its owner's requests until
the owner closes the connection or dies. Every child is a copy of this process; in the child,
`serve` returns, so that the child's program runs at the bottom of the stack and the interpreter
ends in its normal way.

Requests and replies go over one socket, exits over another, so that the owner can wait for exits
in a selector while nothing is hidden in a buffer:

    ("spawn", task, given, passed)     fds: the given of stdin, stdout, stderr, then the passed
    ("signal", pid, number, group)
    ("directory",)
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import FrameType
from typing import Any

from . import child, prctl
from .channel import Channel
from .descriptors import is_open
from .starter import EXIT, short_directory
from .task import Task

_GRACE = 1.0  # seconds for what workers left behind, such as multiprocessing's resource tracker
_KILL = 5.0  # seconds for killed processes to vanish
_Program = Callable[[], None]


def serve(
    requests: int, exits: int, owner: int, preload: Sequence[str], at_startup: Collection[str]
) -> _Program:
    """Answer requests until the owner is gone; then end this process.

    Args:
        requests: Descriptor of the socket for requests and replies.
        exits: Descriptor of the socket for exits.
        owner: The owner's process id.
        preload: Modules to import before the first fork.
        at_startup: Names of the modules that every fresh interpreter has.

    Returns:
        Only in a child: what to run there.
    """
    channel = Channel(socket.socket(fileno=requests))
    loaded = [name for name in preload if _import(name)]
    # Only Python's threads count. OpenBLAS, which numpy brings, ends its own before each fork.
    if (threads := threading.active_count()) > 1:
        _tell(channel, "failed", f"{threads - 1} thread(s) were started by importing {loaded}")
        os._exit(1)
    # Collect once, here; what is alive now is then left alone by the children's collectors,
    # so that their memory stays shared with this process.
    gc.collect()
    gc.freeze()
    server = _Server(channel, socket.socket(fileno=exits), owner)
    _tell(channel, "done", loaded)
    return partial(child.become, server.run(), at_startup)


def _tell(channel: Channel, kind: str, value: object) -> None:
    # An owner that ended during the imports is no error: `run` sees it, and ends.
    with contextlib.suppress(ConnectionError):
        channel.send((kind, value))


def _import(name: str) -> bool:
    # A module that can't be imported is left to the workers: the one that needs it shows the
    # error with its own traceback, and those that don't aren't disturbed.
    try:
        importlib.import_module(name)
    except Exception:
        return False
    return True


class _Server:
    """The loop. All state belongs to the process's only thread."""

    def __init__(self, channel: Channel, exits: socket.socket, owner: int) -> None:
        self._channel = channel
        self._exits = exits
        self._exits.setblocking(False)
        self._unsent = bytearray()  # exits that the owner's socket had no room for
        self._running: set[int] = set()
        self._directories: list[str] = []
        self._ended = False
        self._handlers: dict[int, Any] = {}
        self._wakeups, self._wakeup_end = socket.socketpair()
        self._owner_fd = _process_descriptor(owner)
        self._selector = selectors.DefaultSelector()
        for source in (channel, self._wakeups, self._owner_fd):
            if source is not None:
                self._selector.register(source, selectors.EVENT_READ)
        self._catch_signals()
        prctl.adopt_orphans()

    def _catch_signals(self) -> None:
        # Each signal writes its number to the wakeup socket, so that none is lost between a
        # check and the wait. The handlers exist only because a default action would come first.
        for end in (self._wakeups, self._wakeup_end):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _only_wake)

    def run(self) -> Task:
        """Loop until the owner is gone, and end the process. Returns only in a child."""
        while not self._ended:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._owner_fd in ready:
                self._ended = True
            if self._wakeups in ready:
                self._on_signals()
            if self._exits in ready:
                self._send_exits()
            if self._channel in ready and (task := self._on_request()) is not None:
                return task
        self._end()
        os._exit(0)

    def _on_signals(self) -> None:
        numbers: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                numbers.update(self._wakeups.recv(4096))
        if signal.SIGTERM in numbers:
            self._ended = True
        if signal.SIGCHLD in numbers:
            for pid, status in _reap():
                if pid in self._running:
                    self._running.discard(pid)
                    self._unsent += EXIT.pack(pid, os.waitstatus_to_exitcode(status))
            self._send_exits()

    def _send_exits(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while self._unsent:
                    del self._unsent[: self._exits.send(self._unsent)]
            except ConnectionError:
                self._unsent.clear()  # the owner is gone; its end of `requests` tells
        waiting = self._exits in self._selector.get_map()
        if self._unsent and not waiting:
            self._selector.register(self._exits, selectors.EVENT_WRITE)
        elif waiting and not self._unsent:
            self._selector.unregister(self._exits)

    def _on_request(self) -> Task | None:
        try:
            request, fds = self._channel.receive()
        except EOFError:
            self._ended = True
            return None
        reply: tuple[Any, ...]
        try:
            match request:
                case ("spawn", task, given, passed):
                    pid = self._fork(fds, given, passed)
                    if pid == 0:
                        assert isinstance(task, Task)
                        return task
                    reply = ("done", pid)
                case ("signal", pid, number, group):
                    reply = ("done", self._signal(pid, number, group))
                case ("directory",):
                    self._directories.append(short_directory())
                    reply = ("done", self._directories[-1])
                case _:
                    reply = ("failed", f"unknown request {request!r}")
        except OSError as error:
            reply = ("failed", str(error))
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ConnectionError):
            self._channel.send(reply)
        return None

    def _signal(self, pid: int, number: int, group: bool) -> bool:
        # A child is in the table until this thread reaps it, so its number can't be another's.
        if pid not in self._running:
            return False
        if group:
            with contextlib.suppress(ProcessLookupError):  # too young to have its own group
                os.killpg(pid, number)
                return True
        os.kill(pid, number)
        return True

    def _fork(self, fds: list[int], given: list[int], passed: list[int]) -> int:
        ours = {self._channel.fileno(), self._exits.fileno(), self._selector.fileno(), *fds}
        ours |= {self._wakeups.fileno(), self._wakeup_end.fileno(), self._owner_fd or -1}
        for target in passed:
            if target not in ours and is_open(target):
                raise OSError(
                    f"descriptor {target} can't be passed on under its own number, which a "
                    "preloaded module uses in the server; pass a copy made by os.dup"
                )
        # No signal may run a handler of the server in the child, nor wake the server from there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        server = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_child(server, fds, [*given, *passed])
            else:
                self._running.add(pid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _become_child(self, server: int, fds: list[int], targets: list[int]) -> None:
        try:
            self._leave(server)
            _place(fds, targets)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # whatever happens, a child never goes on as a second server

    def _leave(self, server: int) -> None:
        """Stop being the server, in a new child."""
        prctl.die_with_parent(server)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._selector.close()
        self._channel.close()
        for end in (self._exits, self._wakeups, self._wakeup_end):
            end.close()
        if self._owner_fd is not None:
            os.close(self._owner_fd)

    def _end(self) -> None:
        """Kill all children and theirs, then remove the directories."""
        for pid in self._running:
            self._signal(pid, signal.SIGKILL, group=True)
        # Orphans come to this process as children. Some of them tidy up when their parent is
        # gone, so they get a moment.
        deadline = time.monotonic() + _GRACE
        while _children() and time.monotonic() < deadline:
            _wait_for_signal(self._wakeups, 0.02)
            _reap()
        deadline = time.monotonic() + _KILL
        while (pids := _children()) and time.monotonic() < deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            _wait_for_signal(self._wakeups, 0.02)
            _reap()
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)


def _only_wake(number: int, frame: FrameType | None) -> None:
    pass


def _process_descriptor(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, where the kernel has such."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # the end of the connection has to do


def _reap() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(found)
    return ended


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _wait_for_signal(wakeups: socket.socket, seconds: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(wakeups, selectors.EVENT_READ)
        if selector.select(seconds):
            wakeups.recv(4096)


def _place(fds: list[int], targets: list[int]) -> None:
    """Move each descriptor to its number, whatever the overlap between the two lists."""
    lifted = []
    for fd in fds:
        lifted.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max([63, *targets]) + 1))
        os.close(fd)
    for fd, target in zip(lifted, targets, strict=True):
        os.dup2(fd, target, inheritable=target < 3)
        os.close(fd)


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("the fork server needs Linux; use zrpc.launch.spawner elsewhere")
