"""Which tensors lead to the roots: found from the parts of all workers, in any order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zrpc.errors import ProtocolError, RpcError
from zrpc.services.autograd.dependencies import (
    Arrived,
    Dependencies,
    Origin,
    Sources,
    Tracer,
    UsedTensors,
    pack_sources,
    read_sources,
)
from zrpc.services.autograd.nodes import Receive, new_start
from zrpc.wire.member_id import MemberId

START = new_start()
CONTEXT = 5


def receive(sender: int, send_id: int, count: int = 1, context_id: int = CONTEXT) -> Any:
    tensors = [torch.ones(2) for _ in range(count)]
    return Receive.apply(START, context_id, MemberId(sender), send_id, tensors)


def names(tracer: Tracer, found: int) -> set[tuple[int, int, int]]:
    return {tuple(each) for bit, each in enumerate(tracer.arrived) if found >> bit & 1}


def test_a_tensor_depends_on_what_it_was_computed_from() -> None:
    tracer = Tracer(CONTEXT)
    (a, b), (c,) = receive(1, 7, 2), receive(2, 7)
    leaf = torch.ones(2, requires_grad=True)
    x = a * leaf
    y = x + c.sin()
    assert names(tracer, tracer.reach(x).arrived) == {(1, 7, 0)}
    assert names(tracer, tracer.reach(y).arrived) == {(1, 7, 0), (2, 7, 0)}
    assert names(tracer, tracer.reach(b).arrived) == {(1, 7, 1)}
    assert names(tracer, tracer.reach(leaf * 2).arrived) == set()
    assert names(tracer, tracer.reach(leaf).arrived) == set()


def test_a_long_graph_is_walked_once() -> None:
    tracer = Tracer(CONTEXT)
    [x] = receive(1, 1)
    found = set()
    for _ in range(20):
        for _ in range(500):
            x = x + x
        found.add(tracer.reach(x).arrived)
    assert found == {1}
    assert len(tracer._sets) < 20 * 500 + 10


def test_a_tensor_of_another_context_leads_nowhere() -> None:
    tracer = Tracer(CONTEXT)
    (own,), (other, _) = receive(1, 7), receive(2, 8, 2, context_id=CONTEXT + 1)
    packed = pack_sources(
        [tracer.reach(own).arrived, tracer.reach(own + other).arrived], tracer.arrived
    )
    sources = read_sources(packed)
    for place, fails in enumerate((False, True)):
        used = UsedTensors(lambda origin: sources if origin[1] == 1 else Sources({}, [0]))
        used.learn(MemberId(0), Dependencies([Arrived(MemberId(3), 1, place)], {}))
        with pytest.raises(RpcError, match="context had ended") if fails else nullcontext():
            used.use(MemberId(0), 1)


# A mesh in which tensor n was sent by worker n % 3 as n + 1, and may depend on tensors with lower
# numbers that this worker has received.


def part(member: int, edges: list[set[int]]) -> Dependencies:
    arrived = [Arrived(MemberId(n % 3), n + 1, 0) for n in range(len(edges))]
    sent = {
        (n + 1, 0): sum(1 << source for source in edges[n])
        for n in range(len(edges))
        if n % 3 == member
    }
    return Dependencies(arrived, sent)


@pytest.mark.system
@given(
    st.lists(st.sets(st.integers(0, 30), max_size=4), min_size=1, max_size=30),
    st.sets(st.integers(0, 29), max_size=3),
)
def test_what_is_used_is_what_the_roots_depend_on(drawn: list[set[int]], roots: set[int]) -> None:
    edges = [{source for source in each if source < n} for n, each in enumerate(drawn)]
    roots = {root for root in roots if root < len(edges)}
    expected, pending = set(), list(roots)
    while pending:
        tensor = pending.pop()
        if tensor not in expected:
            expected.add(tensor)
            pending += edges[tensor]

    used = UsedTensors(lambda _: None)
    used.learn(MemberId(0), part(0, edges))
    used.use(MemberId(0), sum(1 << root for root in roots))
    asked = {0}
    while members := used.to_ask():
        for member in members:
            assert member not in asked
            asked.add(member)
            used.learn(member, part(member, edges))

    found = [send_id for sent in used.sent.values() for send_id in sent]
    assert sorted(found) == sorted(n + 1 for n in expected)
    for member in used.sent:
        sources = {s for n in expected if n % 3 == member for s in edges[n]}
        if member == 0:
            sources |= roots
        assert used.received.get(member, set()) == {(s % 3, s + 1) for s in sources}


def test_a_used_tensor_that_its_sender_has_no_more() -> None:
    used = UsedTensors(lambda _: None)
    used.learn(MemberId(0), Dependencies([Arrived(MemberId(1), 5, 0)], {}))
    used.use(MemberId(0), 1)
    with pytest.raises(RpcError, match="retain_graph=True"):
        used.learn(MemberId(1), Dependencies([], {}))


@pytest.mark.system
@given(
    st.lists(st.sets(st.integers(0, 30), max_size=4), min_size=1, max_size=30),
    st.sets(st.integers(0, 29), max_size=3),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 29))),
)
def test_what_messages_say_is_enough_for_what_arrived(
    drawn: list[set[int]], roots: set[int], carried: set[tuple[int, int]]
) -> None:
    """Whatever part of it came with messages, and was not asked for."""
    edges = [{source for source in each if source < n} for n, each in enumerate(drawn)]
    roots = {root for root in roots if root < len(edges)}
    parts = [part(member, edges) for member in range(3)]

    def sources(origin: Origin) -> Sources | None:
        if origin not in carried:
            return None
        member, send_id = origin
        found = parts[member].sent[send_id, 0]
        return read_sources(pack_sources([found], parts[member].arrived))

    def resolve(used: UsedTensors) -> Any:
        used.learn(MemberId(0), parts[0])
        used.use(MemberId(0), sum(1 << root for root in roots))
        while members := used.to_ask():
            for member in members:
                used.learn(member, parts[member])
        sent = {
            (member, send_id, place)
            for member, messages in used.sent.items()
            for send_id, places in messages.items()
            for place in places
        }
        return sent, used.received

    assert resolve(UsedTensors(sources)) == resolve(UsedTensors(lambda _: None))


def test_sources_that_end_too_early() -> None:
    packed = pack_sources([1], [Arrived(MemberId(1), 7, 0)])
    assert read_sources(packed).sets == [1]
    for size in range(1, len(packed)):
        with pytest.raises(ProtocolError, match="end too early"):
            read_sources(packed[:size])


def test_nested_calls_are_asked_about_in_one_round() -> None:
    """Worker0 calls worker1, which calls worker2: only worker1's answer to worker0 is known."""
    zero, one, two = (MemberId(member) for member in range(3))
    to_one, to_two = Arrived(zero, 1, 0), Arrived(one, 1, 0)
    from_two, from_one = Arrived(two, 1, 0), Arrived(one, 2, 0)
    parts = {
        zero: Dependencies([from_one], {(1, 0): 0}),
        one: Dependencies([to_one, from_two], {(1, 0): 1, (2, 0): 2}),
        two: Dependencies([to_two], {(1, 0): 1}),
    }

    def carried(origin: Origin) -> Sources | None:
        if origin != (one, 2):
            return None
        return read_sources(pack_sources([parts[one].sent[2, 0]], parts[one].arrived))

    used = UsedTensors(carried)
    used.learn(zero, parts[zero])
    used.use(zero, 1)
    asked = used.to_ask()
    assert asked == {one, two}
    for member in asked:
        used.learn(member, parts[member])
    assert used.to_ask() == set()
    assert used.sent[one] == {1: [0], 2: [0]}
    assert used.sent[two] == {1: [0]}
