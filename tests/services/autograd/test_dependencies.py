"""Which tensors lead to the roots: found from the parts of all workers, in any order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.steps import count_steps
from zrpc.errors import RpcError
from zrpc.services.autograd.dependencies import Arrived, Origin, Sources, Tracer, UsedTensors
from zrpc.services.autograd.nodes import Receive, new_start
from zrpc.services.autograd.state import ContextState
from zrpc.wire.member_id import MemberId

START = new_start()
CONTEXT = 5


def receive(sender: int, send_id: int, count: int = 1, context_id: int = CONTEXT) -> Any:
    tensors = [torch.ones(2) for _ in range(count)]
    return Receive.apply(START, context_id, MemberId(sender), send_id, tensors)


def names(tracer: Tracer, tensor: torch.Tensor) -> set[Arrived]:
    return set(tracer.arrived(tracer.reach(tensor)).values())


def test_a_tensor_depends_on_what_it_was_computed_from() -> None:
    tracer = Tracer(CONTEXT)
    (a, b), (c,) = receive(1, 7, 2), receive(2, 7)
    leaf = torch.ones(2, requires_grad=True)
    x = a * leaf
    y = x + c.sin()
    assert names(tracer, x) == {(1, 7, 0)}
    assert names(tracer, y) == {(1, 7, 0), (2, 7, 0)}
    assert names(tracer, b) == {(1, 7, 1)}
    assert names(tracer, leaf * 2) == set()
    assert names(tracer, leaf) == set()
    assert [node.variable is leaf for node in tracer.leaves(tracer.reach(y))] == [True]
    assert tracer.leaves(tracer.reach(b)) == []


def test_a_long_graph_is_walked_once() -> None:
    tracer = Tracer(CONTEXT)
    [x] = receive(1, 1)
    found, steps = set(), []
    for _ in range(20):
        for _ in range(500):
            x = x + x
        steps.append(count_steps(lambda x=x: found.add(tracer.reach(x))))
    assert found == {1}
    assert max(steps) < 2 * steps[0]


def test_a_tensor_of_another_context_leads_nowhere() -> None:
    tracer = Tracer(CONTEXT)
    (own,), (other, _) = receive(1, 7), receive(2, 8, 2, context_id=CONTEXT + 1)
    reach = {(1, 0): tracer.reach(own), (1, 1): tracer.reach(own + other)}
    for place, fails in enumerate((False, True)):
        used = UsedTensors(
            lambda origin: tracer.sources(reach) if origin[1] == 1 else Sources({}, {(7, 0): 0})
        )
        with pytest.raises(RpcError, match="context had ended") if fails else nullcontext():
            used.use(MemberId(0), {0: (MemberId(3), 1, place)})


def test_sets_of_a_tracer_are_known_after_the_end_of_its_context() -> None:
    """A thread may be sending then."""
    state, [tensor] = ContextState(CONTEXT), receive(1, 7)
    reach = state.tracer.reach(tensor * 2)
    state.clear()
    assert state.tracer.sources({(5, 0): reach}) == Sources({0: (1, 7, 0)}, {(5, 0): 1})


# A mesh in which tensor n was sent by worker n % 3 as n + 1, and may depend on tensors with lower
# numbers that this worker has received.
GRAPHS = st.lists(st.sets(st.integers(0, 30), max_size=4), min_size=1, max_size=30).map(
    lambda drawn: [{source for source in each if source < n} for n, each in enumerate(drawn)]
)


def part(member: int, edges: list[set[int]]) -> Sources:
    sets = {
        (n + 1, 0): sum(1 << source for source in edges[n]) for n in range(member, len(edges), 3)
    }
    return Sources(arrived(set(range(len(edges)))), sets)


def arrived(tensors: set[int]) -> dict[int, Arrived]:
    return {n: (MemberId(n % 3), n + 1, 0) for n in tensors}


@pytest.mark.system
@given(
    GRAPHS,
    st.sets(st.integers(0, 29), max_size=3),
    st.sets(st.tuples(st.integers(0, 2), st.integers(1, 30))),
)
def test_what_is_used_is_what_the_roots_depend_on(
    edges: list[set[int]], roots: set[int], carried: set[Origin]
) -> None:
    """Whatever part of it came with messages, and was not asked for."""
    roots = {root for root in roots if root < len(edges)}
    expected, pending = set(), list(roots)
    while pending:
        tensor = pending.pop()
        if tensor not in expected:
            expected.add(tensor)
            pending += edges[tensor]

    def sources(origin: Origin) -> Sources | None:
        known = part(origin[0], edges)
        return Sources(known.arrived, {(origin[1], 0): known.sets[origin[1], 0]})

    used = UsedTensors(lambda origin: sources(origin) if origin in carried else None)
    used.learn(MemberId(0), part(0, edges))
    used.use(MemberId(0), arrived(roots))
    asked = {0}
    while members := used.to_ask():
        assert not members & asked
        asked |= members
        for member in members:
            used.learn(member, part(member, edges))

    found = [send_id for sent in used.sent.values() for send_id in sent]
    assert sorted(found) == sorted(n + 1 for n in expected)
    for member in used.sent:
        needed = {s for n in expected if n % 3 == member for s in edges[n]}
        if member == 0:
            needed |= roots
        assert used.received.get(member, set()) == {(s % 3, s + 1) for s in needed}


def test_a_used_tensor_that_its_sender_has_no_more() -> None:
    used = UsedTensors(lambda _: None)
    used.use(MemberId(0), {0: (MemberId(1), 5, 0)})
    with pytest.raises(RpcError, match="retain_graph=True"):
        used.learn(MemberId(1), Sources({}, {}))


def test_nested_calls_are_asked_about_in_one_round() -> None:
    """Worker0 calls worker1, which calls worker2: only worker1's answer to worker0 is known."""
    zero, one, two = (MemberId(member) for member in range(3))
    of_one = Sources({0: (zero, 1, 0), 1: (two, 1, 0)}, {(1, 0): 1, (2, 0): 2})
    of_two = Sources({0: (one, 1, 0)}, {(1, 0): 1})
    said = Sources({1: (two, 1, 0)}, {(2, 0): 2})
    used = UsedTensors(lambda origin: said if origin == (one, 2) else None)
    used.learn(zero, Sources({}, {(1, 0): 0}))
    used.use(zero, {0: (one, 2, 0)})
    assert used.to_ask() == {one, two}
    used.learn(one, of_one)
    used.learn(two, of_two)
    assert used.to_ask() == set()
    assert used.sent[one] == {1: [0], 2: [0]}
    assert used.sent[two] == {1: [0]}
