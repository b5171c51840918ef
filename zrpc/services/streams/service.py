"""Plugs streams into an agent: the generators that run here, and the streams that are read here."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Generator,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

from typing_extensions import Unpack, override

from zrpc.agent.agent import Agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.call_options import CallOptions
from zrpc.calls.callee import Callee
from zrpc.calls.function_names import name_of_function
from zrpc.calls.future import Future
from zrpc.calls.pending_call import PendingCall
from zrpc.calls.result_sink import SinkBefore
from zrpc.constants import Seconds
from zrpc.errors import (
    NotInitializedError,
    OptionError,
    RpcError,
    has_shut_down,
)
from zrpc.functions import ASYNC_MARK, DEFERRAL
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import call_timeout
from zrpc.services.rref.extended import Call, MakesStreams, Resolve
from zrpc.services.rref.service import RRefService
from zrpc.services.streams.batches import Credit, dump_numbers, read_numbers
from zrpc.services.streams.consumer import Consumer
from zrpc.services.streams.inflow import Inflow
from zrpc.services.streams.outflow import Outflow
from zrpc.services.streams.producer import AsyncProducer, PlainProducer, Producer
from zrpc.services.streams.source import Source
from zrpc.services.streams.stream import Stream
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.pickling import register_reducer

# Once all workers have called shutdown, a stream that nobody has read for this time is closed.
_UNREAD_SECONDS = 1.0


class StreamService(Service, MakesStreams):
    """The streams of one worker, from both sides.

    Attributes:
        dropped: the streams that nothing refers to any longer. Finalizers append to it, at any
            moment, so they do nothing else.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # By caller and number of the call, and by number. Single operations on them are atomic.
        self._producers: dict[tuple[MemberId, int], Producer] = {}
        self._consumers: dict[int, Consumer] = {}
        self.dropped: deque[Source] = deque()

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.STREAM: self._on_stream,
            Kind.ITEMS: self._on_items,
            Kind.CREDIT: self._on_credit,
        }

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {Tag.STREAM: read_numbers}

    # -- the caller ------------------------------------------------------------------------

    @override
    def open(
        self,
        to: WorkerInfo,
        body: Any,
        timeout: Seconds,
        prefetch: int,
        deadline: Seconds,
        plain: bool = False,
        **options: Unpack[CallOptions],
    ) -> Stream[Any]:
        caller = self.agent.caller
        deadline = checked_deadline(deadline)
        limits = checked_prefetch(prefetch), self.agent.options.max_bytes_in_flight
        seconds = caller.timeout(timeout)
        made: list[Consumer] = []

        def follow(call: PendingCall, message: Message) -> Stream[Any]:
            consumer = Consumer(self.agent, call, Inflow(*limits), seconds, self._forget)
            made.append(consumer)
            self._consumers[call.call_id] = consumer
            message.extensions = [*message.extensions, (Tag.STREAM, dump_numbers(*limits, plain))]
            call.follower = consumer
            return Stream(consumer, self.dropped.append)

        try:
            return caller.call_in_parts(to, Kind.STREAM, body, deadline, follow, **options)
        except BaseException:
            for consumer in made:
                self._forget(consumer)
            raise

    def _forget(self, consumer: Consumer) -> None:
        self._consumers.pop(consumer.call.call_id, None)

    def readers(self) -> dict[int, Any]:
        """Returns what reads each stream, by the number of its call; see `present_reader`."""
        consumers = list(self._consumers.items())
        return {number: each.reader.read_by for number, each in consumers}

    def _on_items(self, batch: Message) -> None:
        consumer = self._consumers.get(batch.call_id)
        if consumer is not None and consumer.call.peer == batch.sender:
            if consumer.call.window is not None:
                self.agent.caller.calls.give_back_room(consumer.call)
            try:
                consumer.arrive(batch)
            except Exception as error:  # no memory, for example: only this stream ends
                consumer.end(error)
                consumer.call.cancel()

    # -- the callee ------------------------------------------------------------------------

    def _on_stream(self, request: Message) -> None:
        sink = _EndSink(self.agent.callee, self)
        if Tag.SUBJECT in (request.attachments or ()):
            rrefs = self.agent.service(RRefService)
            rrefs.run_method(request, sink, partial(self._resolve, request))
            return
        resolve = partial(self._resolve, request, partial(self.agent.codec.unpack, request))
        self.agent.callee.on_call(request, sink, resolve)

    def _resolve(self, request: Message, resolve: Resolve) -> Call:
        """Returns a function that runs the generator, and returns a future of its end."""
        function, args, kwargs = resolve()
        _, _, plain = request.attachment(Tag.STREAM)
        if plain and (iscoroutinefunction(function) or hasattr(function, DEFERRAL)):
            return function, args, kwargs
        if hasattr(function, DEFERRAL):  # a service must run it, and it gives one value
            raise TypeError(
                f"expected a generator for rpc_stream, found {name_of_function(function)}: call it "
                "by rpc_sync"
            )

        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if plain and not isinstance(result, (Generator, AsyncGenerator)):
                return result
            setattr(run, ASYNC_MARK, True)  # it is looked for after the call
            return self._start(request, result, run.__qualname__)

        run.__qualname__ = name_of_function(function)
        if hasattr(function, ASYNC_MARK):
            setattr(run, ASYNC_MARK, True)
        return run, args, kwargs

    def _start(self, request: Message, result: Any, name: str) -> Future[None]:
        prefetch, max_bytes, _ = request.attachment(Tag.STREAM)
        outflow = Outflow(prefetch, max_bytes)
        make: type[Producer]
        if isinstance(result, Generator):
            make = PlainProducer
        elif isinstance(result, AsyncGenerator):
            make = AsyncProducer
        else:
            if isinstance(result, CoroutineType):
                result.close()
            raise TypeError(
                f"expected a generator for rpc_stream, found {name}, which has returned a value of "
                f"type {type(result).__name__}: call it by rpc_sync, or let it yield its items"
            )
        producer = make(self.agent, request, outflow, result)
        self._producers[request.sender, request.call_id] = producer
        producer.start()
        return producer.done

    def _on_credit(self, message: Message) -> None:
        producer = self._producers.get((message.sender, message.call_id))
        if producer is not None:
            try:
                producer.give(Credit.parse(message))
            except Exception as error:  # no memory, for example: only this stream ends
                producer.close(error)

    def take_producer(self, request: Message) -> Producer | None:
        """Takes out the producer of a request, which has ended; None if it has never begun."""
        return self._producers.pop((request.sender, request.call_id), None)

    # -- events of the agent ---------------------------------------------------------------

    @override
    def after_turn(self) -> Sequence[tuple[Sized, Callable[[], None]]]:
        return [(self.dropped, self._close_dropped)]

    def _close_dropped(self) -> None:
        while self.dropped:
            self.dropped.popleft().close()

    @override
    def tick(self) -> None:
        shutdown = self.agent.graceful_shutdown
        if not shutdown.asked:
            return
        before = time.monotonic() - _UNREAD_SECONDS
        for consumer in list(self._consumers.values()):
            reader = consumer.reader
            if reader.used_at < before and not reader.is_awaited and not self._serves(consumer):
                consumer.close(_of_shutdown())
        if not shutdown.all_begun:  # this worker leaves alone
            for producer in list(self._producers.values()):
                if 0 < producer.outflow.rests_since < before:
                    producer.close(_of_shutdown())

    def _serves(self, consumer: Consumer) -> bool:
        """Returns whether a stream belongs to a handler that runs."""
        scope: Any = consumer.call.parent
        if scope is None:
            return False
        return self.agent.callee.requests.get(scope.caller.member_id, scope.call_id) is not None

    @override
    def awaited_members(self) -> Collection[MemberId]:
        return {each.call.peer for each in list(self._consumers.values()) if each.call.settled}

    @override
    def on_member_lost(self, member: MemberId) -> None:
        self._end_all(member, self.agent.callees.died)

    @override
    def on_messages_lost(self, member: MemberId) -> None:
        text = (
            f"a message of a stream with {self.agent.membership.infos[member]} is lost: a "
            "connection broke, or there was no memory for a large item. The generator has run, at "
            "least in part"
        )
        self._end_all(member, lambda _: RpcError(text))
        for (sender, _), producer in list(self._producers.items()):
            if sender == member:
                producer.close(RpcError(text))

    def _end_all(self, member: MemberId, error: Callable[[PendingCall], Exception]) -> None:
        """Ends the streams from a member behind the items that have come."""
        for consumer in list(self._consumers.values()):
            if consumer.call.peer == member:
                consumer.end(error(consumer.call))
                consumer.call.cancel()

    @override
    def stats(self) -> Mapping[str, int]:
        return {"streams_read": len(self._consumers), "streams_produced": len(self._producers)}

    @override
    def close(self) -> None:
        for consumer in list(self._consumers.values()):
            consumer.end(has_shut_down())
        self._consumers.clear()
        self._producers.clear()


