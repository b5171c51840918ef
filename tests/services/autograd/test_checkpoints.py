"""Checkpoints within a remote stage, and remote stages within a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint

from tests.services.autograd.split_models import (
    LEAVES,
    X,
    assert_as_local,
    call,
    layer,
    train,
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def checkpointed(rank: Any, x: Any, **options: Any) -> Any:
    return checkpoint(layer, rank, x, **options)


def test_checkpoints_within_a_remote_stage(mesh: Mesh) -> None:
    def model() -> Any:
        x = call("worker1", checkpointed, 1, X * 2, use_reentrant=False)
        return (checkpointed(0, x, use_reentrant=False) * x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_remote_stage_within_a_checkpoint(mesh: Mesh) -> None:
    def stage(x: Any) -> Any:
        return call("worker1", layer, 1, x.sin()).sin()

    def model() -> Any:
        return checkpoint(stage, X * 2, use_reentrant=False).sum()

    assert_as_local(mesh, model, LEAVES)


def test_reentrant_checkpoints_are_refused_by_torch(mesh: Mesh) -> None:
    def model() -> Any:
        return call("worker1", checkpointed, 1, X * 2, use_reentrant=True).sum()

    with pytest.raises(RuntimeError, match=r"(?s)Error on Node 1.*use_reentrant"):
        train(mesh, model)
    assert_as_local(mesh, lambda: call("worker1", layer, 1, X).sum(), LEAVES)
