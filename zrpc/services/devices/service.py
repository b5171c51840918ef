"""Runs handlers with the device as the current one on which their tensors arrive.

A request of a worker that has a device map for this one says which. If the map names several
devices here, that is the one of the first tensor on a device, or else the first of this worker's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from typing_extensions import override

from zrpc.agent.service import ExtensionReader, Service
from zrpc.calls.message_hooks import MessageHooks
from zrpc.wire.kind import Tag
from zrpc.wire.message import Message

__all__ = ["DeviceService"]


class DeviceService(Service, MessageHooks):
    """Makes a device the current one around each handler whose caller has a device map."""

    tag = Tag.DEVICE

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {Tag.DEVICE: lambda _, data: data.decode()}

    @override
    def message_hooks(self) -> MessageHooks:
        return self

    @override
    def request_scope(self, request: Message) -> contextlib.AbstractContextManager[None]:
        return _current(request.attachment(Tag.DEVICE))


@contextlib.contextmanager
def _current(name: str) -> Iterator[None]:
    """Makes a device the current one in this thread within a block."""
    device = torch.device(name)
    module = torch.get_device_module(device)
    if hasattr(module, "device"):  # of CUDA: uses no other device when it ends
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