@dataclass(slots=True, eq=False)
class _EndSink(SinkBefore[Callee]):
    """Answers the request of a stream, once, when its generator has ended."""

    _service: StreamService

    def answer(self, request: Message, value: Any) -> None:
        """Takes the end of the generator."""
        producer, callee = self._service.take_producer(request), self._sink
        if producer is None:  # the value of a plain function; or this worker has closed meanwhile
            callee.answer(request, value)
            return
        total = Tag.STREAM, dump_numbers(producer.outflow.total)
        if producer.error is None:
            callee.answer(request, None, total)
        else:
            callee.fail(request, producer.error, extensions=[total])

    def fail(self, request: Message, error: BaseException, report: bool = True) -> None:
        """Takes an error of the call itself: there is no generator."""
        self._service.take_producer(request)
        self._sink.fail(request, error, report)


def checked_prefetch(prefetch: Any) -> int:
    """Returns a number of items, which a message has room for.

    Raises:
        OptionError: it is none.
    """
    if not isinstance(prefetch, int) or prefetch < 1:
        raise OptionError(f"prefetch must be a number of items, at least 1, but got {prefetch!r}")
    return min(prefetch, sys.maxsize)


def checked_deadline(seconds: Seconds) -> Seconds:
    """Returns the seconds that a stream may take, as they are.

    Raises:
        OptionError, TypeError: see `call_timeout`.
    """
    call_timeout(seconds, "deadline")
    return seconds


def _of_shutdown() -> NotInitializedError:
    return NotInitializedError(
        "all workers have called shutdown(), and this stream is closed, since nobody reads it: "
        "read streams to their ends, or close them, before shutdown()"
    )


def _refuse(generator: Any) -> NoReturn:
    raise TypeError(  # as pickle does
        f"cannot pickle the generator {name_of_function(generator)}: call its function by "
        "rpc_stream, which sends its items one by one, or send a list of them"
    )


for each in (GeneratorType, AsyncGeneratorType):
    register_reducer(each, _refuse)
