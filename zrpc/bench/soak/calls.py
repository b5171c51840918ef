"""Actions: calls of all kinds, with values, tensors and errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import zrpc
from zrpc.bench.soak import targets
from zrpc.bench.soak.client import Action, CheckFailed, Client
from zrpc.errors import (
    RemoteError,
    RpcCancelledError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
)

# How long a handler takes, and the timeout of the call. On a busy machine the error may come later.
_HANDLER_SECONDS = 0.3
_TIMEOUT_SECONDS = 0.05
_MAX_ERROR_SECONDS = 20.0
# Longer than any timeout.
_LONG_SECONDS = 3600.0
# The range of sizes of a large tensor: smaller ones go as frames, larger ones by shared memory.
_LARGE_BYTES = (1 << 15, 1 << 22)
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
    """Raises if two tensors differ in type, shape or values."""
    if expected.dtype != found.dtype or expected.shape != found.shape:
        raise CheckFailed(f"{what}: expected {expected.dtype} {expected.shape}, found {found!r}")
    if not torch.equal(expected, found):
        raise CheckFailed(f"{what}: expected {expected!r}, found {found!r}")


def sync(client: Client) -> None:
    """Makes one call and waits for it."""
    seed, factor = client.random_int(0, 1 << 30), client.random_int()
    tensor = targets.draw(seed, client.random_int(0, 50))
    found = zrpc.rpc_sync(client.random_peer(), targets.scale, (tensor, factor))
    same("scale", tensor * factor, found)


def burst(client: Client) -> None:
    """Makes many calls to several workers at once."""
    tensor = targets.draw(client.random_int(0, 1 << 30), 8)
    calls = [(client.random_peer(), client.random_int()) for _ in range(client.random_int(2, 40))]
    futures = [zrpc.rpc_async(to, targets.scale, (tensor, factor)) for to, factor in calls]
    checked = zip(futures, calls, strict=True)
    wait_for_all([partial(_check_scaled, each, tensor * factor) for each, (_, factor) in checked])


def _check_scaled(future: Any, expected: torch.Tensor) -> None:
    same("scale", expected, future.wait())


def marks(client: Client) -> None:
    """Makes calls that their callees count; `count_marks` compares the counts."""
    to = client.random_peer()
    futures = []
    for _ in range(client.random_int(1, 10)):
        futures.append(zrpc.rpc_async(to, targets.mark, (client.client_name,)))
        client.marks_sent[to] += 1
    wait_for_all([future.wait for future in futures])


def chained(client: Client) -> None:
    """Makes a call from the callback of another call's future."""
    first, second, value = client.random_peer(), client.random_peer(), client.random_int()
    future = zrpc.rpc_async(first, targets.hop, ([], value)).then(
        lambda done: zrpc.rpc_sync(second, targets.hop, ([], done.wait() + 1))
    )
    client.expect("then", value + 1, future.wait())


def nested(client: Client) -> None:
    """Makes a call that is passed on from worker to worker."""
    route, value = client.random_route(6), client.random_int()
    found = zrpc.rpc_sync(route[0], targets.hop, (route[1:], value))
    client.expect(f"hops along {route}", value + len(route) - 1, found)


def asynchronous(client: Client) -> None:
    """Calls handlers that wait without a thread."""
    tensor = targets.draw(client.random_int(0, 1 << 30), 5)
    factor, to = client.random_int(), client.random_peer()
    slowly: Any = targets.scale_slowly  # the callee awaits its coroutine
    slow = zrpc.rpc_async(to, slowly, (tensor, factor, client.rng.random() / 20))
    asked = zrpc.rpc_async(to, targets.ask_another, (client.random_peer(), tensor, factor))
    scaled = tensor * factor
    wait_for_all([partial(_check_scaled, slow, scaled), partial(_check_scaled, asked, scaled + 1)])


def large(client: Client) -> None:
    """Sends a large tensor and gets it back, or gets a new one."""
    low, high = _LARGE_BYTES
    count = int(low * (high / low) ** client.rng.random()) // 4
    tensor = targets.draw(client.random_int(0, 1 << 30), count)
    factor = client.random_int()
    if client.rng.random() < 0.5:
        found = zrpc.rpc_sync(client.random_peer(), targets.scale, (tensor, factor))
        same("large", tensor * factor, found)
        return
    seed = client.random_int(0, 1 << 30)
    found = zrpc.rpc_sync(client.random_peer(), targets.draw, (seed, count))
    same("drawn", targets.draw(seed, count), found)


