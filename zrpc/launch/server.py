"""The fork server's own process: a single thread that forks, reaps and reports.

It starts as ``python -c``, imports the modules to preload, then answers its owner's requests until
the owner closes the connection or dies. A child that is forked is a copy of this process; in the
child, `serve` returns, so that the child's program runs at the bottom of the stack and the
interpreter exits in its normal way.

The requests after the first:

    ("spawn", task, targets)           fds: one for each target, its number in the child
    ("signal", pid, number, group)
    ("directory",)
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import importlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zrpc.launch import child
from zrpc.launch.channel import EXIT_RECORD, EXITS_BYTES, Channel
from zrpc.launch.descriptors import is_open, move_descriptors, readable
from zrpc.launch.interpreter import python_command
from zrpc.launch.short_directory import short_directory
from zrpc.launch.signals import FORWARDED, STOPS, SignalInbox, SignalState, blocked, receive_signals
from zrpc.launch.task import Task

_ORPHAN_SECONDS = 1.0  # for orphans to exit, such as multiprocessing's resource tracker
_KILL_SECONDS = 5.0  # for killed processes to exit
_POLL_SECONDS = 0.02
_RESEND_SECONDS = 0.05  # until exits that found no room are sent again
# The others do nothing to the server. A supervisor that sends them to all processes sends them to
# the owner, too, which gives the workers time to stop.
_COLLECTED = STOPS | FORWARDED | {signal.SIGCHLD}
_Program = Callable[[], None]
_LOAD_TASK = """\
from zrpc.launch.child import load_task
from zrpc.launch.signals import SignalState
load_task({}, {}, {}, startup_modules, {})()
"""


def serve(requests: int, exits: int, owner: int, startup_modules: Collection[str]) -> _Program:
    """Answers requests until the owner is gone; then exits. Returns, in a child, its program.

    The first two are descriptors of sockets, and ``owner`` is the owner's process id. A fresh
    interpreter has the startup modules. The first request says whether to fork children, which
    modules to import before, which state of signals children get, and whether processes that have
    left the sessions of the children outlive the server.

    A process with several threads can't be forked safely: another thread may hold a lock, which
    nobody releases in the child. If a tool has started one, each child is a new interpreter. So it
    is if a module has used CUDA while it was imported: no child of such a process can use it.
    """
    inbox = SignalInbox(_COLLECTED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    inbox.__enter__()
    receive_signals()  # the owner has blocked them, so that none comes before the handlers
    channel = Channel(socket.socket(fileno=requests))
    try:
        (forks, preload, given, spare_detached), _ = channel.receive()
    except EOFError:
        sys.exit()  # the owner is gone already
    obstacle = _get_ready_to_fork(preload, startup_modules) if forks else ""
    exits_socket = socket.socket(fileno=exits)
    forks = forks and not obstacle
    exits_socket.setblocking(False)
    server = _Server(
        channel, exits_socket, _process_descriptor(owner), inbox, given, spare_detached, forks
    )
    with contextlib.suppress(ConnectionError):  # the owner is gone: `run` notices it, and exits
        channel.send(("done", obstacle))
    return partial(child.become, server.run(), startup_modules)


def _get_ready_to_fork(preload: Sequence[str], startup_modules: Collection[str]) -> str:
    """Imports modules, unless other threads run. Returns why this can't be forked, or nothing."""
    # While torch is imported, the collector would pass over its objects again and again: for 6 % of
    # the import's processor time, and for a sixth if torch._dynamo is imported, too.
    gc.disable()
    if not (threads := _other_threads()):
        for name in preload:
            # One that can't be imported is left to the workers: one that needs it shows the error
            # with its own traceback, and the others are not affected.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        threads = _other_threads()
    if threads:
        obstacle = f"something starts threads in each interpreter ({', '.join(threads)})"
    else:
        obstacle = _used_device()
    child.skip_destructors()
    child.skip_teardown(startup_modules)
    # Collect once, here. The children's collectors then don't touch the objects alive now, so
    # that their memory stays shared with this process.
    gc.collect()
    gc.freeze()
    gc.enable()
    return obstacle


def _used_device() -> str:
    """Returns why forked children couldn't use the accelerator, as torch sees it; or nothing."""
    torch: Any = sys.modules.get("torch")
    device = torch and torch.accelerator.current_accelerator()  # one that this torch is built for
    if not device:
        return ""
    in_bad_fork = getattr(torch.get_device_module(device), "_is_in_bad_fork", bool)
    if (pid := os.fork()) == 0:  # only a child can tell
        try:
            os._exit(bool(in_bad_fork()))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)  # it exits at once
    return f"something uses {device.type} while modules are imported" if status else ""


def _other_threads() -> list[str]:
    """Returns the names of the threads besides this one.

    Once numpy or torch is loaded, only Python's count: OpenBLAS, which numpy loads, ends its own
    before each fork.
    """
    names = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    count = max(1 + _thread._count(), len(sys._current_frames()))
    if not {"numpy", "torch"} & sys.modules.keys():
        with contextlib.suppress(OSError):  # /proc isn't mounted
            count = max(count, len(os.listdir("/proc/self/task")))
    if (unnamed := count - 1 - len(names)) > 0:
        names.append(f"{unnamed} without a name")
    return names


