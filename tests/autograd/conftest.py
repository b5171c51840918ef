from __future__ import annotations

from collections.abc import Iterator

import pytest
from split_models import forget_functions


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    forget_functions()
