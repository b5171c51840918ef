"""A worker's pdb: at a breakpoint of the program, or where an error was raised."""

from __future__ import annotations

import bdb
import os
import pdb
import sys
import threading
import traceback
from contextlib import ExitStack
from types import FrameType
from typing import Any

from typing_extensions import override

from zrpc.agent.current import find_agent
from zrpc.constants import Seconds
from zrpc.errors import RemoteError
from zrpc.options import checked_timeout
from zrpc.runtime.forks import free_in_child
from zrpc.runtime.thread_pool import waiting
from zrpc.services.debugger.prompt import Prompt
from zrpc.services.debugger.service import DebuggerService

# Held by the thread of this process that is at a prompt; the others wait for their turn.
_turn = free_in_child(threading.Lock())
_PACKAGE = __name__.partition(".")[0]


def breakpoint(timeout: Seconds = 0) -> None:
    """Stops here, and opens pdb at the terminal of ``zrpc launch`` or ``zrpc debug``.

    All threads of this worker but the present one keep running, and so do the other workers. Until
    the program goes on, no deadline of a call passes in the whole mesh. In an ``async def``
    function, the worker's event loop waits.

    If several workers stop, the launcher's terminal serves one after the other. Without a terminal
    the worker's standard error says how to attach; outside a mesh the program then goes on.

    Any thread may call it. Commands are pdb's: ``c`` goes on, ``q`` raises ``bdb.BdbQuit`` here.

    Args:
        timeout: for how many seconds to wait until somebody attaches; 0 means no limit. The
            launcher's terminal needs no attaching.

    Example:
        >>> def handler(batch):
        ...     breakpoint()
        ...     return batch.mean()
    """
    timeout = checked_timeout("timeout", timeout)
    frame = sys._getframe(1)
    current = getattr(sys.gettrace(), "__self__", None)
    if isinstance(current, _Debugger):  # it is at the prompt already, and was told to step
        sys.settrace(None)  # or it would stop in its own code
        current.set_trace(frame)
        return
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    where = f"stands at a breakpoint, {frame.f_code.co_filename}:{frame.f_lineno} in {function}"
    debugger = _Debugger.connected(where, timeout)
    if debugger is not None:
        debugger.set_trace(frame)


def post_mortem(error: BaseException) -> None:
    """Opens pdb where an error was raised, if that was in this worker."""
    wanted = isinstance(error, Exception) and not isinstance(error, bdb.BdbQuit)
    if not wanted or isinstance(error, RemoteError) or isinstance(error.__cause__, RemoteError):
        return  # that worker has had its prompt
    steps = traceback.extract_tb(error.__traceback__)
    if not steps:
        return
    where = f"has raised {type(error).__name__}, {steps[-1].filename}:{steps[-1].lineno}"
    debugger = _Debugger.connected(f"{where} in {steps[-1].name}", 0)
    if debugger is not None:
        debugger.explore(error)


def _prompt(timeout: float, where: str, service: DebuggerService | None) -> Prompt:
    if service is None:
        rank = os.environ.get("RANK", "?")
        return Prompt(f"rank {rank}, pid {os.getpid()},", where, "", None, timeout)
    info = service.agent.worker_info
    who = f"{info.name} (rank {info.id}), pid {os.getpid()},"
    return Prompt(who, where, str(info.id), service.directory, timeout)


class _Debugger(pdb.Pdb):
    """One session at a prompt, in one thread: until it goes on, or the program's frames end."""

    @classmethod
    def connected(cls, where: str, timeout: float) -> _Debugger | None:
        """Waits for a terminal; returns None if there is none."""
        with waiting():
            _turn.acquire()
        with ExitStack() as session:
            session.callback(_turn.release)
            agent = find_agent()
            services = agent.services if agent is not None else ()
            service = next((s for s in services if isinstance(s, DebuggerService)), None)
            prompt = _prompt(timeout, where, service)
            session.callback(prompt.close)
            if service is not None:
                session.enter_context(service.standing(prompt.release))
            if prompt.connect():
                return cls(prompt, session.pop_all())
        return None

    def __init__(self, prompt: Prompt, session: ExitStack) -> None:
        terminal: Any = prompt
        skip = [_PACKAGE, f"{_PACKAGE}.*"]
        super().__init__(stdin=terminal, stdout=terminal, skip=skip, nosigint=True)
        self._session = session
        # The outermost frame of the program: the session ends with it.
        self._base: FrameType | None = None

    @override
    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        base = frame
        while base is not None and (outer := base.f_back) is not None:
            if str(outer.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
                break
            base = outer
        self._base = base
        super().set_trace(frame, **options)

    def set_stepinstr(self) -> None:
        # By it `set_trace` of Python 3.13 and newer stops within the line of the call. Older ones
        # stop at the next line, and so does this debugger on all of them.
        self.set_step()

    def explore(self, error: BaseException) -> None:
        """Opens the prompt where the error was raised."""
        try:
            self.message("".join(traceback.format_exception_only(type(error), error)).rstrip())
            self.reset()
            self.interaction(None, error.__traceback__)
        finally:
            self._end()

    @override
    def interaction(self, frame: FrameType | None, trace: Any, *rest: Any) -> None:
        try:
            super().interaction(frame, trace, *rest)
        except BaseException:  # Ctrl-C in the main thread
            self._end()
            raise

    @override
    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's own would go on after a Ctrl-C, the launcher's way to stop

    @override
    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self._end()

    @override
    def set_quit(self) -> None:
        super().set_quit()
        self._end()

    @override
    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        result = super().dispatch_return(frame, arg)
        if frame is self._base:
            self._end()
        return result

    def _end(self) -> None:
        self._base = None
        sys.settrace(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # or they would keep this debugger, and it their variables
            frame.f_trace = None
            frame = frame.f_back
        self._session.close()
