import gc

import pytest
from tracked import forget_all


@pytest.fixture(scope="module", autouse=True)
def _quick_collection():
    """These tests collect garbage often: not each time through all of torch's modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _forget():
    yield
    forget_all()
