"""NumPy arrays: what arrives."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.travel import LARGE, SMALL, back
from zrpc.testing import Mesh

ARRAYS: list[Any] = [
    np.arange(SMALL),
    np.arange(LARGE),
    np.arange(LARGE).reshape(100, -1).T,
    np.asfortranarray(np.arange(LARGE).reshape(100, -1)),
    np.arange(LARGE)[::3],
    np.float32(1.5),
    np.array(5),
    np.empty((0, 3)),
    np.array(["a", "bc"] * LARGE),
    np.array([1, "a", None], dtype=object),
    np.array([(1, 2.0)] * LARGE, dtype=[("a", "i4"), ("b", "f8")]),
    np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.arange(LARGE).astype(">i4"),
    np.ma.masked_array([1, 2], [True, False]),
]


def test_numpy(shared: Mesh) -> None:
    for sent in ARRAYS:
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
