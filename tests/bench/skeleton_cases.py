"""A step of the skeleton, whose peer is forked; see `test_steps`."""

from __future__ import annotations

import copy

import pytest
import torch

from zrpc.bench import skeleton, targets


def gradients_at_the_peer(context: int) -> list[torch.Tensor]:
    return list(skeleton.gradients[context].values())


@pytest.mark.system
def test_a_step_of_the_skeleton_has_the_gradients_of_one_process() -> None:
    inputs, layer = torch.ones(32, 4), targets.linear(4)
    there = copy.deepcopy(layer)  # the peer is forked, so its layer is equal
    with skeleton.start_peer() as end:
        hidden = layer(inputs)
        for position in range(2):
            hidden = skeleton.RemoteLayer.apply(hidden, end, 7, position)
        found = [*torch.autograd.grad(hidden.sum(), list(layer.parameters()))]
        found += end.call(gradients_at_the_peer, 7)
    loss = there(there(layer(inputs))).sum()
    expected = torch.autograd.grad(loss, [*layer.parameters(), *there.parameters()])
    torch.testing.assert_close(found, list(expected))
