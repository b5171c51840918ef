"""Small messages beside large ones on their way to the same worker."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zrpc as rpc
from zrpc.testing.plugin import MakeMesh

MIB = 1 << 20
order = []
arrived = threading.Event()


def note(tensor: Any, name: Any) -> Any:
    order.append(name)
    if name == "large":
        arrived.set()
    return tensor.numel()


def send_both(size: Any) -> Any:
    """A large call, and then small ones until the large one is done."""
    order.clear()
    arrived.clear()
    large = rpc.rpc_async(1, note, (torch.zeros(size, dtype=torch.uint8), "large"))
    small = torch.zeros(1)
    while not large.done():
        rpc.rpc_sync(1, note, (small, "small"))
    assert large.wait() == size
    return order.index("large")


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "tcp"},
        {"transport": "tcp", "security": "none"},
        {"transport": "ipc", "shared_memory": 0},
    ],
    ids=["tcp", "plain tcp", "ipc"],
)
@pytest.mark.filterwarnings("ignore:.*security")
def test_small_calls_do_not_wait_for_a_large_one(make_mesh: MakeMesh, options: Any) -> None:
    mesh = make_mesh(workers=2, options={**options, "max_bytes_in_flight": 0})
    for _ in range(5):
        # How many is a matter of speed; that any get through before it is not.
        if mesh.run(0, send_both, 128 * MIB) > 0:
            break
    else:
        pytest.fail("all small calls waited until the large one was there")


@pytest.mark.system
def test_a_graceful_shutdown_waits_for_large_messages(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(workers=2, options={"transport": "ipc", "shared_memory": 0})
    arrived.clear()

    def leave_it_on_its_way() -> None:
        rpc.rpc_async(1, note, (torch.zeros(64 * MIB, dtype=torch.uint8), "large"))

    mesh.run(0, leave_it_on_its_way)
    mesh.shutdown()
    assert arrived.is_set()
