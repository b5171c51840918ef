"""The functions and classes that workloads call on their peer."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from zrpc.agent.current import current_agent
from zrpc.bench import library
from zrpc.bench.machine import read_kib

# No handler burns for longer, even if its caller is gone.
_MAX_BURN_SECONDS = 60.0
# Of a layer of the models whose weights are sent.
_WIDTH = 1024
_burning = threading.Event()
_stop = threading.Event()
# By the number of elements: what this worker pushes, and the sum of what was pushed to it.
_pushed: dict[int, torch.Tensor] = {}
_sums: dict[int, torch.Tensor] = {}
# What this worker has subscribed to, by name.
_subscribers: dict[str, Any] = {}
# Guards `_sums`.
_sums_lock = threading.Lock()


def nothing() -> None:
    """Does nothing."""


def context_switches() -> float:
    """Returns how often this worker's threads have waited, or have lost their cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw + used.ru_nivcsw


def messages() -> float:
    """Returns how many messages have arrived at this worker of zrpc."""
    return sum(current_agent().dispatcher.received.values())


def add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the sum of two tensors."""
    return one + other


def echo(value: Any) -> Any:
    """Returns its argument."""
    return value


def take(tensor: torch.Tensor) -> float:
    """Returns the last element, which proves that the whole tensor has arrived."""
    return tensor[-1].item()


def numbers(count: int) -> Iterator[int]:
    """Makes the numbers below ``count``."""
    number = 0
    while number < count:  # not `yield from`: Ray needs a generator at each level
        yield number
        number += 1


def tensors(count: int, size: int) -> Iterator[torch.Tensor]:
    """Makes tensors of ``size`` bytes, all ones."""
    tensor = torch.ones(size // 4)
    for _ in range(count):
        yield tensor


def new_model(count: int) -> dict[str, torch.Tensor]:
    """Returns the parameters of a model: that many elements, in layers with a matrix and a bias."""
    parameters: dict[str, torch.Tensor] = {}
    while count:
        for shape in ((_WIDTH, _WIDTH), (_WIDTH,)):
            tensor = torch.ones(shape).view(-1)[:count].clone()
            parameters[str(len(parameters))] = tensor
            count -= tensor.numel()
    return parameters


def load(weights: dict[str, torch.Tensor]) -> None:
    """Copies weights that have arrived into this worker's model."""
    copy_model(weights, _model(sum(each.numel() for each in weights.values())))


def copy_model(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    """Copies the parameters of a model to those of another one."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


def load_version(name: str, count: int, version: int) -> int:
    """Loads published weights with that many elements into this worker's model."""
    if name not in _subscribers:
        _subscribers[name] = library.current().rpc.nn.subscribe(name)
    return int(_subscribers[name].load_into(_model(count), at_least=version))


def time_of_load(name: str, count: int, version: int) -> float:
    """Does the same; returns how many times as long it took as a copy from model to model."""
    begun = time.perf_counter()
    load_version(name, count, version)
    loaded = time.perf_counter()
    source, target = _model(count, "source of a copy"), _model(count, "target of a copy")
    middle = time.perf_counter()
    copy_model(source, target)
    return (loaded - begun) / (time.perf_counter() - middle)


def unsubscribe() -> None:
    """Gives back the weights that this worker has, and its models."""
    for each in _subscribers.values():
        each.close()
    _subscribers.clear()
    _model.cache_clear()


@cache
def _model(count: int, use: str = "own") -> dict[str, torch.Tensor]:
    """Returns this worker's model with that many elements; another one for each use."""
    return new_model(count)


def prepare_push(count: int) -> None:
    """Makes the tensor that `push` sends."""
    _pushed[count] = torch.ones(count)


def push(owner: str, count: int) -> float:
    """Sends a tensor of that many elements to a worker, gets the sum of all back; its last one."""
    rpc_sync = library.current().rpc.rpc_sync
    return take(rpc_sync(owner, accumulate, args=(_pushed[count],)))


def accumulate(tensor: torch.Tensor) -> torch.Tensor:
    """Adds a tensor to the sum of those of its size, and returns the sum."""
    count = tensor.numel()
    with _sums_lock:
        if count not in _sums:
            _sums[count] = torch.zeros(count)
        return _sums[count].add_(tensor)


def send_to_others(rank: int, workers: int, count: int) -> int:
    """Sends a tensor of that many elements to each other worker; returns how many arrived.

    All workers do this at once, and each begins with the next one.
    """
    rpc_sync, tensor = library.current().rpc.rpc_sync, torch.ones(count)
    others = [f"worker{(rank + step) % workers}" for step in range(1, workers)]
    return sum(int(rpc_sync(other, take, args=(tensor,))) for other in others)


def hop(here: int, left: int) -> int:
    """Calls itself on the other one of workers 0 and 1, ``left`` times; returns the depth."""
    if left == 0:
        return 1
    there = 1 - here
    rpc_sync = library.current().rpc.rpc_sync
    return 1 + int(rpc_sync(f"worker{there}", hop, args=(there, left - 1)))


def burn() -> None:
    """Keeps the interpreter busy until `stop_burning` is called."""
    _stop.clear()
    _burning.set()
    end = time.monotonic() + _MAX_BURN_SECONDS
    value = 0
    while not _stop.is_set() and time.monotonic() < end:
        for i in range(1000):
            value += i
    _burning.clear()


def burning() -> bool:
    """Returns whether `burn` is running."""
    return _burning.is_set()


def stop_burning() -> None:
    """Stops `burn`."""
    _stop.set()


class Quiet:
    """An object with a method that does nothing."""

    nothing = staticmethod(nothing)


class Counter:
    """An object that an RRef refers to."""

    def __init__(self) -> None:
        self._count = 0

    def increment(self) -> int:
        """Adds one and returns the count."""
        self._count += 1
        return self._count


class Thing:
    """An object that is counted while it is alive."""

    _lock = threading.Lock()
    alive = 0
    made = 0

    def __init__(self) -> None:
        with Thing._lock:
            Thing.alive += 1
            Thing.made += 1

    def __del__(self) -> None:
        with Thing._lock:
            Thing.alive -= 1


def things() -> tuple[int, int]:
    """Returns how many `Thing` objects are alive, and how many were ever created."""
    return Thing.alive, Thing.made


def layer(inputs: torch.Tensor) -> torch.Tensor:
    """Applies this worker's linear layer of the inputs' width."""
    return linear(inputs.shape[-1])(inputs)  # type: ignore[no-any-return]


@cache
def linear(width: int) -> torch.nn.Linear:
    """Returns this worker's linear layer of that width."""
    return torch.nn.Linear(width, width)


def gradient_sum(context_id: int, width: int) -> float:
    """Returns the sum of absolute values of the gradient of this worker's layer."""
    gradients = library.current().autograd.get_gradients(context_id)
    return float(gradients[linear(width).weight].abs().sum())


def resident() -> int:
    """Returns the resident memory of this process, in bytes."""
    if not (size := read_kib("/proc/self/status", "VmRSS")):
        raise RuntimeError("expected VmRSS in /proc/self/status; memory is measured on Linux only")
    return size
