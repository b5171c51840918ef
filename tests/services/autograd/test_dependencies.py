"""How it is found which tensors lead to the roots: in little work, and with few questions."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.steps import count_steps
from zrpc.services.autograd.dependencies import Sources, Tracer, UsedTensors
from zrpc.services.autograd.nodes import Receive, new_start
from zrpc.services.autograd.state import ContextState
from zrpc.wire.member_id import MemberId

START = new_start()
CONTEXT = 5


def received() -> Any:
    """Returns a tensor that worker1 has sent in its seventh message."""
    [tensor] = Receive.apply(START, CONTEXT, MemberId(1), 7, [torch.ones(2)])
    return tensor


def test_a_long_graph_is_walked_once() -> None:
    tracer, x = Tracer(CONTEXT), received()
    found, steps = set(), []
    for _ in range(10):
        for _ in range(100):
            x = x + x
        steps.append(count_steps(lambda x=x: found.add(tracer.reach(x))))
    assert found == {1}
    assert max(steps) < 2 * steps[0]


def test_sets_of_a_tracer_are_known_after_the_end_of_its_context() -> None:
    """A thread may be sending then."""
    state = ContextState(CONTEXT)
    reach = state.tracer.reach(received() * 2)
    state.clear()
    assert state.tracer.sources({(5, 0): reach}) == Sources({0: (1, 7, 0)}, {(5, 0): 1})


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
    assert used.received == {zero: {(one, 2)}, one: {(two, 1), (zero, 1)}, two: {(one, 1)}}
