"""What the threads and coroutines of one worker do, read from their frames.

Nothing is noted down while calls are made: who waits for which call, and for which caller a
handler runs, is in the local variables of zrpc's own functions on the stacks.

To look at a frame is to hold what it refers to. Where its function returns meanwhile, that is
dropped here, in the thread that looks; as the garbage collector may drop things anywhere.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from zrpc.agent import Agent
from zrpc.calls import PendingCall
from zrpc.context_thread import ContextThread
from zrpc.execution import Execution
from zrpc.futures import Future
from zrpc.inspection.snapshot import Frame
from zrpc.wire.header import Message

__all__ = ["Activity", "activities", "of_coroutines", "users_frame"]

_HERE = os.path.dirname(__file__) + os.sep
_ZRPC = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)

_EXECUTIONS = (Execution.__call__.__code__, Execution._await.__code__)
_WAIT_ALL = torch.futures.wait_all.__code__
_AWAIT = Future.__await__.__code__
# Deeper is not looked.
_MOST_FRAMES = 1000


@dataclass(slots=True)
class Activity:
    """A thread, or a coroutine that waits.

    Attributes:
        name: of the thread, or of the handler's coroutine.
        frames: its stack, the innermost call last.
        own: whether it belongs to the agent; not so the main thread.
        task: whether it is a coroutine.
        loop: whether it is the thread of the agent's event loop.
        ident: the thread's; 0 for a coroutine.
        calls: those of the agent that it waits for.
        request: for which it does what it does.
        function: the handler's name, where it runs for a request.
    """

    name: str
    frames: list[Frame]
    own: bool
    task: bool = False
    loop: bool = False
    ident: int = 0
    calls: list[PendingCall] = field(default_factory=list)
    request: Message | None = None
    function: str = ""


def activities(agent: Agent) -> list[Activity]:
    """All threads of this process save those of other agents, and the agent's coroutines.

    May be called from any thread.
    """
    accepted = {id(request) for request in agent.callee.requests.all()}
    frames = sys._current_frames()
    found = []
    for thread in threading.enumerate():
        frame = frames.pop(thread.ident or 0, None)
        own = isinstance(thread, ContextThread) and thread.owner is agent.context
        if frame is None or (isinstance(thread, ContextThread) and not own):
            continue
        activity = _read(_outward(frame), agent, accepted)
        activity.name, activity.own, activity.ident = thread.name, own, thread.ident or 0
        activity.loop = thread is agent.event_loop.thread
        found.append(activity)
    found += _all_coroutines(agent, {id(a.request) for a in found if a.request})
    return found


def users_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame that is neither zrpc's, nor torch's, nor Python's own."""
    for frame in reversed(list(frames)):
        if _is_users(frame.file):
            return frame
    return None


def _is_users(file: str) -> bool:
    if file.startswith((_ZRPC, _TORCH, "<frozen")):
        return False
    return not file.startswith(_STDLIB) or any(part in file for part in _PACKAGES)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        if not frame.f_code.co_filename.startswith(_HERE):  # how we look is nobody's business
            yield frame
        frame = frame.f_back


def _read(frames: Iterable[FrameType], agent: Agent, accepted: set[int]) -> Activity:
    """What the frames tell, the innermost first."""
    activity = Activity("", [], own=True)
    waiting = True  # until a frame is of those who wait
    for frame in frames:
        code = frame.f_code
        activity.frames.append(Frame(code.co_filename, frame.f_lineno, _name(code)))
        if waiting:
            activity.calls = _calls_in(frame, agent)
            waiting = not activity.calls and not _is_users(code.co_filename)
        if activity.request is None and code.co_filename.startswith(_ZRPC):
            request, function = _request_in(frame)
            if request is not None and id(request) in accepted:
                activity.request, activity.function = request, function
    activity.frames.reverse()
    return activity


def _name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.10 has none


def _calls_in(frame: FrameType, agent: Agent) -> list[PendingCall]:
    """The calls of the agent that a frame waits for."""
    code = frame.f_code
    if code is _WAIT_ALL or code is _AWAIT:
        local = frame.f_locals
        return _calls_of(local.get("futures", [local.get("self")]), agent)
    if not code.co_filename.startswith(_ZRPC):
        return []
    if "call" in code.co_varnames:
        found = [frame.f_locals.get("call")]
    elif code.co_varnames[:1] == ("self",) and code.co_filename.endswith("calls.py"):
        found = [frame.f_locals.get("self")]
    else:
        return []
    return [c for c in found if isinstance(c, PendingCall) and _waits(c, agent)]


def _calls_of(futures: Any, agent: Agent) -> list[PendingCall]:
    try:
        calls = [future._call for future in futures if isinstance(future, Future)]
    except TypeError:  # what wait_all was given can be read only once
        return []
    return [call for call in calls if call is not None and _waits(call, agent)]


def _waits(call: PendingCall, agent: Agent) -> bool:
    return not call.settled and call.is_of(agent.caller.calls)


def _request_in(frame: FrameType) -> tuple[Message | None, str]:
    """The request for which a frame of zrpc's runs, and the handler's name."""
    code = frame.f_code
    if code in _EXECUTIONS:
        local = frame.f_locals
        function = local.get("function")
        return local["self"].request, getattr(function, "__qualname__", "")
    if "request" in code.co_varnames:
        request = frame.f_locals.get("request")
        return (request if isinstance(request, Message) else None), ""
    return None, ""


def _all_coroutines(agent: Agent, running: set[int]) -> list[Activity]:
    """The handlers that are coroutines and wait, or are still to begin."""
    tasks, coming = agent.event_loop.under_way()
    tasks = [task for task in tasks if not task.done()]
    waiting = of_coroutines(agent, [task.get_coro() for task in tasks])
    for activity, task in zip(waiting, tasks, strict=True):
        activity.calls = activity.calls or _calls_of_children(task, agent)
    found = waiting + of_coroutines(agent, coming)
    return [a for a in found if a.request is not None and id(a.request) not in running]


def of_coroutines(agent: Agent, coroutines: Iterable[Any]) -> list[Activity]:
    """What some handlers do that are coroutines and do not run just now."""
    accepted = {id(request) for request in agent.callee.requests.all()}
    found = []
    for coroutine in coroutines:
        activity = _read(reversed(_chain(coroutine)), agent, accepted)
        activity.task, activity.name = True, "a coroutine"
        found.append(activity)
    return found


def _chain(coroutine: Any) -> list[FrameType]:
    """The frames of a coroutine that is suspended, the innermost last."""
    frames: list[FrameType] = []
    while coroutine is not None and len(frames) < _MOST_FRAMES:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            break
        frames.append(frame)
        inner = getattr(coroutine, "cr_await", None)
        coroutine = inner if inner is not None else getattr(coroutine, "gi_yieldfrom", None)
    return frames


def _calls_of_children(task: asyncio.Task[Any], agent: Agent) -> list[PendingCall]:
    """The calls for which a task waits by ``asyncio.gather``."""
    children = getattr(getattr(task, "_fut_waiter", None), "_children", [])
    calls = []
    for child in children:
        if isinstance(child, asyncio.Task):
            for frame in reversed(_chain(child.get_coro())):
                if found := _calls_in(frame, agent):
                    calls += found
                    break
    return calls
