"""Whether a program has hooks on nodes is known without a look at any node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.waiting import until
from zrpc.services.autograd import engine, nodes
from zrpc.services.autograd.nodes import OwnHook, any_registered
from zrpc.services.autograd.state import ContextState


@pytest.fixture(autouse=True)
def _no_hooks_of_other_tests() -> Iterator[None]:
    until(lambda: not any_registered(), "the hooks of other tests are gone", collect=True)
    yield
    assert not any_registered()


def accumulator_of(leaf: torch.Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]


def nothing(*_: Any) -> None: ...


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_counts_until_it_is_removed(register: str) -> None:
    node = accumulator_of(torch.rand(3, requires_grad=True))
    handles = [getattr(node, register)(nothing) for _ in range(2)]
    assert any_registered()
    handles.pop().remove()
    assert any_registered()
    handles.pop().remove()
    assert not any_registered()
    handles.append(getattr(node, register)(nothing))
    assert any_registered()
    handles.pop().remove()


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_counts_until_its_node_is_freed(register: str) -> None:
    node = accumulator_of(torch.rand(3, requires_grad=True))
    getattr(node, register)(nothing)
    assert any_registered()
    number = len(nodes._noted)
    del node
    assert not any_registered()
    assert len(nodes._noted) < number


def test_own_hooks_do_not_count() -> None:
    node = accumulator_of(torch.rand(3, requires_grad=True))
    node.register_hook(OwnHook(nothing))
    node.register_prehook(OwnHook(nothing))
    assert not any_registered()


BEFORE = """
import torch
node = torch.ones(1, requires_grad=True).view(1).grad_fn
node.register_hook(print).remove()
from zrpc.services.autograd.nodes import any_registered
print(any_registered())
"""


@pytest.mark.system
def test_hooks_may_be_there_if_some_were_registered_before_zrpc() -> None:
    assert subprocess.check_output([sys.executable, "-c", BEFORE], text=True) == "True\n"


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_nodes_of_leaves_with_hooks_run(register: str) -> None:
    plain, hooked = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    handle = getattr(hooked, register)(nothing)
    assert engine.must_run([plain, hooked])
    assert not engine.must_run([plain])
    handle.remove()
    assert not engine.must_run([plain, hooked])


def test_a_run_without_hooks_looks_at_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, state = torch.rand(3, requires_grad=True), ContextState(1)
    node = accumulator_of(leaf)
    registered = []
    note = torch.autograd.Function._register_hook  # type: ignore[attr-defined]

    def register(*arguments: Any) -> Any:
        registered.append(True)
        return note(*arguments)

    monkeypatch.setattr(torch.autograd.Function, "_register_hook", staticmethod(register))
    engine.run([(leaf * 2).sum()], state.start, False, state)
    assert not registered
    torch.testing.assert_close(state.gradients, {leaf: torch.full((3,), 2.0)})
    node.register_hook(nothing)
    engine.run([(leaf * 2).sum()], state.start, False, state)
    assert registered
    torch.testing.assert_close(state.gradients, {leaf: torch.full((3,), 4.0)})
