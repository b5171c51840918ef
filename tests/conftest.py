"""What all tests share."""

from __future__ import annotations

import gc

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Has the garbage collector pass by what was there before a module's tests: all of torch.

    Each full collection, of which some tests ask for many, takes a quarter of a second else.
    """
    gc.collect()
    gc.freeze()