def shapes(client: Client) -> None:
    """Sends tensors of many types, including views of one storage."""
    dtype = client.rng.choice(_DTYPES)
    base = targets.draw(client.random_int(0, 1 << 30), 600).reshape(20, 30).to(dtype)
    values = [base.t(), base[3:7, ::2], base[5], base.reshape(-1)[7], base[:0]]
    scalar = {"name": client.unique_key(), "of": [client.random_int(), None, 2.5, b"bytes"]}
    echoed = zrpc.rpc_sync(client.random_peer(), _echo, (values, scalar))
    for value, found in zip(values, echoed[0], strict=True):
        same("view", value, found)
    client.expect("values", scalar, echoed[1])


def _echo(*values: Any) -> Any:
    return values


def errors(client: Client) -> None:
    """Makes calls that fail."""
    to, number, text = client.random_peer(), client.random_int(), client.unique_key()
    error = _error_of(targets.ComplaintError, zrpc.rpc_sync, to, targets.complain, (number, text))
    client.expect("arguments", (number, text), error.args)
    client.expect("cause", RemoteError, type(error.__cause__))
    future: zrpc.Future[Any] = zrpc.rpc_async(to, targets.complain_oddly, (text,))
    error = _error_of(RemoteError, future.wait)
    client.expect("the text is in the message", True, text in str(error))
    _error_of(SerializationError, zrpc.rpc_sync, to, targets.unpicklable)
    _error_of(RpcError, zrpc.rpc_sync, "nobody", targets.rest, (0,))


def timeouts(client: Client) -> None:
    """Makes a call that takes longer than its timeout."""
    call = partial(zrpc.rpc_sync, timeout=_TIMEOUT_SECONDS)
    began = time.monotonic()
    _error_of(RpcTimeoutError, call, client.random_peer(), targets.rest, (_HANDLER_SECONDS,))
    taken = time.monotonic() - began
    plausible = _TIMEOUT_SECONDS <= taken < _MAX_ERROR_SECONDS
    client.expect(f"{taken} s is a plausible time", True, plausible)


def cancels(client: Client) -> None:
    """Cancels calls in any state. If cancelling failed, they would outlast the test."""
    kinds: list[Any] = [targets.until_cancelled, targets.until_cancelled_slowly]
    futures = [
        zrpc.rpc_async(client.random_peer(), client.rng.choice(kinds), (_LONG_SECONDS,), timeout=0)
        for _ in range(client.random_int(1, 6))
    ]
    time.sleep(client.rng.choice([0.0, 0.002, 0.02]))
    wait_for_all([partial(_cancel, client, future) for future in futures])


def _cancel(client: Client, future: Any) -> None:
    if not future.cancel():
        raise CheckFailed(f"expected a call in progress, found that it returned {future.wait()!r}")
    _error_of(RpcCancelledError, future.wait)
    client.expect("cancelled", (True, False), (future.cancelled(), future.cancel()))


def count_marks(client: Client) -> None:
    """Checks that each call has run exactly once; the last action of a client."""
    for to, sent in client.marks_sent.items():
        if to != client.doomed:
            found = zrpc.rpc_sync(to, targets.marked, (client.client_name,))
            client.expect(f"calls that ran on {to}", sent, found)


def _error_of(kind: type[Exception], call: Callable[..., Any], *args: Any) -> Exception:
    """Returns the error that a call fails with, but raises it if a worker is no longer there."""
    try:
        value = call(*args)
    except (zrpc.WorkerDied, zrpc.NotInitializedError):
        raise
    except Exception as error:
        if type(error) is kind:
            return error
        raise CheckFailed(f"type: expected {kind!r}, found {type(error)!r}") from error
    raise CheckFailed(f"expected an error, found {value!r}")


def wait_for_all(waits: Sequence[Callable[[], Any]]) -> None:
    """Calls all of them, then raises the first error."""
    found = []
    for wait in waits:
        try:
            wait()
        except Exception as error:  # the others are still waited for
            found.append(error)
    # An error that a death explains is raised only if there is no other.
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
