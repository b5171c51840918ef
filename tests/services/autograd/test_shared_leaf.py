"""A leaf that several threads use at once."""

from __future__ import annotations

import threading

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from zrpc.testing import Mesh


def share_a_leaf(layout: str) -> None:
    """Sends a leaf in one thread, and starts graphs at it in two others."""
    leaf = torch.eye(3)
    leaf = (leaf.to_sparse() if layout == "sparse" else leaf).requires_grad_()
    done = threading.Event()

    def start_graphs() -> None:
        while not done.is_set():
            leaf * 1

    threads = [threading.Thread(target=start_graphs) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            with dist_autograd.context():
                zrpc.rpc_sync("worker1", torch.numel, (leaf,))
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.zrpc(workers=2, processes=True, timeout=120)
@pytest.mark.parametrize("layout", ["strided", "sparse"])
def test_a_leaf_is_sent_while_other_threads_use_it(mesh: Mesh, layout: str) -> None:
    """The interpreter's lock is not held while torch's lock of the leaf is waited for."""
    mesh.submit(0, share_a_leaf, layout).result(60)
