"""Workloads: the skeleton of a call and of an autograd step, as a limit beside zrpc's own.

It has a process of its own, one socket, and the parts in pure Python that no call can do without.
It has no other peers, no thread pool, no signs of life, no cancelling and no observers. The
distance to zrpc's own call is what all these cost.
"""

from __future__ import annotations

import contextlib
import copyreg
import itertools
import mmap
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NoReturn

import torch

from zrpc.bench import targets
from zrpc.bench.autograd import BATCH_SIZE
from zrpc.bench.session import Sample, Session

__all__ = ["echo", "empty", "in_flight", "one_way", "step"]

# The size of the body, the kind, the number of the call, and the seconds until its deadline.
_HEADER = struct.Struct("<IBQd")
_CALL, _RESULT, _ERROR = range(3)
_SECONDS = 60.0
_CHUNK_BYTES = 1 << 16
# A peer that computes answers within this number of looks; to be woken takes as long as a call.
_LOOKS_BEFORE_SLEEP = 1000
_DTYPES = (torch.float32, torch.float64, torch.int64)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MIN_SHARED_BYTES = 1 << 16
# Each end writes to one half of the memory that both have mapped: to this part of it again and
# again, unless one tensor needs more.
_HALF_BYTES = 1 << 27
_REUSED_BYTES = 1 << 22


