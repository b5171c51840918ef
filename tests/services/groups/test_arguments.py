"""Which member gets what. Without a mesh."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zrpc
from zrpc.services.groups.arguments import Each, Split


class Batch(NamedTuple):
    seen: torch.Tensor
    reward: float


def parts(value: Any, count: int, dim: int = 0) -> Any:
    return Split(value, dim).values(count)


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_sequence_is_divided_as_torch_divides_a_tensor(length: int, count: int) -> None:
    expected = [part.tolist() for part in torch.tensor_split(torch.arange(length), count)]
    assert [part.tolist() for part in parts(torch.arange(length), count)] == expected
    assert parts(list(range(length)), count) == expected
    assert [list(part) for part in parts(range(length), count)] == expected


def test_a_tensor_is_divided_along_a_dimension() -> None:
    tensor = torch.arange(12).reshape(2, 6)
    assert torch.equal(parts(tensor, 3, dim=1)[1], tensor[:, 2:4])
    assert torch.equal(parts(tensor, 3, dim=-1)[2], tensor[:, 4:])


def test_each_tensor_and_each_list_of_a_structure_is_divided() -> None:
    value = {"a": torch.arange(4), "b": (torch.arange(6), ["x", "y"]), "rate": 0.5, "name": "n"}
    first, second = parts(value, 2)
    assert first["a"].tolist() == [0, 1]
    assert second["a"].tolist() == [2, 3]
    assert first["b"][0].tolist() == [0, 1, 2]
    assert first["b"][1] == ["x"]
    assert second["b"][1] == ["y"]
    assert first["rate"] == second["rate"] == 0.5
    assert first["name"] == "n"


def test_each_member_gets_a_structure_that_is_empty() -> None:
    for value in ({}, {"a": {}}):
        assert parts(value, 2) == [value, value]


def test_named_tuples_are_structures_and_other_sequences_are_divided() -> None:
    first, second = parts(Batch(torch.arange(3), 0.1), 2)
    assert isinstance(first, Batch)
    assert (first.seen.tolist(), second.seen.tolist(), second.reward) == ([0, 1], [2], 0.1)
    # A list of tensors too: prompts, say, which differ in their length.
    first, second = parts([torch.arange(length) for length in (3, 1, 2)], 2)
    assert [len(each) for each in first] == [3, 1]
    assert [len(each) for each in second] == [2]
    assert parts(("a", "b", "c"), 2) == [("a", "b"), ("c",)]
    assert parts(deque("abc"), 2) == [deque("ab"), deque("c")]
    assert parts({"seen": deque([1])}, 2) == [{"seen": deque([1])}, {"seen": deque()}]


def test_what_has_no_parts_is_refused() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    for value in (5, "text", b"bytes", None, object(), packed):
        with pytest.raises(TypeError, match="expected a tensor, a sequence, or a structure"):
            parts(value, 2)
    for tensor in (torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2)])):
        with pytest.raises(TypeError, match="expected a dense tensor to split"):
            parts(tensor, 2)


def test_a_dimension_that_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected tensors with a dimension 1 .*shape \(4,\)"):
        parts(torch.arange(4), 2, dim=1)
    with pytest.raises(ValueError, match=r"dimension 0 to split, found one of shape \(\)"):
        parts({"a": torch.arange(4), "b": torch.tensor(1)}, 2)
    with pytest.raises(ValueError, match=r"dimension 0 to split, found one of shape \(\)"):
        parts({"a": torch.arange(4), "b": torch.tensor(1).numpy()}, 2)
    with pytest.raises(ValueError, match="expected a tensor to split along dimension 1"):
        parts([1, 2], 2, dim=1)


def test_each_needs_as_many_values_as_members() -> None:
    assert Each(iter("ab")).values(2) == ["a", "b"]
    with pytest.raises(ValueError, match=r"each\(\) of 3 values.*found 2"):
        Each("ab").values(3)


@pytest.mark.zrpc(workers=2)
def test_marks_are_for_groups(mesh: Any) -> None:
    with mesh.agent(0).as_current():
        for mark in (zrpc.split([1]), zrpc.each([1]), zrpc.share([1])):
            with pytest.raises(zrpc.RpcError, match="expected a call of a group"):
                zrpc.rpc_sync("worker1", len, args=(mark,))
