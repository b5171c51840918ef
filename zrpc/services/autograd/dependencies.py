"""Which tensors that crossed between workers lead to the roots of a backward pass.

Each worker traces its graph when it sends: from each tensor down to the tensors that it has
received, and to the leaves (`Tracer`). What it finds travels with the message. The worker that
begins a pass puts these parts together (`UsedTensors`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

import torch

from zrpc.errors import RpcError
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.autograd.nodes import RECEIVE_NODE
from zrpc.torch_internals import ACCUMULATE_NODE, rank_second_last, sequence_number
from zrpc.wire.member_id import MemberId

# A message: its sender, and the number that the sender has given it.
Origin = tuple[MemberId, int]

# The error of a pass that reaches a tensor of a call of another context.
OF_ENDED_CONTEXT = (
    "expected a loss that depends on calls of the pass's own autograd context, found one that "
    "depends on a call whose context had ended, or is another one: its gradient can't be sent. Run "
    "the pass in the context in which the call was made, or use the detach() of its result"
)


# A tensor that one worker has received: from whom, in which message, and where in it. The message
# is 0 if it was one of another context than the tensor's user. No gradient can be sent back then.
Arrived = tuple[MemberId, int, int]


class Sources(NamedTuple):
    """What tensors that one worker has sent were computed from, as sets of bits.

    Attributes:
        arrived: tensors that the worker has received, by their bits.
        sets: the set for each tensor that it has sent, by message and place.
    """

    arrived: dict[int, Arrived]
    sets: dict[tuple[int, int], int]


class Tracer:
    """Finds what tensors of one context were computed from; any thread may call its methods.

    What it finds is a set, as bits: one for each received tensor, and one for each AccumulateGrad
    node. It walks over each node once, until `forget`. The bits stay the same after that.

    It also sees to it that no node has the sequence number of the waits, which the first
    node of each thread has.
    """

    def __init__(self, context_id: int) -> None:
        self._context_id = context_id
        # Guards what follows; nothing else is locked under it.
        self._lock = UninterruptedLock()
        # The received tensors and AccumulateGrad nodes that were found so far, by their bits; it
        # grows at its end. And the set of those that are tensors.
        self._found: list[Any] = []
        self._arrived = 0
        self._bits: dict[Any, int] = {}
        # By node, and without the `Receive` nodes, whose outputs differ.
        self._sets: dict[Any, int] = {}

    def leaves(self, found: int) -> list[Any]:
        """Returns the AccumulateGrad nodes in a set."""
        return [self._found[bit] for bit in _bits_of(found & ~self._arrived)]

    def arrived(self, found: int) -> dict[int, Arrived]:
        """Returns the received tensors in a set, by their bits."""
        found &= self._arrived
        return {bit: self._found[bit] for bit in _bits_of(found)} if found else {}

    def sources(self, sent: Mapping[tuple[int, int], int], most: float = inf) -> Sources:
        """Returns what tensors were computed from, without those of more than ``most`` sources."""
        sets, every = {}, 0
        for tensor, found in sent.items():
            arrived = found & self._arrived
            if arrived.bit_count() <= most:
                sets[tensor] = arrived
                every |= arrived
        return Sources(self.arrived(every), sets)

    def reach(self, tensor: torch.Tensor) -> int:
        """Returns what a tensor was computed from, as a set."""
        node = tensor.grad_fn
        return 0 if node is None else self.reach_of([(node, tensor.output_nr)])[0]

    def reach_of(self, edges: Iterable[tuple[Any, int]]) -> list[int]:
        """Returns the same for nodes, each with the number of the tensor among its outputs."""
        found = []
        with self._lock:
            for node, output in edges:
                if node.__class__ is RECEIVE_NODE:
                    found.append(self._output_of(node, output))
                    continue
                if node not in self._sets:
                    self._walk(node)
                found.append(self._sets[node])
        return found

    def bit_of(self, leaf: Any) -> int:
        """Returns the set of an AccumulateGrad node alone; 0 if it was not found yet."""
        with self._lock:
            bit = self._bits.get(leaf)
        return 0 if bit is None else 1 << bit

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
        found = self._set_of((sender, send_id, output))
        self._arrived |= found
        return found

    def _set_of(self, source: Any) -> int:
        bit = self._bits.get(source)
        if bit is None:
            bit = self._bits[source] = len(self._found)
            self._found.append(source)
        return 1 << bit

    def _walk(self, node: Any) -> None:
        """Finds the sets of a node and of all nodes below it; none of them has one yet."""
        sets = self._sets
        # The nodes above, each with the edges that are left, and with what the others lead to.
        above: list[tuple[Any, Iterator[tuple[Any, int]], int]] = []
        edges, found = iter(node.next_functions), 0
        while True:
            for below, output in edges:
                cls = below.__class__
                if cls is ACCUMULATE_NODE:
                    more = self._set_of(below)
                elif cls is RECEIVE_NODE:
                    more = self._output_of(below, output)
                elif below in sets:
                    more = sets[below]
                elif below is None:
                    continue
                else:
                    above.append((node, edges, found))
                    node, edges, found = below, iter(below.next_functions), 0
                    break
                # Most nodes lead to one other, and share its set.
                found = found | more if found else more
            else:
                sets[node] = more = found
                if not sequence_number(node):
                    rank_second_last(node)
                if not above:
                    return
                node, edges, found = above.pop()
                found = found | more if found else more


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
        # What is known of the tensors that each worker has sent, and the workers that were asked,
        # so that no more will be known.
        self._sources: defaultdict[MemberId, Sources] = defaultdict(lambda: Sources({}, {}))
        self._asked: set[MemberId] = set()
        # By worker, the set of the used tensors that it has received.
        self._used: defaultdict[MemberId, int] = defaultdict(int)
        # Used tensors whose sources are not known yet, each with the worker that has received it.
        self._unresolved: list[tuple[Arrived, MemberId]] = []

    def learn(self, member: MemberId, sources: Sources) -> None:
        """Takes a worker's part: what all tensors that it has sent were computed from.

        Raises:
            RpcError: a tensor that leads to the roots is not in it: an earlier pass has freed
                that part of the graph. Or the tensor is one of another context.
        """
        self._asked.add(member)
        self._add(member, sources)
        self._resolve()

    def use(self, member: MemberId, arrived: dict[int, Arrived]) -> None:
        """Adds tensors that a worker has received, by their bits, which lead to the roots."""
        self._sources[member].arrived.update(arrived)
        self._mark(member, sum(1 << bit for bit in arrived))
        self._resolve()

    def to_ask(self) -> set[MemberId]:
        """Returns the workers to ask now for their parts, all at once.

        A worker that has sent a tensor has most often computed it from what its receiver has sent,
        as in nested calls. So the receiver is asked too, in the same round.
        """
        members: set[MemberId] = set()
        for (sender, _, _), receiver in self._unresolved:
            members |= {sender, receiver}
        return members - self._asked

    def _add(self, member: MemberId, sources: Sources) -> None:
        known = self._sources[member]
        known.arrived.update(sources.arrived)
        known.sets.update(sources.sets)

    def _mark(self, member: MemberId, found: int) -> None:
        """Marks tensors as used that a worker has received."""
        new = found & ~self._used[member]
        if new:
            self._used[member] |= new
            arrived = self._sources[member].arrived
            received = self.received.setdefault(member, set())
            for bit in _bits_of(new):
                tensor = arrived[bit]
                received.add(tensor[:2])
                self._unresolved.append((tensor, member))

    def _resolve(self) -> None:
        waiting = []
        while self._unresolved:
            unresolved, self._unresolved = self._unresolved, []
            used: dict[MemberId, int] = {}
            for tensor, receiver in unresolved:
                found = self._sources_of(tensor)
                if found is None:
                    waiting.append((tensor, receiver))
                    continue
                sender, send_id, place = tensor
                self.sent.setdefault(sender, {}).setdefault(send_id, []).append(place)
                used[sender] = used.get(sender, 0) | found
            for sender, found in used.items():
                self._mark(sender, found)
        self._unresolved = waiting

    def _sources_of(self, tensor: Arrived) -> int | None:
        """Returns from what a tensor was computed by its sender, or None if that is not known."""
        sender, send_id, place = tensor
        if not send_id:
            raise RpcError(OF_ENDED_CONTEXT)
        sets = self._sources[sender].sets
        if (send_id, place) not in sets:
            if sender in self._asked:
                raise graph_freed()
            carried = self._carried((sender, send_id))
            if carried is not None:
                self._add(sender, carried)
        return sets.get((send_id, place))


def _bits_of(number: int) -> list[int]:
    if number.bit_count() << 4 > number.bit_length():  # many: one by one would take longer
        digits = bin(number)[:1:-1]
        return [bit for bit, digit in enumerate(digits) if digit == "1"]
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
