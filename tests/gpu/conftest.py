"""Meshes of processes that share one GPU. Without a GPU, the fake device is used instead.

Tests with the marker `gpu` need CUDA, and are skipped without it.
"""

from __future__ import annotations

import pytest
import torch

from zrpc.testing import Mesh, fake_device
from zrpc.testing.plugin import MakeMesh

CUDA = "cuda:0"


@pytest.fixture(params=[pytest.param(CUDA, marks=pytest.mark.gpu), "fake:0"])
def device(request: pytest.FixtureRequest) -> str:
    """A device that all workers use."""
    name: str = request.param
    has_gpu = torch.cuda.is_available()
    if name == CUDA and not has_gpu:
        pytest.skip("needs a GPU: torch finds none that CUDA can use")
    if name != CUDA and has_gpu:
        pytest.skip("there is a GPU, and torch's backward passes on it fail beside another device")
    if name != CUDA:
        fake_device()
    return name


@pytest.fixture
def gpu_mesh(make_mesh: MakeMesh, device: str) -> Mesh:
    """Three processes, each with a device map for the others; the test's uses no GPU itself."""
    options = {"device_maps": {"*": {device: device}}}
    return make_mesh(workers=3, processes=True, options=options)
