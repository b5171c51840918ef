"""How the values of one worker's messages are packed and unpacked."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from zrpc.membership import Membership
from zrpc.wire.header import Message
from zrpc.wire.pickling import Decoder, Encoder

__all__ = ["NONE", "Codec"]

# The body of an answer without a value, the most common one.
NONE = pickle.dumps(None, pickle.HIGHEST_PROTOCOL)


class Codec:
    """Packs and unpacks, with what layers add to that. For any thread.

    Args:
        agent: the worker's, for reducers of upper layers.
        membership: the worker's.

    Attributes:
        in_context: whether a message that is packed now, which may answer a request, is within a
            context of autograd.
        finishers: if so, what layers do to it, see `Encoder`.
        openers: by the tag of an attachment: what a layer does to a message with one that has
            come, see `Decoder`.
    """

    def __init__(self, agent: Any, membership: Membership) -> None:
        self._agent = agent
        self._membership = membership
        self.in_context: Callable[[Message | None], bool] = lambda _: False
        self.finishers: list[Callable[[Encoder], None]] = []
        self.openers: dict[int, Callable[[Decoder], None]] = {}

    def encoder(self, rank: int, request: Message | None = None) -> Encoder:
        """For packing a message to ``rank``, which may be the answer to a request."""
        same_main = self._membership.same_main(rank)
        if not self.in_context(request):
            return Encoder(self._agent, rank, same_main, request)
        in_graph = torch.is_grad_enabled()
        return Encoder(self._agent, rank, same_main, request, self.finishers, in_graph)

    def unpack(self, message: Message) -> Any:
        """The object in a message. It runs what the sender chose: never in the I/O thread.

        It is the same whichever modes this thread is in: what is made in inference mode could
        not be trained with later.
        """
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            # Which enables grad as well; torch.inference_mode does it in thrice the time.
            with torch._C._InferenceMode(False):
                return self.unpack(message)
        value = Decoder(self._agent, message, self.openers).unpack()
        message.buffers = ()  # which would keep large tensors as long as the message
        return value
