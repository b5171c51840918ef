"""Actions: calls of all kinds, with values, tensors and errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import zrpc
from zrpc.errors import (
    RemoteError,
    RpcCancelledError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
)
from zrpc.soak import targets
from zrpc.soak.lane import Action, Failed, Lane

__all__ = ["ACTIONS", "same"]

# A call that takes this long is given this much, and may take so many seconds more on a machine
# that is busy.
_REST = 0.3
_TIMEOUT = 0.05
_SLACK = 20.0
# Longer than anything waits.
_LONG = 3600.0
# Bytes of a large tensor: from what just goes by shared memory to some megabytes.
_LARGE = (1 << 15, 1 << 22)
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.bfloat16,
    torch.complex64,
)


def same(what: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    """Raises where two tensors differ in anything."""
    if expected.dtype != found.dtype or expected.shape != found.shape:
        raise Failed(f"{what}: expected {expected.dtype} {expected.shape}, found {found!r}")
    if not torch.equal(expected, found):
        raise Failed(f"{what}: expected {expected!r}, found {found!r}")


def sync(lane: Lane) -> None:
    """A call that is waited for."""
    seed, factor = lane.whole(0, 1 << 30), lane.whole()
    tensor = targets.draw(seed, lane.whole(0, 50))
    same("scale", tensor * factor, zrpc.rpc_sync(lane.peer(), targets.scale, (tensor, factor)))


def burst(lane: Lane) -> None:
    """Many calls at once, to several workers."""
    tensor = targets.draw(lane.whole(0, 1 << 30), 8)
    calls = [(lane.peer(), lane.whole()) for _ in range(lane.whole(2, 40))]
    futures = [zrpc.rpc_async(to, targets.scale, (tensor, factor)) for to, factor in calls]
    _wait_for_all(
        [
            partial(_check_scaled, future, tensor * factor)
            for future, (_, factor) in zip(futures, calls, strict=True)
        ]
    )


def _check_scaled(future: Any, expected: torch.Tensor) -> None:
    same("scale", expected, future.wait())


def marks(lane: Lane) -> None:
    """Calls that are counted where they run; `count_marks` compares."""
    to = lane.peer()
    futures = []
    for _ in range(lane.whole(1, 10)):
        futures.append(zrpc.rpc_async(to, targets.mark, (lane.caller,)))
        lane.sent[to] += 1
    _wait_for_all([future.wait for future in futures])


def chained(lane: Lane) -> None:
    """A callback of a future makes a call of its own."""
    first, second, value = lane.peer(), lane.peer(), lane.whole()
    future = zrpc.rpc_async(first, targets.hop, ([], value)).then(
        lambda done: zrpc.rpc_sync(second, targets.hop, ([], done.wait() + 1))
    )
    lane.expect("then", value + 1, future.wait())


def nested(lane: Lane) -> None:
    """A call that goes on from worker to worker."""
    way, value = lane.way(6), lane.whole()
    found = zrpc.rpc_sync(way[0], targets.hop, (way[1:], value))
    lane.expect(f"hops by {way}", value + len(way) - 1, found)


def asynchronous(lane: Lane) -> None:
    """Handlers that wait without a thread."""
    tensor, factor, to = targets.draw(lane.whole(0, 1 << 30), 5), lane.whole(), lane.peer()
    slowly: Any = targets.scale_slowly  # what it returns is awaited where it runs
    slow = zrpc.rpc_async(to, slowly, (tensor, factor, lane.rng.random() / 20))
    asked = zrpc.rpc_async(to, targets.ask_another, (lane.peer(), tensor, factor))
    _wait_for_all(
        [
            partial(_check_scaled, slow, tensor * factor),
            partial(_check_scaled, asked, tensor * factor + 1),
        ]
    )


def large(lane: Lane) -> None:
    """A large tensor there and back."""
    low, high = _LARGE
    count = int(low * (high / low) ** lane.rng.random()) // 4
    tensor = targets.draw(lane.whole(0, 1 << 30), count)
    factor = lane.whole()
    if lane.rng.random() < 0.5:
        same("large", tensor * factor, zrpc.rpc_sync(lane.peer(), targets.scale, (tensor, factor)))
        return
    seed = lane.whole(0, 1 << 30)
    same(
        "drawn", targets.draw(seed, count), zrpc.rpc_sync(lane.peer(), targets.draw, (seed, count))
    )


def shapes(lane: Lane) -> None:
    """Tensors of many types, views of one storage among them."""
    dtype = lane.rng.choice(_DTYPES)
    base = targets.draw(lane.whole(0, 1 << 30), 600).reshape(20, 30).to(dtype)
    values = [base.t(), base[3:7, ::2], base[5], base.reshape(-1)[7], base[:0]]
    scalar = {"name": lane.key(), "of": [lane.whole(), None, 2.5, b"bytes"]}
    echoed = zrpc.rpc_sync(lane.peer(), _echo, (values, scalar))
    for value, found in zip(values, echoed[0], strict=True):
        same("view", value, found)
    lane.expect("values", scalar, echoed[1])


def _echo(*values: Any) -> Any:
    return values


def errors(lane: Lane) -> None:
    """Calls that fail."""
    to, number, text = lane.peer(), lane.whole(), lane.key()
    error = _error_of(lambda: zrpc.rpc_sync(to, targets.complain, (number, text)))
    lane.expect("type", targets.ComplaintError, type(error))
    lane.expect("arguments", (number, text), error.args)
    lane.expect("cause", RemoteError, type(error.__cause__))
    future = zrpc.rpc_async(to, targets.complain_oddly, (text,))
    error = _error_of(future.wait)
    lane.expect("type", RemoteError, type(error))
    lane.expect("what it tells", True, text in str(error))
    error = _error_of(lambda: zrpc.rpc_sync(to, targets.unpicklable))
    lane.expect("type", SerializationError, type(error))
    error = _error_of(lambda: zrpc.rpc_sync("nobody", targets.rest, (0,)))
    lane.expect("type", RpcError, type(error))


def timeouts(lane: Lane) -> None:
    """A call that takes longer than it may."""
    began = time.monotonic()
    to = lane.peer()
    error = _error_of(lambda: zrpc.rpc_sync(to, targets.rest, (_REST,), timeout=_TIMEOUT))
    taken = time.monotonic() - began
    lane.expect("type", RpcTimeoutError, type(error))
    lane.expect(f"{taken} s are right", True, _TIMEOUT <= taken < _SLACK)


def cancels(lane: Lane) -> None:
    """Calls that are cancelled, wherever they are by then; else they would outlast the test."""
    kinds: list[Any] = [targets.until_cancelled, targets.until_cancelled_slowly]
    futures = [
        zrpc.rpc_async(lane.peer(), lane.rng.choice(kinds), (_LONG,), timeout=0)
        for _ in range(lane.whole(1, 6))
    ]
    time.sleep(lane.rng.choice([0.0, 0.002, 0.02]))
    _wait_for_all([partial(_cancel, lane, future) for future in futures])


def _cancel(lane: Lane, future: Any) -> None:
    if not future.cancel():
        raise Failed(f"expected a call under way, found that it returned {future.wait()!r}")
    lane.expect("type", RpcCancelledError, type(_error_of(future.wait)))
    lane.expect("cancelled", (True, False), (future.cancelled(), future.cancel()))


def count_marks(lane: Lane) -> None:
    """Whether each call has run once; at the end of a lane."""
    for to, sent in lane.sent.items():
        if to != lane.doomed:
            lane.expect(
                f"calls that ran at {to}", sent, zrpc.rpc_sync(to, targets.marked, (lane.caller,))
            )


def _error_of(call: Callable[[], Any]) -> Exception:
    """The error that a call has to fail with; that of a death is raised."""
    try:
        value = call()
    except zrpc.WorkerDied:
        raise
    except Exception as error:
        return error
    raise Failed(f"expected an error, found {value!r}")


def _wait_for_all(waits: Sequence[Callable[[], Any]]) -> None:
    """Does all of them, and raises the first error then."""
    found = []
    for wait in waits:
        try:
            wait()
        except Exception as error:  # noqa: PERF203 - each is waited for
            found.append(error)
    # That of a death is the last to be told.
    found.sort(key=lambda error: isinstance(error, zrpc.WorkerDied))
    if found:
        raise found[0]


ACTIONS: list[tuple[Action, int]] = [
    (sync, 10),
    (burst, 6),
    (marks, 6),
    (chained, 3),
    (nested, 6),
    (asynchronous, 4),
    (large, 6),
    (shapes, 4),
    (errors, 4),
    (timeouts, 1),
    (cancels, 3),
]
