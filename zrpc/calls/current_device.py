"""The current device of a handler: the one that its tensors arrive on.

A request of a worker that has a device map for this one says which. If the map names several
devices here, it is that of the first tensor on a device, or else the first of this worker's
``devices``. An ``async def`` function or a generator has it in each of its steps: others run in the
same thread.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, TypeVar

import torch

from zrpc.wire.kind import Tag
from zrpc.wire.message import Message

T = TypeVar("T")


def device_of(request: Message) -> str:
    """Returns the device that a request says; empty if it says none."""
    found: str = (request.attachments or {}).get(Tag.DEVICE, "")
    return found


@contextlib.contextmanager
def current_device(name: str) -> Iterator[None]:
    """Makes a device the current one in this thread within a block; none if the name is empty."""
    device = torch.device(name or "cpu")
    module = torch.get_device_module(device) if name else None
    if module is None:
        yield
    elif hasattr(module, "device"):  # of CUDA: uses no other device when it ends
        with module.device(device.index):
            yield
    elif hasattr(module, "set_device") and hasattr(module, "current_device"):
        before = module.current_device()
        module.set_device(device.index)
        try:
            yield
        finally:
            module.set_device(before)
    else:  # there is one only
        yield


def keep_device(coroutine: Coroutine[Any, Any, T], request: Message) -> Awaitable[T]:
    """Returns what awaits a coroutine with the device of a request in each of its steps."""
    device = device_of(request)
    return _in_steps(coroutine, device) if device else coroutine


@types.coroutine
def _in_steps(coroutine: Coroutine[Any, Any, T], name: str) -> Generator[Any, Any, T]:
    go_on: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        try:
            with current_device(name):
                awaited = go_on(value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            go_on, value = coroutine.send, (yield awaited)
        except BaseException as error:  # a cancellation, for example
            go_on, value = coroutine.throw, error