class _Memory:
    """The tensors that one end sends by memory that both have mapped."""

    shared: mmap.mmap  # set before the fork

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._used = 0

    def reduce(self, tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        size, code, shape = tensor.nbytes, _CODES[tensor.dtype], tuple(tensor.shape)
        if size < _MIN_SHARED_BYTES:
            return _from_bytes, (tensor.detach().numpy().tobytes(), code, shape)
        if self._used + size > max(size, _REUSED_BYTES):
            self._used = 0
        place = self._begin + self._used, size, code, shape
        _from_memory(*place).copy_(tensor.detach())
        self._used += size
        return _from_memory, place


def _from_bytes(data: bytes, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=_DTYPES[code]).view(shape)


def _from_memory(offset: int, size: int, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = _DTYPES[code]
    count = size // dtype.itemsize
    return torch.frombuffer(_Memory.shared, dtype=dtype, count=count, offset=offset).view(shape)


@dataclass(slots=True)
class _Call:
    deadline: float
    size: int
    answer: tuple[int, bytes] | None = None


class _End:
    """One end of the connection: calls functions of the other one, and runs those that it calls.

    Any thread may call. None takes another lock while it holds `_lock` or `_sending`. The calls in
    flight must fit the socket, as a thread that sends does not receive.
    """

    def __init__(self, connection: socket.socket, memory: _Memory) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._epoll = select.epoll()
        self._epoll.register(connection, select.EPOLLIN)
        self._dispatch_table = {**copyreg.dispatch_table, torch.Tensor: memory.reduce}
        self._handlers = {_CALL: self._on_call, _RESULT: self._on_answer, _ERROR: self._on_answer}
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the next two
        self._calls: dict[int, _Call] = {}
        self._bytes_in_flight = 0
        self._sending = threading.Lock()  # held until a message is written as a whole
        self._receiving = threading.Lock()  # guards the next; held by the thread that receives
        self._rest = b""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.wait(self.begin(function, *args))

    def begin(self, function: Callable[..., Any], *args: Any) -> _Call:
        body, number = self._pack((function, args)), next(self._numbers)
        call = _Call(time.monotonic() + _SECONDS, len(body))
        with self._lock:
            self._calls[number] = call
            self._bytes_in_flight += call.size
        self._send(_CALL, number, _SECONDS, body)
        return call

    def wait(self, call: _Call) -> Any:
        while call.answer is None:
            with self._receiving:  # others wait here, and find their answers afterwards
                while call.answer is None:
                    self._receive(call.deadline)
        kind, body = call.answer
        value = pickle.loads(body)
        if kind == _ERROR:
            raise value
        return value

    def serve(self) -> NoReturn:
        """Runs what the other end calls, until it closes the connection."""
        while True:
            with contextlib.suppress(TimeoutError):
                self._receive(time.monotonic() + _SECONDS)

    def _pack(self, value: object) -> bytes:
        out = BytesIO()
        pickler = pickle.Pickler(out, 5)
        pickler.dispatch_table = self._dispatch_table
        pickler.dump(value)
        return out.getvalue()

    def _send(self, kind: int, number: int, left: float, body: bytes) -> None:
        data = _HEADER.pack(len(body), kind, number, left) + body
        with self._sending:
            while data:
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    if not select.select([], [self._socket], [], _SECONDS)[1]:
                        raise TimeoutError("both ends send, and none receives") from None

    def _receive(self, deadline: float) -> None:
        """Handles the messages that come next; the caller holds the lock, or is the only thread."""
        data = self._rest + self._read(deadline)
        at = 0
        while len(data) - at >= _HEADER.size:
            size, kind, number, left = _HEADER.unpack_from(data, at)
            end = at + _HEADER.size + size
            if end > len(data):
                break
            self._handlers[kind](kind, number, left, data[at + _HEADER.size : end])
            at = end
        self._rest = data[at:]

    def _read(self, deadline: float) -> bytes:
        read = self._socket.recv
        for _ in range(_LOOKS_BEFORE_SLEEP):
            try:
                data = read(_CHUNK_BYTES)
                break
            except BlockingIOError:
                os.sched_yield()  # another program may want the core
        else:
            if not self._epoll.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no answer within {_SECONDS:g} s")
            data = read(_CHUNK_BYTES)
        if not data:
            raise EOFError("the other end has closed the connection")
        return data

    def _on_answer(self, kind: int, number: int, left: float, body: bytes) -> None:
        with self._lock:
            if (call := self._calls.pop(number, None)) is not None:
                self._bytes_in_flight -= call.size
                call.answer = kind, body

    def _on_call(self, kind: int, number: int, left: float, body: bytes) -> None:
        try:
            function, args = pickle.loads(body)
            kind, answer = _RESULT, self._pack(function(*args))
        except Exception as error:
            kind, answer = _ERROR, self._pack(error)
        self._send(kind, number, 0.0, answer)


@contextlib.contextmanager
def start_peer() -> Iterator[_End]:
    """Forks a process that serves calls; gives the end that calls it."""
    fd = os.memfd_create("skeleton-of-a-call")
    os.ftruncate(fd, 2 * _HALF_BYTES)
    _Memory.shared = mmap.mmap(fd, 2 * _HALF_BYTES)
    os.close(fd)
    here, there = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            here.close()
            torch.set_num_threads(1)  # a fork lacks the threads that computed before it
            _End(there, _Memory(_HALF_BYTES)).serve()
        finally:
            os._exit(0)
    there.close()
    try:
        yield _End(here, _Memory(0))
    finally:
        here.close()
        os.waitpid(pid, 0)


def empty(session: Session) -> Sample:
    """Calls a function that does nothing."""
    with start_peer() as end:
        return session.sampling.time(lambda: end.call(targets.nothing))


def echo(session: Session, size: int) -> Sample:
    """Sends a tensor and gets it back."""
    with start_peer() as end:
        tensor = torch.ones(size // 4)
        return session.sampling.time(lambda: end.call(targets.echo, tensor))


def one_way(session: Session, size: int) -> Sample:
    """Sends a tensor and gets its last element back."""
    with start_peer() as end:
        tensor = torch.ones(size // 4)
        return session.sampling.time(lambda: end.call(targets.take, tensor))


def in_flight(session: Session, count: int) -> Sample:
    """Makes ``count`` empty calls before it waits for them; the time of each."""
    with start_peer() as end:

        def batch() -> None:
            for call in [end.begin(targets.nothing) for _ in range(count)]:
                end.wait(call)

        return session.sampling.time(batch).divided(count)


def step(session: Session, width: int) -> Sample:
    """Runs one layer here and one twice on the peer, forward and backward."""
    inputs, contexts = torch.ones(BATCH_SIZE, width), itertools.count()
    layer = targets.linear(width)
    apply: Callable[..., torch.Tensor] = RemoteLayer.apply
    with start_peer() as end:

        def once() -> None:
            context = next(contexts)
            hidden = layer(inputs)
            for position in range(2):
                hidden = apply(hidden, end, context, position)
            torch.autograd.grad(hidden.sum(), list(layer.parameters()))
            end.call(_end_context, context)

        return session.sampling.time(once)


class RemoteLayer(torch.autograd.Function):
    """A node for a call of the peer's layer; its backward pass is another call."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, end: _End, context: int, position: int) -> Any:
        ctx.call = end, context, position
        return end.call(_run_forward, context, position, value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        end, context, position = ctx.call
        return end.call(_run_backward, context, position, gradient), None, None, None


# At the peer: what a backward pass needs, by context and position; gradients, by context.
_kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
gradients: dict[int, dict[torch.nn.Parameter, torch.Tensor]] = {}


def _run_forward(context: int, position: int, value: torch.Tensor) -> torch.Tensor:
    value.requires_grad_()
    result = targets.layer(value)
    _kept[context, position] = value, result
    return result.detach()


def _run_backward(context: int, position: int, gradient: torch.Tensor) -> torch.Tensor:
    value, result = _kept.pop((context, position))
    parameters = list(targets.linear(value.shape[-1]).parameters())
    first, *rest = torch.autograd.grad(result, [value, *parameters], gradient)
    sums = gradients.setdefault(context, {})
    for parameter, each in zip(parameters, rest, strict=True):
        sums[parameter] = sums[parameter] + each if parameter in sums else each
    return first


def _end_context(context: int) -> None:
    del gradients[context]
