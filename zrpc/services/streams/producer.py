"""Runs a generator for its consumer, and sends its items.

A plain generator runs in a thread of the pool, always in the same context, and with the modes of
torch that it has set. When it may not go on, it holds no thread. It also lets others have the
thread after a while. An asynchronous one runs in one task of the event loop; its items are packed
in the pool, since the loop must not pickle large ones.

Each item of a plain generator costs two functions here, beside those that pack it; numbers, strings
and the like are packed by the batch.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from sys import getsizeof
from time import monotonic
from typing import Any

import torch

from zrpc.agent.agent import Agent
from zrpc.calls.cancel_scope import CancelScope
from zrpc.calls.current_device import current_device, device_of, keep_device
from zrpc.calls.execution import RequestJob
from zrpc.calls.function_names import name_of_function
from zrpc.calls.future import Future
from zrpc.errors import RpcCancelledError, SerializationError
from zrpc.runtime import forks
from zrpc.runtime.torch_modes import reset_modes
from zrpc.services.streams.batches import Credit, check_size, dump_batch
from zrpc.services.streams.outflow import Outflow, Step
from zrpc.services.streams.source import complete_in_loop
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

logger = logging.getLogger(__name__)

_GO = Step.GO  # looked up once, as an enum takes long for it
# After this time a generator leaves its thread to other handlers, if there are any.
_SLICE_SECONDS = 0.02
# Without reducers and hooks, and the generator can't change them; nor tuples of them.
_PLAIN_TYPES = frozenset((str, int, float, bool, bytes, type(None)))
_are_plain = _PLAIN_TYPES.issuperset
# Longer tuples are packed by themselves, and larger values.
_MAX_PLAIN_LENGTH = 16
_MAX_PLAIN_BYTES = 1 << 16
# Values up to this size are packed in the thread of the event loop.
_SMALL_BYTES = 1 << 12


class Producer:
    """Runs one generator. Any thread may call its methods. Made in the context that it runs in.

    Args:
        agent: this worker's.
        request: the call of the generator.
        outflow: how far it may run.
        generator: the generator.

    Attributes:
        done: completed, with None, when the generator has ended.
        error: what has ended it; None if it has come to its end.
        outflow: the rules, for reading.
    """

    def __init__(self, agent: Agent, request: Message, outflow: Outflow, generator: Any) -> None:
        self._agent = agent
        self._request = request
        self._scope: CancelScope = request.scope
        self._generator = generator
        self.outflow = outflow
        # Guards the rules. No other lock is taken, and nothing is sent, while it is held.
        self._lock = threading.Lock()
        self.done: Future[None] = Future()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begins to run the generator."""
        self._scope.in_steps = True
        self._scope.when_cancelled(self.close)
        self._go_on()

    def give(self, credit: Credit) -> None:
        """Takes credit of the consumer; in the I/O thread."""
        with self._lock:
            due, wake = self.outflow.give(credit), self.outflow.wake()
        try:
            if due:
                self._send()
            if wake:
                self._go_on()
        except BaseException:
            if wake:
                self.outflow.rests_since = monotonic()  # no thread runs it: `close` must
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Closes the generator after the step that runs; its consumer gets an error, if it waits.

        In any thread, also the one that receives.
        """
        with self._lock:
            if self.outflow.closing or self.outflow.ended:
                return
            self.outflow.closing = True
            self.error = error
            wake = self.outflow.wake()
        if wake:
            self._go_on()

    @abstractmethod
    def _go_on(self) -> None:
        """Lets the generator run on."""

    def _next_step(self) -> Step:
        with self._lock:
            return self.outflow.next_step()

    def _rest(self) -> bool:
        """Sends what is left, and returns whether this thread must leave the generator."""
        self._send()
        self._scope.rests = True  # first: another thread may run it as soon as it rests
        with self._lock:
            rests = self._scope.rests = self.outflow.rest()
        return rests

    def _add(self, value: Any, in_loop: bool = False) -> Step | None:
        """Sends an item or keeps it for the next batch.

        Returns:
            The next step; None if this is the thread of an event loop, which must not pack it.
        """
        kind, size = type(value), -1
        if kind in _PLAIN_TYPES:
            size = getsizeof(value)
        elif kind is tuple and len(value) <= _MAX_PLAIN_LENGTH and _are_plain(map(type, value)):
            size = sum(map(getsizeof, value))
        if in_loop and not 0 <= size <= _SMALL_BYTES:
            return None
        # A large one by itself too: if that fails, those before it are sent.
        if not 0 <= size <= _MAX_PLAIN_BYTES:
            item, encoder = Message(Kind.ITEMS), self._agent.codec.answer_encoder(self._request)
            encoder.pack(value, item)
            try:
                check_size(item)
            except SerializationError:
                encoder.abort()
                raise
            value, size = item, item.nbytes
        with self._lock:
            due = self.outflow.add(value, size)
        if not due:
            return _GO
        self._send()
        return self._next_step()

    def _send(self) -> None:
        """Sends all items that wait."""
        while True:
            with self._lock:
                batch = self.outflow.take()
            if batch is None:
                return
            try:
                message = dump_batch(self._request.call_id, *batch)
                self._agent.outbox.post(self._request.sender, message)
            except Exception as error:  # the batch has its number: nothing can follow it
                with self._lock:
                    self.outflow.cut(batch[0])
                    self.error = error
                    wake = self.outflow.wake()
                if wake:
                    self._go_on()
                return

    def _end(self, error: BaseException | None = None) -> None:
        """Notes that the generator has ended, or has been closed."""
        self._send()
        with self._lock:
            self.outflow.ended = True
            self.error = self.error or error
        if not self.done.done():
            self.done.set_result(None)

    def _on_error(self, _: Message, error: BaseException) -> None:
        """Ends the stream with an error of the job that runs the generator, or ends it."""
        self._end(error)

    def _report_close(self, error: BaseException) -> None:
        """Logs what a generator has raised when it was closed: nobody else gets to know."""
        name = name_of_function(self._scope.function)
        ignored = isinstance(error, RuntimeError) and "ignored GeneratorExit" in str(error)
        if ignored:
            logger.error(
                "On %s: the generator %s has yielded while it was closed: expected it to clean up "
                "and return; it is abandoned",
                self._agent.worker_info,
                name,
            )
        elif not isinstance(error, (asyncio.CancelledError, RpcCancelledError)):
            self._agent.callee.report_failure(error, name)


class PlainProducer(Producer):
    """Runs a plain generator."""

    def __init__(self, agent: Agent, request: Message, *args: Any) -> None:
        super().__init__(agent, request, *args)
        self._context = contextvars.copy_context()
        self._device = device_of(request)
        # The modes of torch that the generator has set.
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def _go_on(self) -> None:
        self._agent.receiver.run(RequestJob(self._request, self._on_error, self._run))

    def _run(self, _: Message) -> None:
        """Runs the generator until it must rest, in a thread of the pool."""
        self._scope.rests = False
        while True:
            try:
                with torch._C._InferenceMode(self._inference), current_device(self._device):
                    torch._C._set_grad_enabled(self._grad)
                    go_on = self._context.run(self._steps)
                    self._inference = torch.is_inference_mode_enabled()
                    self._grad = torch.is_grad_enabled()
            finally:
                reset_modes()
            if go_on is not None:
                go_on()
                return
            # Another thread may run the generator as soon as it rests.
            self._scope.thread = 0
            if self._rest():
                return
            self._scope.thread = threading.get_ident()

    def _steps(self) -> Callable[[], None] | None:
        """Makes items until none may be made; returns how to go on, None if it must rest."""
        generator, until = self._generator, monotonic() + _SLICE_SECONDS
        generation = forks.generation
        try:
            step: Step | None = self._next_step()
            while step is _GO:
                item = next(generator)
                if generation != forks.generation:
                    forks.exit_child()
                step = self._add(item)
                if monotonic() > until:
                    return self._go_on
        except StopIteration:
            if generation != forks.generation:
                forks.exit_child()
            return self._end
        except BaseException as error:  # SystemExit too: a handler must not end its worker
            if generation != forks.generation:
                forks.exit_child(error)
            self._close_generator()  # if it was the item that could not be packed
            trace = error.__traceback__
            return partial(self._end, error.with_traceback(trace and trace.tb_next))
        if step is Step.REST:
            return None
        self._close_generator()
        return self._end

    def _close_generator(self) -> None:
        try:
            self._generator.close()
        except BaseException as error:
            self._report_close(error)


class AsyncProducer(Producer):
    """Runs an asynchronous generator."""

    def __init__(self, agent: Agent, *args: Any) -> None:
        super().__init__(agent, *args)
        # Starts its task, and then ends its latest rest.
        run = partial(agent.event_loop.run, self._drive(), contextvars.copy_context())
        self._wake: Callable[[], object] = run

    def _go_on(self) -> None:
        self._wake()

    async def _drive(self) -> None:
        """Runs the generator from its beginning to its end."""
        failure: BaseException | None = None
        generation = forks.generation
        try:
            if self._scope.follow(asyncio.current_task()):
                await keep_device(self._steps(), self._request)
        except BaseException as error:  # SystemExit would end the loop
            failure = error
        if generation != forks.generation:
            forks.exit_child(failure)
        self._scope.closes = True
        try:
            await self._generator.aclose()
        except BaseException as error:
            self._report_close(error)
        finally:
            self._scope.follow(None)  # the task refers to its context, and that to the scope
        end = RequestJob(self._request, self._on_error, lambda _: self._end(failure))
        self._agent.receiver.run(end)

    async def _steps(self) -> None:
        loop, until, generation = asyncio.get_running_loop(), 0.0, forks.generation
        while (step := self._next_step()) is not Step.CLOSE:
            if step is Step.REST:
                woken: asyncio.Future[None] = loop.create_future()
                self._wake = partial(complete_in_loop, loop, woken)
                if self._rest():
                    await woken
                    self._scope.rests = False
                continue
            if monotonic() > until:  # others of this loop have their turn, if it never waits
                await asyncio.sleep(0)
                until = monotonic() + _SLICE_SECONDS
            try:
                value = await anext(self._generator)
            except StopAsyncIteration:
                return
            if generation != forks.generation:
                forks.exit_child()
            if self._add(value, in_loop=True) is None:
                await self._add_in_pool(loop, value)

    async def _add_in_pool(self, loop: asyncio.AbstractEventLoop, value: Any) -> None:
        added: asyncio.Future[None] = loop.create_future()
        tell = partial(complete_in_loop, loop, added)

        def add(_: Message) -> None:
            self._add(value)
            tell()

        job = RequestJob(self._request, lambda _, error: tell(error), add)
        self._agent.receiver.run(job)
        await added
