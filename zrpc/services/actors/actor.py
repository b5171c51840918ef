"""An actor at its owner: its mailbox, and what takes the outcomes of its calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from zrpc.actors import ActorLabel, ActorOptions
from zrpc.agent.agent import Agent
from zrpc.calls.cancel_scope import current_scope
from zrpc.calls.result_sink import Called, ResultSink, SinkBefore
from zrpc.functions import DEFERRAL, Deferral
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.thread_pool import end_with
from zrpc.services.actors.mailbox import Mailbox
from zrpc.services.actors.order import mailbox_is_full, was_stopped
from zrpc.wire.message import Message


@dataclass(slots=True, eq=False)
class ActorSink(SinkBefore[ResultSink]):
    """Passes outcomes on, and then lets the next calls of the actor begin.

    An answer is packed before that: the next call may change what it refers to. The scope of a
    request has the mailbox of its actor.
    """

    def hand_over(self, request: Message, first: ResultSink, mark: Deferral, call: Called) -> None:
        """Gives a call of a marked function to a service, which gives the outcome later.

        From then on the call doesn't count as one that runs: the next one may begin.
        """
        self._sink.hand_over(request, first, mark, call)
        mailbox = request.scope.mailbox
        mailbox.do(mailbox.end(request.scope))

    def answer(self, request: Message, value: object) -> None:
        """Takes the result of a call."""
        try:
            self._sink.answer(request, value)
        finally:
            mailbox = request.scope.mailbox
            if steps := mailbox.end(request.scope):
                try:
                    end_with(partial(mailbox.do, steps))
                except Exception:  # no memory for its frame: nothing was done
                    mailbox.do(steps)

    def fail(self, request: Message, error: BaseException, report: bool = True) -> None:
        """Takes the error of a call."""
        try:
            self._sink.fail(request, error, report)
        finally:
            mailbox = request.scope.mailbox
            end_with(partial(mailbox.do, mailbox.end(request.scope)))


def in_turn(mailbox: Mailbox, request: Message, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method which lets the next call begin as its own begins.

    A coroutine does that in its event loop: the others can't overtake it on their way there. A
    method whose calls are handed over has begun at that.
    """
    if hasattr(method, DEFERRAL):
        mailbox.do(mailbox.on_begun(request.scope))
        return method

    @functools.wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        mailbox.do(mailbox.on_begun(request.scope))
        return method(*args, **kwargs)

    @functools.wraps(method)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        mailbox.do(mailbox.on_begun(request.scope))
        return await method(*args, **kwargs)

    function: Any = method
    if not isinstance(method, (FunctionType, MethodType)):
        function = inspect.getattr_static(type(method), "__call__", method)
    return coroutine if inspect.iscoroutinefunction(function) else plain


def make_mailbox(agent: Agent, options: ActorOptions, name: str, busy: set[Mailbox]) -> Mailbox:
    """Returns the mailbox of an actor that this worker owns, which may have a name."""
    limit, title = agent.options.max_bytes_in_flight, str(ActorLabel(options.title, name))
    full = partial(mailbox_is_full, title, agent.worker_info.name, limit)
    return Mailbox(title, options.concurrency, options.beside, limit, full, busy)


def stop_within(mailbox: Mailbox | None, owner: WorkerInfo) -> bool:
    """Refuses what waits for an actor, if one of its own calls is about to stop it.

    That call can't wait for the end, which comes after its own.

    Returns:
        Whether it is one of its own.
    """
    scope = current_scope()
    if mailbox is None or scope is None or scope.mailbox is not mailbox:
        return False
    by = f"{owner.name} (rank {owner.rank})"
    mailbox.do(mailbox.stop(was_stopped(mailbox.title, owner.name, by)))
    return True
