"""NumPy arrays: what arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.travel import LARGE, SMALL, back
from zrpc.testing import Mesh


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(SMALL),
        lambda: np.arange(LARGE),
        lambda: np.arange(LARGE).reshape(100, -1).T,
        lambda: np.asfortranarray(np.arange(LARGE).reshape(100, -1)),
        lambda: np.arange(LARGE)[::3],
        lambda: np.float32(1.5),
        lambda: np.array(5),
        lambda: np.empty((0, 3)),
        lambda: np.array(["a", "bc"] * LARGE),
        lambda: np.array([1, "a", None], dtype=object),
        lambda: np.array([(1, 2.0)] * LARGE, dtype=[("a", "i4"), ("b", "f8")]),
        lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
        lambda: np.arange(LARGE).astype(">i4"),
        lambda: np.ma.masked_array([1, 2], [True, False]),
    ],
)
def test_numpy(shared: Mesh, make: Callable[[], Any]) -> None:
    sent = make()
    received = back(sent)
    assert type(received) is type(sent)
    assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
    np.testing.assert_array_equal(received, sent)


def test_read_only_array(shared: Mesh) -> None:
    for size in (SMALL, LARGE):
        sent = np.arange(size)
        sent.flags.writeable = False
        received = back(sent)
        np.testing.assert_array_equal(received, sent)
        assert not received.flags.writeable
