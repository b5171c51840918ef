"""What the threads and coroutines of one worker are doing.

Calls and handlers note what is needed to tell. A call knows the threads that wait for it. A request
knows its function, and the thread or the asyncio task in which its handler began. Frames are read
for their text only: files, lines and names of functions. No name of a local variable matters,
except for the parameters of ``wait_all``, torch's and zrpc's, and of the waits for futures and for
the streams of a group: these note nothing.

A thread handles a request if the request began in it, has neither returned nor become a coroutine,
and the thread's stack still holds the function that runs handlers. That must be so before and after
the calls that the thread waits for are looked up, so no thread is shown with the request of one
moment and the call of another.

Holding a frame keeps its locals alive. If its function returns meanwhile, they are freed in the
thread that looks, as the garbage collector may free things in any thread.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import AsyncGeneratorType, CellType, FrameType
from typing import Any, TypeAlias, TypeVar

import torch

from zrpc.agent.agent import Agent
from zrpc.calls.cancel_scope import CancelScope
from zrpc.calls.execution import Execution, RequestJob
from zrpc.calls.function_names import asked_for, handler_name
from zrpc.calls.future import Future
from zrpc.calls.future_group import Arrivals, wait_all
from zrpc.calls.pending_call import PendingCall, State
from zrpc.runtime.context_thread import ContextThread
from zrpc.runtime.thread_frames import processor_time_of, thread_frames
from zrpc.services.groups.future import GroupFuture
from zrpc.services.groups.merged import Merged
from zrpc.services.inspection.snapshot import Activity, Frame
from zrpc.services.streams.consumer import Consumer
from zrpc.services.streams.service import StreamService
from zrpc.services.streams.source import Source
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

_HERE = os.path.dirname(__file__) + os.sep
_ZRPC = f"{Path(__file__).parents[2]}{os.sep}"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)

# One of these is on the stack of each thread that runs a handler.
_RUNNERS = tuple(f.__code__ for f in (Execution.__call__, Execution._await, RequestJob.__call__))
# The parameters of functions that wait for futures, and note nothing.
_PARAMETERS = {
    torch.futures.wait_all.__code__: "futures",
    wait_all.__code__: "futures",
    Future.wait.__code__: "self",
    GroupFuture.wait.__code__: "self",
    Merged._wait.__code__: "self",
    Arrivals.__next__.__code__: "self",
}
# What waits for items of streams in a task.
_FILL = Source.fill_async.__code__
_AWAIT = Future.__await__.__code__
_WAIT = getattr(getattr(asyncio.tasks, "_wait", None), "__code__", None)
_MAX_FRAMES = 1000
_MAX_COROUTINES = 1000

T = TypeVar("T")
Wakers: TypeAlias = dict[Any, list[asyncio.Task[Any]]]


def activities(agent: Agent) -> list[Activity]:
    """Returns what all threads of this process are doing, and the agent's coroutines that wait.

    Threads of other agents in this process are left out. May be called from any thread.
    """
    before = _handlers(agent)
    frames = thread_frames()
    calls = _calls_by_thread(agent)
    handlers = {
        ident: request
        for ident, request in _handlers(agent).items()
        if before.get(ident) is request
    }
    reads = _reads(agent)
    found, running = [], set()
    for thread in threading.enumerate():
        ident = thread.ident or 0
        frame = frames.pop(ident, None)
        own = isinstance(thread, ContextThread) and thread.owner is agent.context
        if frame is None or (isinstance(thread, ContextThread) and not own):
            continue
        stack = _outward(frame)
        request = handlers.get(ident)
        if request is not None and not any(each.f_code in _RUNNERS for each in stack):
            request = None
        activity = _activity(thread.name, stack, request)
        activity.own, activity.cpu = own, processor_time_of(ident)
        activity.loop = thread is agent.event_loop.thread
        futures, activity.any = _futures_waited_for(stack)
        activity.calls = _union(calls.get(ident, ()), _ids(futures, agent))
        activity.reads = reads.pop(ident, [])
        found.append(activity)
        running.add(activity.request)
    found += [each for each in _coroutines(agent) if each.request not in running]
    found += _futures_returned(agent)
    wakers = _wakers({each.get_loop() for each in reads if isinstance(each, asyncio.Task)})
    return found + [_reading(agent, each, streams, wakers) for each, streams in reads.items()]


def requests_to_begin(agent: Agent) -> list[Message]:
    """Returns the oldest of the requests whose coroutines wait for the event loop."""
    return [request for request, _ in _coming(agent)]


# -- from what calls and handlers note -------------------------------------------------------


def _handled(agent: Agent) -> list[tuple[Message, CancelScope]]:
    """Returns the requests, each with the scope that it runs in; of a batch only the first."""
    return [
        (each, each.scope if each.scope.batch is None else each.scope.batch.scope)
        for each in agent.callee.requests.all()
        if first_of_batch(each) is None
    ]


def first_of_batch(request: Message) -> tuple[MemberId, int] | None:
    """Returns the caller and the number of the call that a request runs with, if it is another."""
    batch = request.scope.batch
    if batch is None or (batch.sender, batch.call_id) == (request.sender, request.call_id):
        return None
    return batch.sender, batch.call_id


def _handlers(agent: Agent) -> dict[int, Message]:
    """Returns the request that each thread handles, or has handed over to a coroutine, by ident.

    A thread handles one at a time: the latest that is not answered.
    """
    found = {}
    for request, scope in _handled(agent):
        task = scope.task
        if task is not None:
            loop = agent.event_loop.thread
            if loop is not None and asyncio.current_task(task.get_loop()) is task:
                found[loop.ident or 0] = request
        elif scope.in_steps or not (scope.deferred or inspect.iscoroutinefunction(scope.function)):
            found[scope.thread] = request
    found.pop(0, None)  # not begun
    return found


def _reads(agent: Agent) -> dict[Any, list[int]]:
    """Returns the streams that are read by no handler: by the ident of a thread, or by the task."""
    found: defaultdict[Any, list[int]] = defaultdict(list)
    for number, reader in agent.service(StreamService).readers().items():
        if not isinstance(reader, CancelScope):
            found[reader if isinstance(reader, int) else reader()].append(number)
    return found


def _reading(agent: Agent, task: Any, streams: list[int], wakers: Wakers) -> Activity:
    """Describes a task of the program's own that reads streams; or a thread that has ended."""
    if not isinstance(task, asyncio.Task) or task.done():
        return Activity("what has ended", [])
    activity = _of_coroutine(agent, task.get_coro(), task, None, wakers)
    activity.reads = streams
    return activity