@dataclass(eq=False)
class _Server:
    """The server's loop. All state belongs to the process's only thread."""

    _channel: Channel
    _exits: socket.socket
    _owner_fd: int | None
    _inbox: SignalInbox
    _given: SignalState
    _spare_detached: bool
    _forks: bool  # or else it starts interpreters
    _unsent: bytearray = field(default_factory=bytearray)  # exits that didn't fit into the socket
    _running: set[int] = field(default_factory=set)
    # This process's, and those that its children lead.
    _sessions: set[int] = field(default_factory=lambda: {os.getsid(0)})
    _directories: list[str] = field(default_factory=list)
    _own_directory: str = ""  # one of them that no owner knows, and may remove
    _selector: selectors.EpollSelector = field(default_factory=selectors.EpollSelector)

    def run(self) -> Task:
        """Loops until the owner is gone, then exits. Returns only in a child."""
        child.adopt_orphans()
        for source in (self._channel, self._inbox, self._owner_fd):
            if source is not None:
                self._selector.register(source, selectors.EVENT_READ)
        with contextlib.suppress(EOFError):
            while True:
                seconds = _RESEND_SECONDS if self._unsent else None
                ready = {key.fileobj for key, _ in self._selector.select(seconds)}
                if self._owner_fd in ready:
                    break
                # The owner decides about other signals: it may have got them, too.
                if self._inbox in ready and signal.SIGCHLD in self._inbox.take():
                    self._reap_children()
                self._send_exits()
                if self._channel in ready and (task := self._on_request()) is not None:
                    return task
        self._kill_all()
        os._exit(0)

    def _reap_children(self) -> None:
        for pid, status in _reap():
            if pid in self._running:
                self._running.discard(pid)
                self._unsent += EXIT_RECORD.pack(pid, os.waitstatus_to_exitcode(status))

    def _send_exits(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._exits.send(self._unsent[:EXITS_BYTES])]
        except BlockingIOError:
            pass  # there is no room; `run` tries again
        except ConnectionError:
            self._unsent.clear()  # the owner is gone; `run` notices

    def _on_request(self) -> Task | None:
        request, fds = self._channel.receive()
        reply: tuple[Any, ...]
        try:
            match request:
                case ("spawn", task, targets):
                    assert isinstance(task, Task)
                    if not self._forks:
                        pid = self._start_interpreter(task, fds, targets)
                    elif (pid := self._fork(fds, targets)) == 0:
                        return task
                    self._running.add(pid)
                    self._sessions.add(pid)
                    reply = ("done", pid)
                case ("signal", pid, number, group):
                    reply = ("done", self._signal(pid, number, group))
                case ("directory",):
                    reply = ("done", self._make_directory())
                case _:
                    reply = ("failed", f"unknown request {request!r}")
        except OSError as error:
            reply = ("failed", str(error))
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ConnectionError):
            self._channel.send(reply)
        return None

    def _make_directory(self) -> str:
        self._directories.append(short_directory())
        return self._directories[-1]

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

    def _fork(self, fds: list[int], targets: list[int]) -> int:
        own = {self._channel.fileno(), self._exits.fileno(), self._selector.fileno(), *fds}
        own |= {*self._inbox.fds, self._owner_fd or -1}
        for target in targets:
            if target > 2 and target not in own and is_open(target):
                raise OSError(
                    f"descriptor {target} can't be passed on under its own number, because a "
                    "preloaded module uses it in the server; pass a copy made by os.dup"
                )
        # In the child, no signal may run a handler of the server or wake the server.
        server = os.getpid()
        with blocked():
            pid = os.fork()
            if pid == 0:
                self._become_child(server, fds, targets)
        if pid == 0:
            self._given.restore()
        return pid

    def _start_interpreter(self, task: Task, fds: list[int], targets: list[int]) -> int:
        """Starts a child that shares nothing with this process."""
        given = dict(zip(targets, fds, strict=True))
        moved = {fd: target for target, fd in given.items() if target > 2}
        self._own_directory = self._own_directory or self._make_directory()
        with tempfile.TemporaryFile(dir=self._own_directory) as file:
            pickle.dump(task, file)
            file.seek(0)
            code = _LOAD_TASK.format(file.fileno(), os.getpid(), moved, self._given)
            process = subprocess.Popen(
                python_command(code),
                stdin=given.get(0),
                stdout=given.get(1),
                stderr=given.get(2),
                cwd=task.cwd,
                env=task.env,
                pass_fds=[file.fileno(), *moved],
                start_new_session=True,
            )
        process.returncode = 0  # or Python would reap it some time
        return process.pid

    def _become_child(self, server: int, fds: list[int], targets: list[int]) -> None:
        try:
            child.die_with_parent(server)
            os.setsid()
            self._inbox.__exit__()
            for resource in (self._selector, self._channel, self._exits):
                resource.close()
            if self._owner_fd is not None:
                os.close(self._owner_fd)
            move_descriptors(fds, targets)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # a child must never continue as a second server

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
        readable(self._inbox.fileno(), timeout=_POLL_SECONDS)
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
