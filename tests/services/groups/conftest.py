"""What the tests of groups share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import zrpc
from tests.services.shm.conftest import _nothing_is_left  # noqa: F401


def outcomes(call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Makes a call that fails for some; returns each one's result, or the class of its error."""
    with pytest.raises(zrpc.GroupError) as caught:
        call(*args, **kwargs)
    errors = {place: type(error) for place, error in caught.value.errors.items()}
    return [each for _, each in sorted({**caught.value.results, **errors}.items())]
