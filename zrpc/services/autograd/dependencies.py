"""Which tensors that crossed between workers lead to the roots of a backward pass.

Each worker traces its graph when it sends: from each tensor down to the tensors that it has
received, and to the leaves (`Tracer`). What it finds travels with the message. The worker that
begins a pass puts these parts together (`UsedTensors`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zrpc.errors import ProtocolError, RpcError
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.autograd.nodes import RECEIVE_NODE
from zrpc.torch_internals import ACCUMULATE_NODE, rank_second_last, sequence_number
from zrpc.wire.member_id import MemberId

__all__ = [
    "OF_ENDED_CONTEXT",
    "Arrived",
    "Dependencies",
    "Origin",
    "Reach",
    "Sources",
    "Tracer",
    "UsedTensors",
    "graph_freed",
    "pack_sources",
    "read_sources",
]

# A message: its sender, and the number that the sender has given it.
Origin = tuple[MemberId, int]

# The error of a pass that reaches a tensor of a call of another context.
OF_ENDED_CONTEXT = (
    "expected a loss that depends on calls of the pass's own autograd context, found one that "
    "depends on a call whose context had ended, or is another one: its gradient can't be sent. Run "
    "the pass in the context in which the call was made, or use the detach() of its result"
)


class Arrived(NamedTuple):
    """A tensor that one worker has received: from whom, in which message, and where in it.

    ``send_id`` is 0 if the message was one of another context than the tensor's user. No gradient
    can be sent back then.
    """

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


class Sources(NamedTuple):
    """What the tensors of one message were computed from, as far as the message says it.

    Attributes:
        arrived: the tensors that its sender had received, by their bits in ``sets``.
        sets: by the place in the message, the set from which a tensor was computed; None if the
            message does not say it.
    """

    arrived: dict[int, Arrived]
    sets: list[int | None]


class Reach(NamedTuple):
    """What a tensor was computed from, as sets of bits that its worker's `Tracer` has given.

    Attributes:
        arrived: the received tensors.
        leaves: the AccumulateGrad nodes.
    """

    arrived: int
    leaves: int


_NOTHING = Reach(0, 0)


class Tracer:
    """Finds what tensors of one context were computed from; any thread may call its methods.

    It walks over each node once, until `forget`. The bits stay the same after that.

    It also sees to it that no node has the sequence number of the waits, which the first
    node of each thread has.

    Attributes:
        arrived: the received tensors that were found so far, by their bits; it grows at its end.
    """

    def __init__(self, context_id: int) -> None:
        self.arrived: list[Arrived] = []
        self._context_id = context_id
        # Guards what follows, and `arrived`; nothing else is locked under it.
        self._lock = UninterruptedLock()
        self._bits: dict[Arrived, int] = {}
        self._leaves: dict[Any, int] = {}
        # By node, and without the `Receive` nodes, whose outputs differ.
        self._sets: dict[Any, Reach] = {}

    def leaves(self, found: int) -> list[Any]:
        """Returns the AccumulateGrad nodes in a set."""
        nodes = list(self._leaves)
        return [nodes[bit] for bit in _bits_of(found)]

    def reach(self, tensor: torch.Tensor) -> Reach:
        """Returns what a tensor was computed from."""
        node = tensor.grad_fn
        if node is None:
            return _NOTHING
        with self._lock:
            if node.__class__ is RECEIVE_NODE:
                return Reach(self._output_of(node, tensor.output_nr), 0)
            if node not in self._sets:
                self._walk(node)
            return self._sets[node]

    def forget(self) -> None:
        """Drops the nodes, which a pass may free; a later walk goes over them again."""
        with self._lock:
            self._sets.clear()

    def _output_of(self, receive: Any, output: int) -> int:
        if not sequence_number(receive):
            rank_second_last(receive)
        sender, send_id = receive.origin
        if receive.context_id != self._context_id:
            send_id = output = 0
        arrived = Arrived(sender, send_id, output)
        bit = self._bits.setdefault(arrived, len(self.arrived))
        if bit == len(self.arrived):
            self.arrived.append(arrived)
        return 1 << bit

    def _walk(self, node: Any) -> None:
        """Finds the sets of a node and of all nodes below it, each of which has none yet."""
        sets, leaves = self._sets, self._leaves
        # The nodes above, each with the edges that are left, and with what the others lead to.
        above: list[tuple[Any, Iterator[tuple[Any, int]], int, int]] = []
        edges, arrived, found = iter(node.next_functions), 0, 0
        while True:
            for below, output in edges:
                cls = below.__class__
                if cls is ACCUMULATE_NODE:
                    more, leaf = 0, 1 << leaves.setdefault(below, len(leaves))
                elif cls is RECEIVE_NODE:
                    more, leaf = self._output_of(below, output), 0
                elif below in sets:
                    more, leaf = sets[below]
                elif below is None:
                    continue
                else:
                    above.append((node, edges, arrived, found))
                    node, edges, arrived, found = below, iter(below.next_functions), 0, 0
                    break
                # Most nodes lead to one other, and share its sets.
                arrived = arrived | more if arrived else more
                found = found | leaf if found else leaf
            else:
                sets[node] = Reach(arrived, found)
                if not sequence_number(node):
                    rank_second_last(node)
                if not above:
                    return
                more, leaf = arrived, found
                node, edges, arrived, found = above.pop()
                arrived = arrived | more if arrived else more
                found = found | leaf if found else leaf


# A tensor's sources in a message: how many, then each with its bit, sender, message and place.
_COUNT = struct.Struct("<H")
_SOURCE = struct.Struct("<IIQI")
# A tensor with more sources than this has none in its message: a chain of calls would otherwise
# send as many bytes as the square of its length. The worker that begins a pass asks then.
_MOST_SOURCES = 64
_UNSAID = 0xFFFF


def pack_sources(sets: Iterable[int], arrived: Sequence[Arrived]) -> bytes:
    """Packs what the tensors of a message were computed from; see `Sources`."""
    parts = []
    for found in sets:
        count = found.bit_count()
        if count > _MOST_SOURCES:
            parts.append(_COUNT.pack(_UNSAID))
            continue
        parts.append(_COUNT.pack(count))
        parts += [_SOURCE.pack(bit, *arrived[bit]) for bit in _bits_of(found)]
    return b"".join(parts)


def read_sources(data: bytes) -> Sources:
    """Reads what `pack_sources` has packed.

    Raises:
        ProtocolError: it is something else.
    """
    arrived: dict[int, Arrived] = {}
    sets: list[int | None] = []
    at = 0
    try:
        while at < len(data):
            [count] = _COUNT.unpack_from(data, at)
            at += _COUNT.size
            if count == _UNSAID:
                sets.append(None)
                continue
            found = 0
            for _ in range(count):
                bit, sender, send_id, place = _SOURCE.unpack_from(data, at)
                at += _SOURCE.size
                arrived[bit] = Arrived(MemberId(sender), send_id, place)
                found |= 1 << bit
            sets.append(found)
    except struct.error as error:
        raise ProtocolError(
            f"expected what the tensors of a message were computed from, found {len(data)} "
            f"bytes that end too early: {error}"
        ) from error
    return Sources(arrived, sets)


class UsedTensors:
    """The tensors that lead to the roots, put together from the parts of all workers; no I/O.

    Args:
        carried: returns what a message said about its tensors, or None if that is not known here.

    Attributes:
        sent: for each worker, the used tensors that it has sent: their places, by message.
        received: for each worker, the messages with used tensors that it has received.
    """

    def __init__(self, carried: Callable[[Origin], Sources | None]) -> None:
        self.sent: dict[MemberId, dict[int, list[int]]] = {}
        self.received: dict[MemberId, set[Origin]] = {}
        self._carried = carried
        self._read: dict[Origin, Sources | None] = {}
        self._dependencies: dict[MemberId, Dependencies] = {}
        # By worker, the tensors that it has received, by their bits; and the set of used ones.
        self._names: dict[MemberId, dict[int, Arrived]] = {}
        self._used: dict[MemberId, int] = {}
        # Used tensors whose sources are not known yet, each with the worker that has received it.
        self._unresolved: list[tuple[Arrived, MemberId]] = []

    def learn(self, member: MemberId, dependencies: Dependencies) -> None:
        """Takes a worker's part.

        Raises:
            RpcError: a tensor that leads to the roots is not in it: an earlier pass has freed
                that part of the graph. Or the tensor is one of another context.
        """
        self._dependencies[member] = dependencies
        self._names.setdefault(member, {}).update(enumerate(dependencies.arrived))
        self._resolve()

    def use(self, member: MemberId, found: int) -> None:
        """Adds tensors that a known worker has received, as a set, which lead to the roots."""
        self._add(member, found)
        self._resolve()

    def to_ask(self) -> set[MemberId]:
        """Returns the workers to ask now for their parts, all at once.

        A worker that has sent a tensor has most often computed it from what its receiver has sent,
        as in nested calls. So the receiver is asked too, in the same round.
        """
        members: set[MemberId] = set()
        for tensor, receiver in self._unresolved:
            members |= {tensor.sender, receiver}
        return members - self._dependencies.keys()

    def _add(self, member: MemberId, found: int) -> None:
        before = self._used.get(member, 0)
        if not found & ~before:
            return
        self._used[member] = found | before
        names, received = self._names[member], self.received.setdefault(member, set())
        for bit in _bits_of(found & ~before):
            tensor = names[bit]
            received.add((tensor.sender, tensor.send_id))
            self._unresolved.append((tensor, member))

    def _resolve(self) -> None:
        waiting = []
        while self._unresolved:
            tensor, receiver = self._unresolved.pop()
            found = self._sources_of(tensor)
            if found is None:
                waiting.append((tensor, receiver))
                continue
            sent = self.sent.setdefault(tensor.sender, {})
            sent.setdefault(tensor.send_id, []).append(tensor.place)
            self._add(tensor.sender, found)
        self._unresolved = waiting

    def _sources_of(self, tensor: Arrived) -> int | None:
        """Returns from what a tensor was computed by its sender, or None if that is not known."""
        if not tensor.send_id:
            raise RpcError(OF_ENDED_CONTEXT)
        dependencies = self._dependencies.get(tensor.sender)
        if dependencies is not None:
            found = dependencies.sent.get((tensor.send_id, tensor.place))
            if found is None:
                raise graph_freed()
            return found
        message = tensor.sender, tensor.send_id
        if message not in self._read:
            self._read[message] = self._carried(message)
        sources = self._read[message]
        if sources is None or tensor.place >= len(sources.sets):
            return None
        self._names.setdefault(tensor.sender, {}).update(sources.arrived)
        return sources.sets[tensor.place]


def _bits_of(number: int) -> list[int]:
    bits = []
    while number:
        lowest = number & -number
        bits.append(lowest.bit_length() - 1)
        number ^= lowest
    return bits


def graph_freed() -> RpcError:
    """Returns the error for a pass over tensors that an earlier pass has gone over."""
    return RpcError(
        "Trying to backward through the graph a second time: an earlier pass has gone through "
        "tensors that came from, or went to, another worker; give it retain_graph=True"
    )
