"""The fork server's own process: a single thread that forks, reaps and reports.

It starts as ``python -c``, imports the modules to preload, then answers its owner's requests until
the owner closes the connection or dies. Every child is a copy of this process; in the child,
`serve` returns, so that the child's program runs at the bottom of the stack and the interpreter
exits in its normal way.

Requests and replies go over one socket, exits over another, so that the owner can wait for exits
in a selector and none is hidden in a buffer:

    ("spawn", task, streams, passed)   fds: those for the streams (of 0 to 2), then those passed on
    ("signal", pid, number, group)
    ("directory",)
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import select
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
from typing import Any

from zrpc.launch import child
from zrpc.launch.channel import Channel
from zrpc.launch.descriptors import is_open
from zrpc.launch.signal_state import FRESH, SignalState, blocked, receive_signals
from zrpc.launch.signals import FORWARDED, STOPS, SignalInbox
from zrpc.launch.starter import EXIT_RECORD, short_directory
from zrpc.launch.task import Task

_ORPHAN_SECONDS = 1.0  # for orphans to exit, such as multiprocessing's resource tracker
_KILL_SECONDS = 5.0  # for killed processes to exit
_POLL_SECONDS = 0.02
# The others do nothing to the server. A supervisor that sends them to all processes sends them to
# the owner, too, which gives the workers time to stop.
_COLLECTED = STOPS | FORWARDED | {signal.SIGCHLD}
_Program = Callable[[], None]


def serve(
    requests: int,
    exits: int,
    owner: int,
    preload: Sequence[str],
    startup_modules: Collection[str],
    given: SignalState = FRESH,
    spare_detached: bool = False,
) -> _Program:
    """Answers requests until the owner is gone; then exits. Returns, in a child, its program.

    The first two are descriptors of sockets, and ``owner`` is the owner's process id. The modules
    in ``preload`` are imported before the first fork; a fresh interpreter has the startup modules.
    Children get the state of signals that is given. With ``spare_detached``, processes that have
    left the sessions of the children outlive the server.
    """
    inbox = SignalInbox(_COLLECTED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    inbox.__enter__()
    receive_signals()  # the owner has blocked them, so that none comes before the handlers
    channel = Channel(socket.socket(fileno=requests))
    # While torch is imported, the collector would pass over its objects again and again: for 6 % of
    # the import's processor time, and for a sixth if torch._dynamo is imported, too.
    gc.disable()
    loaded = [name for name in preload if _import(name)]
    # Only Python's threads count. OpenBLAS, which numpy loads, ends its own before each fork.
    if (threads := threading.active_count()) > 1:
        _reply(channel, "failed", f"{threads - 1} thread(s) were started by importing {loaded}")
        os._exit(1)
    child.skip_destructors()
    child.skip_teardown(startup_modules)
    # Collect once, here. The children's collectors then don't touch the objects alive now, so
    # that their memory stays shared with this process.
    gc.collect()
    gc.freeze()
    gc.enable()
    server = _Server(channel, socket.socket(fileno=exits), owner, inbox, given, spare_detached)
    _reply(channel, "done", None)
    return partial(child.become, server.run(), startup_modules)


def _reply(channel: Channel, kind: str, value: object) -> None:
    # If the owner exited during the imports, that is no error: `run` notices it, and exits.
    with contextlib.suppress(ConnectionError):
        channel.send((kind, value))


def _import(name: str) -> bool:
    # A module that can't be imported is left to the workers: one that needs it shows the error
    # with its own traceback, and the others are not affected.
    try:
        importlib.import_module(name)
    except Exception:
        return False
    return True


class _Server:
    """The server's loop. All state belongs to the process's only thread."""

    def __init__(
        self,
        channel: Channel,
        exits: socket.socket,
        owner: int,
        inbox: SignalInbox,
        given: SignalState,
        spare_detached: bool,
    ) -> None:
        self._channel = channel
        self._exits = exits
        self._exits.setblocking(False)
        self._unsent = bytearray()  # exits that the owner's socket had no room for
        self._running: set[int] = set()
        self._sessions = {os.getsid(0)}  # this process's, and those that its children lead
        self._directories: list[str] = []
        self._stopping = False
        self._inbox = inbox
        self._given = given
        self._spare_detached = spare_detached
        self._owner_fd = _process_descriptor(owner)
        self._selector = selectors.DefaultSelector()
        for source in (channel, self._inbox, self._owner_fd):
            if source is not None:
                self._selector.register(source, selectors.EVENT_READ)
        child.adopt_orphans()

    def run(self) -> Task:
        """Loops until the owner is gone, then exits. Returns only in a child."""
        while not self._stopping:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._owner_fd in ready:
                self._stopping = True
            if self._inbox in ready:
                self._on_signals()
            if self._exits in ready:
                self._send_exits()
            if self._channel in ready and (task := self._on_request()) is not None:
                return task
        self._kill_all()
        os._exit(0)

    def _on_signals(self) -> None:
        # The owner decides about the others: it may have got them, too.
        if signal.SIGCHLD in self._inbox.take():
            for pid, status in _reap():
                if pid in self._running:
                    self._running.discard(pid)
                    self._unsent += EXIT_RECORD.pack(pid, os.waitstatus_to_exitcode(status))
            self._send_exits()

    def _send_exits(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while self._unsent:
                    del self._unsent[: self._exits.send(self._unsent)]
            except ConnectionError:
                self._unsent.clear()  # the owner is gone; `_on_request` notices
        registered = self._exits in self._selector.get_map()
        if self._unsent and not registered:
            self._selector.register(self._exits, selectors.EVENT_WRITE)
        elif registered and not self._unsent:
            self._selector.unregister(self._exits)

    def _on_request(self) -> Task | None:
        try:
            request, fds = self._channel.receive()
        except EOFError:
            self._stopping = True
            return None
        reply: tuple[Any, ...]
        try:
            match request:
                case ("spawn", task, streams, passed):
                    pid = self._fork(fds, streams, passed)
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
        # A child is in `_running` until this thread reaps it, so its pid can't be another's.
        if pid not in self._running:
            return False
        if group:
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(pid, number)
                return True
        os.kill(pid, number)
        return True

    def _fork(self, fds: list[int], streams: list[int], passed: list[int]) -> int:
        own = {self._channel.fileno(), self._exits.fileno(), self._selector.fileno(), *fds}
        own |= {*self._inbox.fds, self._owner_fd or -1}
        for target in passed:
            if target not in own and is_open(target):
                raise OSError(
                    f"descriptor {target} can't be passed on under its own number, because a "
                    "preloaded module uses it in the server; pass a copy made by os.dup"
                )
        # In the child, no signal may run a handler of the server or wake the server.
        server = os.getpid()
        with blocked():
            pid = os.fork()
            if pid == 0:
                self._become_child(server, fds, [*streams, *passed])
            else:
                self._running.add(pid)
                self._sessions.add(pid)
        if pid == 0:
            self._given.restore()
        return pid

    def _become_child(self, server: int, fds: list[int], targets: list[int]) -> None:
        try:
            self._shed_server_state(server)
            _move_descriptors(fds, targets)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # a child must never continue as a second server

    def _shed_server_state(self, server: int) -> None:
        """Drops the server's signal handlers and descriptors, in a new child."""
        child.die_with_parent(server)
        os.setsid()
        self._inbox.__exit__()
        for resource in (self._selector, self._channel, self._exits, self._inbox):
            resource.close()
        if self._owner_fd is not None:
            os.close(self._owner_fd)

    def _kill_all(self) -> None:
        """Kills all descendants, then removes the directories."""
        for pid in self._running:
            self._signal(pid, signal.SIGKILL, group=True)
        # Orphans become children of this process. Some of them clean up when their parent is
        # gone, so they get some time.
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while self._left() and time.monotonic() < deadline:
            self._reap_later()
        deadline = time.monotonic() + _KILL_SECONDS
        while (pids := self._left()) and time.monotonic() < deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self._reap_later()
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def _left(self) -> list[int]:
        """Returns the children that must not outlive this process."""
        children = _children()
        if not self._spare_detached:
            return children
        return [pid for pid in children if _session_of(pid) in self._sessions]

    def _reap_later(self) -> None:
        """Waits a moment for a signal, and reaps."""
        select.select([self._inbox], [], [], _POLL_SECONDS)
        self._inbox.take()
        _reap()


def _process_descriptor(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when the process exits; None without pidfds."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # then only the end of the connection shows it


def _reap() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(found)
    return ended


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return []  # /proc isn't mounted, or the kernel doesn't have the file: orphans stay unknown


def _session_of(pid: int) -> int:
    """Returns the session of a process, which stays its leader's process id; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _move_descriptors(fds: list[int], targets: list[int]) -> None:
    """Moves each descriptor to its target number, even if the two lists overlap."""
    lifted = []
    for fd in fds:
        lifted.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(targets) + 1))
        os.close(fd)
    for fd, target in zip(lifted, targets, strict=True):
        os.dup2(fd, target, inheritable=target < 3)
        os.close(fd)


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("the fork server needs Linux; use zrpc.launch.spawner elsewhere")
