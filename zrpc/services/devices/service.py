"""Runs handlers with their current device; see `zrpc.calls.current_device`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from typing_extensions import override

from zrpc.agent.service import ExtensionReader, Service
from zrpc.calls.current_device import current_device, device_of
from zrpc.calls.message_hooks import MessageHooks
from zrpc.wire.kind import Tag
from zrpc.wire.message import Message


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
    def request_scope(self, request: Message) -> AbstractContextManager[None]:
        return current_device(device_of(request))
