"""What messages say of the context that they are within, or of the pass that they are about."""

from __future__ import annotations

import struct

from zrpc.autograd.state import ContextState
from zrpc.wire.header import Message

__all__ = [
    "GRAPH",
    "GRAPH_LAYOUT",
    "INDEX_LAYOUT",
    "PASS",
    "PASS_LAYOUT",
    "Graph",
    "graph_of",
    "pass_fields",
]

# The tags of extensions: of any message within a context, and of messages about a pass.
GRAPH = 3
PASS = 4

GRAPH_LAYOUT = struct.Struct("<qQ")  # context, number of the send (0: no tensors); then indices
INDEX_LAYOUT = struct.Struct("<I")
PASS_LAYOUT = struct.Struct("<qQQB")  # context, pass, number of the send, retain_graph


class Graph:
    """What the extension of a message says of its context."""

    __slots__ = ("indices", "send_id", "sender", "state")

    def __init__(self, state: ContextState, sender: int, send_id: int, indices: list[int]) -> None:
        self.state = state
        self.sender = sender
        self.send_id = send_id
        self.indices = indices


def graph_of(message: Message) -> Graph | None:
    """What a message says of its context; None where it is within none that lives."""
    return message.attachments.get(GRAPH) if message.attachments else None


def pass_fields(message: Message) -> tuple[int, int, int, int]:
    """The fields of `PASS_LAYOUT` in a message about a pass."""
    fields: tuple[int, int, int, int] = message.attachment(PASS)
    return fields
