"""What the function of a batch gets, and how its result is taken apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from zrpc.batch_values import Call, columns, form_of, rows
from zrpc.errors import RpcError


class State(NamedTuple):
    hidden: Any
    cell: Any


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def test_a_call_without_arguments_is_refused() -> None:
    with pytest.raises(RpcError, match="expected a call with an argument, found none"):
        columns([call()], stack=False)


def test_tensors_of_nested_structures_are_stacked_and_taken_apart() -> None:
    given = [
        call({"x": torch.full((2,), float(i)), "s": State([torch.tensor(i)], f"n{i}")}, y=i)
        for i in range(3)
    ]
    (tree,), kwargs = columns(given, stack=True)
    assert tree["x"].shape == (3, 2)
    assert isinstance(tree["s"], State)
    assert torch.equal(tree["s"].hidden[0], torch.arange(3))
    assert tree["s"].cell == ["n0", "n1", "n2"]
    assert kwargs == {"y": [0, 1, 2]}
    for (args, _), row in zip(given, rows(tree, 3, True, "f"), strict=True):
        assert torch.equal(row["x"], args[0]["x"])
        assert row["s"].cell == args[0]["s"].cell
        assert torch.equal(row["s"].hidden[0], args[0]["s"].hidden[0])


def test_keyword_arguments_may_be_in_any_order() -> None:
    one, two = call(a=torch.zeros(1), b=torch.ones(2)), call(b=torch.ones(2), a=torch.zeros(1))
    for stack in (False, True):
        assert form_of(one, stack) == form_of(two, stack)
        assert [len(v) for v in columns([one, two], stack)[1].values()] == [2, 2]
    assert columns([one, two], stack=True)[1]["b"].shape == (2, 2)


def test_what_can_not_be_stacked_is_in_another_batch() -> None:
    form = form_of(call(torch.ones(2)), True)
    assert form_of(call(torch.zeros(2)), True) == form
    for other in (
        call(torch.ones(3)),
        call(torch.ones(2, dtype=torch.float64)),
        call([torch.ones(2)]),
        call(torch.ones(2), 1),
        call(x=torch.ones(2)),
        call(2),
    ):
        assert form_of(other, True) != form


def test_without_stacking_only_the_names_and_numbers_of_arguments_matter() -> None:
    assert form_of(call(1, k=2), False) == form_of(call(torch.ones(3), k="x"), False)
    assert form_of(call(1), False) != form_of(call(1, 2), False) != form_of(call(k=1), False)


def test_what_is_no_list_is_refused() -> None:
    wrong: list[tuple[Any, str]] = [
        (None, "None"),
        (5, "a int"),
        ({1: 2}, "a dict"),
        (torch.ones(2), "a Tensor; stack=True"),
    ]
    for result, found in wrong:
        with pytest.raises(RpcError, match=f"a list of 2 results .* f, .*found {found}"):
            rows(result, 2, False, "f")


def test_a_stacked_result_must_have_a_row_for_each_call() -> None:
    wrong: list[tuple[Any, str]] = [
        (torch.ones(3, 2), r"shape \(3, 2\)"),
        (torch.tensor(1.0), r"shape \(\)"),
        ({"a": torch.ones(2), "b": 1}, "a int"),
        ((torch.ones(2), [1]), "a list of 1"),
        ([torch.ones(4), torch.ones(4)], r"shape \(4,\)"),
        (None, "None"),
    ]
    for result, found in wrong:
        with pytest.raises(RpcError, match=f"2 .*found .*{found}"):
            rows(result, 2, True, "f")


def test_a_stacked_result_may_have_none_and_lists_beside_tensors_or_an_exception() -> None:
    first, second = rows((torch.arange(2), None, ["a", "b"]), 2, True, "f")
    assert (first[0].item(), first[1:]) == (0, (None, "a"))
    assert (second[0].item(), second[1:]) == (1, (None, "b"))
    error = ValueError("bad")
    assert rows([torch.ones(2), error], 2, True, "f")[1] is error
