"""Two workers of which only one can connect to the other, as behind a firewall."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import zrpc as rpc
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh

LIMIT = 1.5

pytestmark = pytest.mark.zrpc(
    workers=3, timeout=60, options={"transport": "tcp", "heartbeat_timeout": LIMIT}
)


@pytest.fixture
def unreachable() -> Iterator[str]:
    """An address at which connections are neither accepted nor refused."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        yield f"tcp://127.0.0.1:{address[1]}"
        for filler in fillers:
            filler.close()


@pytest.fixture
def one_way(mesh: Mesh, unreachable: str) -> str:
    """Worker 1 can't connect to worker 0, which can connect to worker 1; returns the address."""
    network = mesh.agent(1).network
    network.connect([unreachable, *(network.endpoint(rank) for rank in (1, 2))])
    return unreachable


@pytest.mark.system
@pytest.mark.parametrize("caller", [0, 1])
def test_a_call_fails_and_names_the_direction(mesh: Mesh, one_way: str, caller: int) -> None:
    """That of worker 0 arrives, and its answer does not."""
    errors = {0: rf"worker1 \(rank 1\) is gone: it could not connect .*has tried {one_way}"}
    errors[1] = f"no connection to it at {one_way} could be made"
    call = mesh.submit(caller, rpc.rpc_sync, 1 - caller, echo, (1,), timeout=0)
    with pytest.raises(rpc.WorkerDied, match=errors[caller]):
        call.result(SOON)
    with pytest.raises(rpc.WorkerDied, match=errors[1 - caller]):
        mesh.run(1 - caller, rpc.rpc_sync, caller, echo, (1,), timeout=0)
    assert mesh.run(0, rpc.rpc_sync, 2, echo, (1,)) == 1


@pytest.mark.system
@pytest.mark.zrpc(options={"transport": "tcp", "heartbeat_timeout": 10})
def test_a_timeout_names_the_direction(mesh: Mesh, one_way: str) -> None:
    own = mesh.agent(0).network.tcp_endpoint
    with pytest.raises(rpc.RpcTimeoutError, match=f"not connected to this worker at {own} so far"):
        mesh.run(0, rpc.rpc_sync, 1, echo, (1,), timeout=1.0)
    text = f"no connection to it at {one_way} has been made so far"
    with pytest.raises(rpc.RpcTimeoutError, match=text):
        mesh.run(1, rpc.rpc_sync, 0, echo, (1,), timeout=1.0)
    # The next tests see that a shutdown of all ends: here it would wait for the lost connection.
    mesh.shutdown(graceful=False)


@pytest.mark.system
@pytest.mark.usefixtures("one_way")
@pytest.mark.parametrize("calls", [0, 1])
def test_the_shutdown_of_all_ends(mesh: Mesh, calls: int) -> None:
    with mesh.agent(0).as_current():
        pending = [rpc.rpc_async(1, echo, (1,), timeout=0) for _ in range(calls)]
    until(lambda: mesh.agent(1).dispatcher.received.get(0, 0) >= calls)
    for future in [mesh.submit(rank, rpc.shutdown) for rank in range(3)]:
        future.result(SOON)
    for call in pending:
        with pytest.raises(rpc.WorkerDied):
            call.wait()
