"""Which tensors that crossed between workers lead to the roots of a backward pass.

Before a pass runs, each worker traces its part of the graph: from each tensor that it has sent
down to the tensors that it has received (`Tracer`). The worker that begins the pass puts these
parts together (`UsedTensors`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from zrpc.errors import RpcError
from zrpc.services.autograd.nodes import RECEIVE_NODE
from zrpc.wire.member_id import MemberId

__all__ = ["Arrived", "Dependencies", "Tracer", "UsedTensors", "graph_freed"]


class Arrived(NamedTuple):
    """A tensor that one worker has received: from whom, in which message, and where in it."""

    sender: MemberId
    send_id: int
    place: int


class Dependencies(NamedTuple):
    """What the tensors that one worker has sent were computed from.

    Attributes:
        arrived: the tensors that the worker has received.
        sent: for each tensor that it has sent, by message and index, the set of those in
            ``arrived`` from which it was computed: bit n stands for the n-th.
    """

    arrived: list[Arrived]
    sent: dict[tuple[int, int], int]


class Tracer:
    """Finds the received tensors that others were computed from; one walk over the graph.

    It also sees to it that no node has the sequence number of the `Turn` nodes, which the first
    node of each thread has.
    """

    def __init__(self) -> None:
        self._bits: dict[Arrived, int] = {}
        self._sets: dict[Any, int] = {}
        self._receives: set[Any] = set()

    @property
    def arrived(self) -> list[Arrived]:
        """The received tensors that were found so far, in the order of their bits."""
        return list(self._bits)

    def trace(self, tensor: torch.Tensor) -> int:
        """Returns the set of received tensors from which a tensor was computed."""
        node = tensor.grad_fn
        if node is None:
            return 0
        self._walk(node)
        return (
            self._output_of(node, tensor.output_nr) if node in self._receives else self._sets[node]
        )

    def _output_of(self, receive: Any, output: int) -> int:
        sender, send_id = receive.origin
        return 1 << self._bits.setdefault(Arrived(sender, send_id, output), len(self._bits))

    def _walk(self, node: Any) -> None:
        """Finds the sets of a node and of all nodes below it."""
        sets, receives = self._sets, self._receives
        stack = [node]
        while stack:
            node = stack.pop()
            if node in sets:
                continue
            edges = node.next_functions
            below = [each for each, _ in edges if each is not None and each not in sets]
            if below:
                stack.append(node)
                stack += below
                continue
            found = 0
            for each, output in edges:
                if each in receives:
                    found |= self._output_of(each, output)
                elif each is not None:
                    found |= sets[each]
            sets[node] = found
            if node.__class__ is RECEIVE_NODE:
                receives.add(node)
            if not node._sequence_nr():
                node._set_sequence_nr(1)


class UsedTensors:
    """The tensors that lead to the roots, put together from the parts of all workers; no I/O."""

    def __init__(self) -> None:
        self._dependencies: dict[MemberId, Dependencies] = {}
        # By worker: the used ones among the tensors that it has sent, and received.
        self._sent: dict[MemberId, dict[int, list[int]]] = {}
        self._arrived: dict[MemberId, int] = {}
        self._unresolved: list[Arrived] = []

    def learn(self, member: MemberId, dependencies: Dependencies) -> None:
        """Takes a worker's part.

        Raises:
            RpcError: a tensor that leads to the roots is not in it: an earlier pass has freed
                that part of the graph.
        """
        self._dependencies[member] = dependencies
        self._resolve()

    def use(self, member: MemberId, found: int) -> None:
        """Adds tensors that a known worker has received, as a set, which lead to the roots."""
        new = found & ~self._arrived.get(member, 0)
        self._arrived[member] = self._arrived.get(member, 0) | new
        self._unresolved += self._members_of(member, new)
        self._resolve()

    def _members_of(self, member: MemberId, found: int) -> list[Arrived]:
        arrived = self._dependencies[member].arrived
        return [arrived[bit] for bit in _bits_of(found)]

    def _resolve(self) -> None:
        waiting = []
        while self._unresolved:
            tensor = self._unresolved.pop()
            dependencies = self._dependencies.get(tensor.sender)
            if dependencies is None:
                waiting.append(tensor)
                continue
            found = dependencies.sent.get((tensor.send_id, tensor.place))
            if found is None:
                raise graph_freed()
            sent = self._sent.setdefault(tensor.sender, {})
            sent.setdefault(tensor.send_id, []).append(tensor.place)
            known = self._arrived.get(tensor.sender, 0)
            self._arrived[tensor.sender] = known | found
            self._unresolved += self._members_of(tensor.sender, found & ~known)
        self._unresolved = waiting

    def unknown(self) -> set[MemberId]:
        """Returns the workers whose parts must be known before the rest can be found."""
        return {tensor.sender for tensor in self._unresolved}

    def members(self) -> set[MemberId]:
        """Returns the workers that have sent tensors that lead to the roots."""
        return set(self._sent)

    def sent_by(self, member: MemberId) -> dict[int, list[int]]:
        """Returns which tensors of which messages of a worker lead to the roots."""
        return self._sent.get(member, {})

    def arrived_at(self, member: MemberId) -> set[tuple[MemberId, int]]:
        """Returns the received messages, by sender and id, whose tensors lead to the roots."""
        used = self._members_of(member, self._arrived.get(member, 0))
        return {(tensor.sender, tensor.send_id) for tensor in used}


def _bits_of(number: int) -> Iterable[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def graph_freed() -> RpcError:
    """Returns the error for a pass over tensors that an earlier pass has gone over."""
    return RpcError(
        "Trying to backward through the graph a second time: an earlier pass has gone through "
        "tensors that came from, or went to, another worker; give it retain_graph=True"
    )
