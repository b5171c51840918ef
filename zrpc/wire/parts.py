"""Parts of messages: an object that is packed once, and goes with several messages.

What differs from message to message is left out, as a *hole*: a reference, which is counted for
each receiver; a tensor that requires grad, since each message is in the autograd graph by itself;
and what upper rooms leave out. Each message has its own values for the holes, the *fills*.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from zrpc.wire.devices import DeviceMap
from zrpc.wire.member_id import NOBODY
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder
from zrpc.wire.unpickling import Holes


class PartEncoder(Encoder):
    """Packs a part.

    Args:
        owner: the agent that packs.
        same_main: whether a name in ``__main__`` means the same at all receivers.
        in_graph: whether the messages are part of an autograd graph.
        devices: the device map of all messages.

    Attributes:
        holes: what is left out, in the order of its fills.
    """

    holes: Holes

    def __init__(
        self, owner: object, same_main: bool, in_graph: bool, devices: DeviceMap | None = None
    ) -> None:
        super().__init__(owner, NOBODY, same_main)
        self.in_graph = in_graph
        self.devices = devices
        self.holes = Holes()

    def part(self, obj: Any) -> Message:
        """Returns the part: its body, table and buffers.

        Raises:
            SerializationError: ``obj`` can't be pickled.
            MemoryError: there is no memory left.
        """
        packed = Message(0)
        self.pack(obj, packed)
        return packed

    @override
    def _start_over(self) -> None:
        super()._start_over()
        self.holes = Holes()
