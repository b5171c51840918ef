"""Answers the requests for copies of values (`RRef.to_here`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zrpc.agent.agent import Agent
from zrpc.calls.callee import UNCALLED
from zrpc.calls.execution import RequestJob
from zrpc.errors import was_not_executed
from zrpc.runtime.thread_pool import end_with
from zrpc.services.rref.value import OwnedValue
from zrpc.wire.message import Message


def fetch(
    agent: Agent, request: Message, value: OwnedValue, turn: Sequence[tuple[int, int]]
) -> None:
    """Answers a request for a copy of a value that is there: if it is an actor's, in its turn."""
    mailbox, callee = value.mailbox, agent.callee
    fail = callee.fail if mailbox is None else mailbox.sink.fail
    work = partial(_answer if mailbox is None else _answer_in_turn, agent, value)
    begin = partial(agent.receiver.run, RequestJob(request, fail, work))
    if mailbox is None:
        begin()
        return
    request.scope.mailbox = mailbox
    call = request, begin, partial(callee.refuse, request)
    mailbox.do(mailbox.arrive(call, request.sender, turn[0] if turn else None))


def _answer_in_turn(agent: Agent, value: OwnedValue, request: Message) -> None:
    """Answers for an actor; in the pool."""
    mailbox = request.scope.mailbox
    request.scope.begun = True  # for `Mailbox.sweep`
    mailbox.do(mailbox.on_begun(request.scope))
    try:
        _answer(agent, value, request)
    finally:
        end_with(partial(mailbox.do, mailbox.end(request.scope)))


def _answer(agent: Agent, value: OwnedValue, request: Message) -> None:
    """Answers in the pool, as pickling may take long and run the user's code."""
    try:
        content = value.get()
    except BaseException as error:
        uncalled = UNCALLED if was_not_executed(error) else ()
        agent.callee.answer_error(request, error, uncalled)
    else:
        agent.callee.answer(request, content)
