"""The codec of one worker: packs values into messages, and unpacks them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch

from zrpc import stand_in
from zrpc.calls.message_hooks import MessageHooks, overriding
from zrpc.errors import RpcError, SerializationError, raised_by_function
from zrpc.membership.view import Membership
from zrpc.wire.devices import DeviceMap
from zrpc.wire.exceptions import load_exception
from zrpc.wire.graph_capture import constant_of, is_tracing
from zrpc.wire.kind import Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder
from zrpc.wire.unpickling import Decoder

# The body of an answer without a value, the most common one.
NONE = pickle.dumps(None, pickle.HIGHEST_PROTOCOL)


class Codec:
    """Packs and unpacks values, with what the hooks add. Any thread may call its methods.

    Args:
        owner: the agent that packs; the reducers of services compare it.

    Attributes:
        fetch: returns a copy of what a member's main script has under a name that this worker's
            lacks; None if that is an error.
    """

    def __init__(self, owner: Any, membership: Membership) -> None:
        self._owner = owner
        self._membership = membership
        self._device_maps = membership.device_maps.get
        self.fetch: Callable[[MemberId, str], Any] | None = None
        # Each returns what this thread's messages are within, or None.
        self._contexts: Sequence[Callable[[], Any]] = ()
        self._tags: Set[int] = frozenset()  # of the requests whose answers are within the same
        self._finishers: list[Callable[[Encoder], None]] = []
        self._openers: dict[int, Callable[[Decoder], None]] = {}
        self._memory: Callable[[MemberId, int], Any] | None = None

    def use(self, hooks: Sequence[MessageHooks]) -> None:
        """Lets these hooks look at messages. Only before the agent serves."""
        self._contexts = [each.context.get for each in hooks if each.context is not None]
        self._tags = {each.tag for each in hooks if each.context is not None and each.tag}
        self._finishers = [each.finish for each in overriding(MessageHooks, "finish", hooks)]
        for each in overriding(MessageHooks, "memory", hooks):
            self._memory = each.memory
        opening = overriding(MessageHooks, "open", hooks)
        self._openers = {each.tag: each.open for each in opening if each.tag is not None}

    def in_context(self, request: Message) -> bool:
        """Returns whether hooks must see the answer to a request; see `MessageHooks`."""
        return not self._tags.isdisjoint(request.attachments or ())

    def contexts(self) -> tuple[Any, ...]:
        """Returns what this thread's messages are within; see `MessageHooks`."""
        return tuple(context() for context in self._contexts)

    def has_context(self) -> bool:
        """Returns whether this thread's messages are within one; see `contexts`."""
        return any(context() is not None for context in self._contexts)

    def encoder(self, member: MemberId, devices: DeviceMap | None = None) -> Encoder:
        """Returns an encoder of a request to a member.

        Args:
            member: the member.
            devices: where tensors arrive, if not by the device map for the member.
        """
        encoder = Encoder(self._owner, member, self._membership.same_main[member])
        for context in self._contexts:  # not by any(), which takes longer: for each message
            if context() is not None:
                self._put_in_context(encoder)
        if self._membership.device_maps and (maps := self._device_maps(member)) is not None:
            encoder.devices, encoder.memory = maps[0], self._memory
            if maps[0].current:
                encoder.finishers = [*encoder.finishers, _mark_device]
        if devices is not None:
            encoder.devices = devices
        return encoder

    def answer_encoder(self, request: Message) -> Encoder:
        """Returns an encoder of the answer to a request."""
        member = request.sender
        encoder = Encoder(self._owner, member, self._membership.same_main[member])
        encoder.request = request
        if self.in_context(request):
            self._put_in_context(encoder)
        if self._membership.device_maps and (maps := self._device_maps(member)) is not None:
            encoder.devices, encoder.memory = maps[1], self._memory
        return encoder

    def _put_in_context(self, encoder: Encoder) -> None:
        encoder.finishers, encoder.in_graph = self._finishers, torch.is_grad_enabled()

    def unpack(self, message: Message) -> Any:
        """Returns the object in a message. Runs the sender's code, so never in the I/O thread.

        The result does not depend on the modes that this thread is in: tensors made in inference
        mode could not be used in training later.
        """
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            # This enables grad as well. torch.inference_mode takes three times as long.
            with torch._C._InferenceMode(False):
                return self.unpack(message)
        if is_tracing():
            return constant_of(self.unpack, message)
        decoder = Decoder(self._owner, message, self._openers)
        try:
            value = decoder.unpack()
        except SerializationError as error:
            # Only programs for torch name what another script lacks; see `Membership.introduce`.
            named = stand_in.is_active() or not self._membership.same_main.get(message.sender, True)
            if not named or self.fetch is None or not isinstance(error.__cause__, AttributeError):
                raise
            value = decoder.unpack(partial(self.fetch, message.sender))
        message.buffers = ()  # they would keep large tensors alive as long as the message
        return value


def _mark_device(encoder: Encoder) -> None:
    """Adds to a request which device its function has as the current one."""
    assert encoder.devices is not None
    device = encoder.tensors.target or encoder.devices.current
    if device:
        encoder.extension(Tag.DEVICE).extend(device.encode())


def error_in(answer: Message) -> Exception:
    """Returns the error in an answer: the function's own, if the callee has read the request."""
    error = load_exception(answer.body)
    tags = answer.attachments or ()
    if Tag.UNCALLED in tags and isinstance(error, RpcError):
        error.executed = False
        return error
    return error if Tag.UNREAD in tags else raised_by_function(error)