def _calls_by_thread(agent: Agent) -> dict[int, list[int]]:
    """Returns the ids of the calls that each thread waits for, or waits to send, by its ident."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for call in agent.caller.calls.in_flight():
        for ident in waiters_of(call):
            found[ident].append(call.call_id)
    return found


def waiters_of(call: PendingCall) -> tuple[int, ...]:
    """Returns the threads that wait for a call, or wait to send it, by ident."""
    if call.state is State.QUEUED and call.room is not None and call.room.thread:
        return (*call.waiters, call.room.thread)
    return call.waiters


def _coroutines(agent: Agent) -> list[Activity]:
    """Returns the handlers that are coroutines, and wait or are still to begin."""
    coroutines: dict[int, tuple[Message, Any, Any]] = {
        id(request): (request, each, None) for request, each in _coming(agent)
    }
    for request, scope in _handled(agent):
        task = scope.task
        if task is not None and not task.done():
            coroutines[id(request)] = (request, task.get_coro(), task)
    found = []
    wakers = _wakers({task.get_loop() for *_, task in coroutines.values() if task is not None})
    for request, coroutine, task in coroutines.values():
        found.append(_of_coroutine(agent, coroutine, task, request, wakers))
        found[-1].task = True
    return found


def _futures_returned(agent: Agent) -> list[Activity]:
    """Returns what the handlers wait for that have returned a future of other calls."""
    found = []
    for request, scope in _handled(agent):
        returned = scope.returned
        if returned is not None and (calls := _ids([returned()], agent)):
            found.append(_activity("a future", [], request))
            found[-1].calls = calls
    return found


def _of_coroutine(
    agent: Agent, coroutine: Any, task: Any, request: Message | None, wakers: Wakers
) -> Activity:
    """Describes a coroutine that waits."""
    chain = _await_chain(coroutine)
    frames = [each for each in map(_frame_of, reversed(chain)) if each is not None]
    activity = _activity("a coroutine", frames, request)
    awaited, activity.any = _awaited(chain, task, wakers)
    activity.calls = _ids(awaited, agent)
    return activity


def _coming(agent: Agent) -> list[tuple[Message, Any]]:
    """Returns the requests whose coroutines wait for the event loop, with these coroutines."""
    coming = agent.event_loop.coming()[:_MAX_COROUTINES]
    held = [(execution.request, each) for each in coming for execution in _held_by(each, Execution)]
    known = agent.callee.requests
    return [(r, each) for r, each in held if known.get(r.sender, r.call_id) is r]


def _ids(futures: Iterable[Any], agent: Agent) -> list[int]:
    """Returns the numbers of the outstanding calls of an agent that futures stand for."""
    known = agent.caller.calls
    calls = [call for each in futures for call in _calls_of(each)]
    return [call.call_id for call in calls if known.get(call.call_id) is call]


def _calls_of(each: Any) -> list[PendingCall]:
    """Returns the outstanding calls that a future, or what waits for several, stands for.

    The latter is a reader of streams, or `zrpc.as_completed`.
    """
    if isinstance(each, Arrivals):
        futures = [_calls_of(future) for future in list(each.pending)]
        # A future that stands for no call may be done at any time, and is enough to go on.
        return [call for calls in futures for call in calls] if all(futures) else []
    several = isinstance(each, (Consumer, Merged))
    found = each.calls if several else [source._call for source in _sources(each)]
    return [call for call in found if call is not None and not call.settled]


def _sources(future: Any) -> list[Future[Any]]:
    """Returns the futures of calls that a future depends on: its own call, or those of others."""
    found: list[Future[Any]] = []
    left = [future]
    while left and len(found) < _MAX_FRAMES:
        each = left.pop()
        if isinstance(each, Future):
            found.append(each)
            left.append(each._source())
            left += getattr(each, "parts", ())
            left.append(getattr(each, "given", None))
    return found


def _activity(name: str, stack: Sequence[FrameType], request: Message | None) -> Activity:
    """Describes a thread or a coroutine by its stack, the innermost frame first."""
    frames = [
        Frame(each.f_code.co_filename, each.f_lineno, each.f_code.co_qualname)
        for each in reversed(stack)
    ]
    where = next((each for each in reversed(frames) if _is_users(each.file)), None)
    activity = Activity(name, frames, where)
    if request is not None:
        activity.request = (request.sender, request.call_id)
        activity.what = asked_for(handler_name(request), request.kind)
    return activity


# -- from frames -----------------------------------------------------------------------------


def _outward(frame: FrameType | None) -> list[FrameType]:
    """Returns the stack from a frame outward, without the frames of this room."""
    stack: list[FrameType] = []
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if not frame.f_code.co_filename.startswith(_HERE):
            stack.append(frame)
        frame = frame.f_back
    return stack


def _is_users(file: str) -> bool:
    """Returns whether a file is neither zrpc's, nor torch's, nor Python's own."""
    if file.startswith((_ZRPC, _TORCH, "<frozen")):
        return False
    return not file.startswith(_STDLIB) or any(part in file for part in _PACKAGES)


