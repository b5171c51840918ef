"""Answers the requests for copies of values (`RRef.to_here`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zrpc.agent.agent import Agent
from zrpc.calls.execution import RequestJob
from zrpc.calls.result_sink import ResultSink
from zrpc.services.rref.value import OwnedValue
from zrpc.wire.message import Message


def fetch(
    agent: Agent, request: Message, value: OwnedValue, turn: Sequence[tuple[int, int]]
) -> None:
    """Answers a request for a copy of a value that is there: if it is an actor's, in its turn."""
    mailbox, callee = value.mailbox, agent.callee
    sink: ResultSink = callee if mailbox is None else mailbox.sink
    work = partial(_answer, sink, value)
    begin = partial(agent.receiver.run, RequestJob(request, sink.fail, work))
    if mailbox is None:
        begin()
        return
    request.scope.mailbox = mailbox
    call = request, begin, partial(callee.refuse, request)
    mailbox.do(mailbox.arrive(call, request.sender, turn[0] if turn else None))


def _answer(sink: ResultSink, value: OwnedValue, request: Message) -> None:
    """Answers in the pool, as pickling may take long and run the user's code."""
    if value.mailbox is not None:
        request.scope.begun = True  # for `Mailbox.sweep`
        value.mailbox.do(value.mailbox.on_begun(request.scope))
    try:
        content = value.get()
    except BaseException as error:
        sink.fail(request, error, report=False)
    else:
        sink.answer(request, content)
