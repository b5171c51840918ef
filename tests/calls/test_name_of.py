"""The names of functions in messages to people and in counts."""

from __future__ import annotations

import gc
import weakref

import torch

from zrpc.calls.function_names import name_of


def test_the_name_of_a_c_function_is_found_each_time() -> None:
    for _ in range(2):
        assert name_of((torch.add, (), {})) == torch.add.__qualname__
        assert name_of((len, (), {})) == "len"
        assert name_of(([].append, (), {})) == "list.append"


def test_what_asks_for_no_function_has_no_name() -> None:
    assert [name_of(body) for body in [((1, 2), ()), ((), ()), (), None]] == [""] * 4
    assert name_of(("append", (1,), {})) == "append"


def test_the_object_of_a_c_method_is_not_kept() -> None:
    class Items(dict[str, int]):
        """Has methods in C."""

    items = Items()
    gone = weakref.ref(items)
    assert name_of((items.update, (), {})).endswith("Items.update")
    assert name_of((Items.fromkeys, (), {})).endswith("Items.fromkeys")
    kept = weakref.ref(Items)
    del items, Items
    gc.collect()
    assert gone() is None
    assert kept() is None