def _futures_waited_for(stack: Sequence[FrameType]) -> tuple[list[Any], bool]:
    """Returns the futures that a thread waits for, and whether one of them is enough."""
    found: list[Any] = []
    for frame in stack:
        if (name := _PARAMETERS.get(frame.f_code)) is not None:
            each = frame.f_locals.get(name)
            found += each if isinstance(each, (list, tuple)) else [each]
        if _is_users(frame.f_code.co_filename):
            break
    return found, any(isinstance(each, (Arrivals, Merged)) for each in found)


def _union(*numbers: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(number for each in numbers for number in each))


# -- from coroutines -------------------------------------------------------------------------


def _await_chain(coroutine: Any) -> list[Any]:
    """Returns a suspended coroutine and what it awaits, the innermost coroutine last."""
    chain: list[Any] = []
    while coroutine is not None and _frame_of(coroutine) is not None and len(chain) < _MAX_FRAMES:
        chain.append(coroutine)
        inner = [
            getattr(coroutine, name, None) for name in ("cr_await", "ag_await", "gi_yieldfrom")
        ]
        coroutine = next((each for each in inner if each is not None), None)
        if type(coroutine).__name__.startswith("async_generator_"):  # a step of one
            coroutine = next(iter(_held_by(coroutine, AsyncGeneratorType)), None)
    return chain


