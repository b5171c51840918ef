"""The state of an autograd context at one worker: what it has sent and received, its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from zrpc.errors import RpcError
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.autograd.dependencies import (
    Dependencies,
    Origin,
    Reach,
    Sources,
    Tracer,
    graph_freed,
    read_sources,
)
from zrpc.services.autograd.mailbox import Mailbox
from zrpc.services.autograd.nodes import new_start
from zrpc.wire.member_id import MemberId

__all__ = ["ContextState", "ReceivedMessage", "SentMessage"]


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message with tensors of the graph that this worker has sent.

    Attributes:
        to: the receiver.
        number: its id. The messages that the worker has sent or received are numbered in order.
        exits: the results of `Send`, by the index of the tensor in the message.
        reach: what each of these tensors was computed from, by the same index.
    """

    to: MemberId
    number: int
    exits: Mapping[int, torch.Tensor]
    reach: Mapping[int, Reach]

    @property
    def leaves(self) -> int:
        """The AccumulateGrad nodes that its tensors lead to, as a set."""
        leaves = 0
        for reach in self.reach.values():
            leaves |= reach.leaves
        return leaves

    def only(self, indices: Iterable[int]) -> SentMessage:
        """Returns the message with some of its tensors."""
        return replace(
            self,
            exits={index: self.exits[index] for index in indices},
            reach={index: self.reach[index] for index in indices},
        )


class ReceivedMessage(NamedTuple):
    """A message with tensors of the graph that this worker has received.

    Attributes:
        number: see `SentMessage`; the sender's own number for it is another one.
        sources: what it says about its tensors, packed; None if a pass has gone over it.
    """

    number: int
    sources: bytes | None


class ContextState:
    """One context at one worker.

    Attributes:
        context_id: its id, unique in the mesh.
        lock: guards `gradients`, and is held while several entries of the tables change together.
            Single operations on a table are atomic and need no lock. A thread that adds up
            gradients may hold it for a while, so the I/O thread takes it only to end the context.
        start: the leaf at which the engine's runs over received tensors end.
        sends: the messages sent, by number, without the tensors that a pass has taken with it.
        receives: the messages received.
        tracer: finds what tensors were computed from.
        peers: all workers with which a message of this context was exchanged.
        incomplete: workers some of whose messages were lost; gradients of a pass that has not begun
            here may be among them.
        gradients: the gradients of the leaves at this worker.
        mailboxes: those of all backward passes, by id, including those that are done: a message
            about one may come late.
    """

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id
        self.lock = UninterruptedLock()
        self.start = new_start()
        self.sends: dict[int, SentMessage] = {}
        self.receives: dict[Origin, ReceivedMessage] = {}
        self.tracer = Tracer(context_id)
        self.peers: set[MemberId] = set()
        self.incomplete: set[MemberId] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.mailboxes: dict[int, Mailbox] = {}

    def clear(self) -> None:
        """Ends the context: drops its graph and its gradients, and fails its passes."""
        with self.lock:
            self.sends.clear()
            self.gradients.clear()
        # Not replaced: a thread that is sending has sets of it.
        self.tracer.forget()
        for mailbox in list(self.mailboxes.values()):
            mailbox.fail(lambda: RpcError("the autograd context ended during a backward pass"))

    def mailbox(self, pass_id: int) -> Mailbox:
        """Returns what arrives for a pass; makes it when the pass is first heard of."""
        mailbox = self.mailboxes.get(pass_id)
        return mailbox or self.mailboxes.setdefault(pass_id, Mailbox())

    def dependencies(self) -> Dependencies:
        """Returns which received tensors those that were sent were computed from."""
        sent = {
            (message.number, index): reach.arrived
            for message in list(self.sends.values())
            for index, reach in message.reach.items()
        }
        return Dependencies(list(self.tracer.arrived), sent)

    def carried(self, origin: Origin) -> Sources | None:
        """Returns what a received message says about its tensors, or None if that is not known.

        Raises:
            ProtocolError: that can't be read.
        """
        message = self.receives.get(origin)
        if message is None or message.sources is None:
            return None
        return read_sources(message.sources)

    def take(
        self,
        used: Mapping[int, Iterable[int]],
        arrived: Iterable[Origin],
        retain_graph: bool,
    ) -> list[SentMessage]:
        """Returns the messages with their used tensors, for a pass, in the order of sending.

        Unless the graph is retained, the pass takes these tensors with it. Those that it does not
        use stay for later passes. What ``arrived``, the received messages that it uses, say about
        their tensors is forgotten: a later pass that uses them too must ask what is left.

        Raises:
            RpcError: another pass has taken one of them.
        """
        taken, left = [], []
        with self.lock:
            for number in sorted(used):
                message, indices = self.sends.get(number), set(used[number])
                if message is None or not message.exits.keys() >= indices:
                    raise graph_freed()
                rest = message.exits.keys() - indices
                taken.append(message.only(sorted(indices)) if rest else message)
                left.append(message.only(sorted(rest)) if rest else None)
            if not retain_graph:
                for message, remains in zip(taken, left, strict=True):
                    if remains is None:
                        del self.sends[message.number]
                    else:
                        self.sends[message.number] = remains
                for origin in arrived:
                    self.receives[origin] = ReceivedMessage(self.receives[origin].number, None)
        return taken

    def add_gradients(self, found: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds to the gradients of leaves."""
        with self.lock:
            for leaf, gradient in found:
                before = self.gradients.setdefault(leaf, gradient)
                if before is not gradient:
                    # torch adds a sparse tensor to a dense one, not the other way round.
                    both = gradient + before if before.is_sparse else before + gradient
                    self.gradients[leaf] = both

    def copy_gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Returns the gradients by leaf."""
        with self.lock:
            return dict(self.gradients)

    def scale_gradients(self, leaves: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiplies the gradients of some leaves."""
        with self.lock:
            for leaf in leaves:
                if leaf in self.gradients:
                    self.gradients[leaf] = self.gradients[leaf] * factor

    def set_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient of a leaf; with None, the leaf has none any more."""
        with self.lock:
            if gradient is None:
                self.gradients.pop(leaf, None)
            else:
                self.gradients[leaf] = gradient
