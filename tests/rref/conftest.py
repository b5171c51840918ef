import pytest
from tracked import forget_all


@pytest.fixture(autouse=True)
def _forget():
    yield
    forget_all()