def _frame_of(coroutine: Any) -> FrameType | None:
    frames = (getattr(coroutine, name, None) for name in ("cr_frame", "ag_frame", "gi_frame"))
    return next((frame for frame in frames if frame is not None), None)


def _awaited(
    chain: Sequence[Any], task: asyncio.Task[Any] | None, wakers: Wakers
) -> tuple[list[Any], bool]:
    """Returns the futures and streams that a task awaits, and whether one of them is enough.

    It may await them by tasks of its own, in ``asyncio.gather`` or a ``TaskGroup``, for example.
    """
    sources = [
        source
        for each in chain
        if getattr(each, "cr_code", None) is _FILL
        for source in _held_by(each, (Consumer, Merged))
    ]
    # If the innermost coroutine awaits a future of zrpc.
    awaits = bool(chain) and getattr(chain[-1], "gi_code", None) is _AWAIT
    futures = _held_by(chain[-1], Future) if awaits else []
    if futures or sources:
        return [*futures, *sources], bool(sources)
    found: list[Any] = []
    one_is_enough = _is_for_first(chain)
    for other in wakers.get(getattr(task, "_fut_waiter", None), ()):
        awaited, any_of_these = _awaited(_await_chain(other.get_coro()), other, wakers)
        if one_is_enough and not any(map(_calls_of, awaited)):
            return [], False  # this one may be done at any time
        found += awaited
        one_is_enough = one_is_enough or any_of_these
    return found, one_is_enough


def _is_for_first(chain: Sequence[Any]) -> bool:
    """Returns whether a coroutine is in an ``asyncio.wait`` that ends before all tasks have."""
    if not chain or _WAIT is None or getattr(chain[-1], "cr_code", None) is not _WAIT:
        return False
    held = (each for cell in _held_by(chain[-1], CellType) for each in gc.get_referents(cell))
    return not any(each is asyncio.ALL_COMPLETED for each in held)


def _wakers(loops: Iterable[asyncio.AbstractEventLoop]) -> Wakers:
    """Returns the tasks of event loops, by the futures that are done at their end."""
    found: Wakers = defaultdict(list)
    for task in [each for loop in loops for each in asyncio.all_tasks(loop)]:
        left: list[Any] = [task]
        while left:
            each = left.pop()
            if task not in found[each]:
                found[each].append(task)
                for callback, _ in getattr(each, "_callbacks", None) or ():
                    left += _completed_by(callback)
    return found


def _completed_by(callback: Any) -> Iterable[asyncio.Future[Any]]:
    """Returns the futures that asyncio completes in the callback of a task, or of a future.

    ``gather``, ``wait`` and ``shield`` have closures, a ``TaskGroup`` has a method, and
    ``wait_for`` of Python 3.11 a ``partial``.
    """
    function = getattr(callback, "func", callback)
    if not str(getattr(function, "__module__", "")).startswith("asyncio."):
        return ()
    cells = getattr(function, "__closure__", None) or ()
    held = [each for cell in cells for each in gc.get_referents(cell)]
    held += getattr(callback, "args", ())
    held.append(getattr(getattr(function, "__self__", None), "_on_completed_fut", None))
    futures = [each for each in held if isinstance(each, asyncio.Future)]
    return [each for each in futures if not isinstance(each, asyncio.Task)]


def _held_by(coroutine: Any, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """Returns the objects of a type that a suspended coroutine's own frame refers to."""
    return [each for each in gc.get_referents(coroutine) if isinstance(each, kind)]
