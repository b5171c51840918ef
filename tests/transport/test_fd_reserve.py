"""Descriptors in reserve for when there are no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.descriptors import Descriptors, few_descriptors
from zrpc.transport.fd_reserve import DescriptorReserve

SIZE, LEFT = 4, 20


@pytest.fixture
def descriptors() -> Iterator[Descriptors]:
    with few_descriptors(LEFT) as descriptors:
        yield descriptors


@pytest.fixture
def reserve(descriptors: Descriptors) -> DescriptorReserve:
    return DescriptorReserve(SIZE)


def test_the_reserve_is_kept_while_it_has_users(
    reserve: DescriptorReserve, descriptors: Descriptors
) -> None:
    for users in (1, 2):
        reserve.add_user()
        assert reserve.refresh()
        assert descriptors.left == LEFT - SIZE, users
    reserve.remove_user()
    assert descriptors.left == LEFT - SIZE
    reserve.remove_user()
    assert reserve.refresh()
    assert descriptors.left == LEFT


def test_the_reserve_is_released_for_others_and_filled_again_when_twice_its_size_is_left(
    reserve: DescriptorReserve, descriptors: Descriptors
) -> None:
    reserve.add_user()
    descriptors.leave(0)
    for _ in range(2):
        assert reserve.refresh()  # the reserved ones are left now, and stay so
        assert reserve.released
        assert descriptors.left == SIZE
    assert not reserve.release()
    descriptors.leave(0)
    assert not reserve.refresh()
    descriptors.leave(2 * SIZE - 1)
    reserve.refresh()
    assert reserve.released
    descriptors.leave(2 * SIZE)
    assert reserve.refresh()
    assert not reserve.released
    assert descriptors.left == SIZE
    reserve.remove_user()
    assert descriptors.left == 2 * SIZE
