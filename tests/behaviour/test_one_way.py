"""Two workers of which only one can connect to the other, as behind a firewall."""

from __future__ import annotations

import re
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
def test_a_call_without_a_timeout_fails_and_names_the_direction(mesh: Mesh, one_way: str) -> None:
    """It arrives, and its answer does not."""
    call = mesh.submit(0, rpc.rpc_sync, 1, echo, (1,), timeout=0)
    with pytest.raises(rpc.WorkerDied) as found:
        call.result(SOON)
    text = r"worker1 \(rank 1\) is gone: it could not connect to this worker.*has tried "
    assert re.search(text + re.escape(one_way), str(found.value))
    assert mesh.run(0, rpc.rpc_sync, 2, echo, (1,)) == 1
    with pytest.raises(rpc.WorkerDied, match=f"no connection to it at {one_way} could be made"):
        mesh.run(1, rpc.rpc_sync, 0, echo, (1,))


@pytest.mark.system
def test_a_call_the_other_way_fails_and_names_the_direction(mesh: Mesh, one_way: str) -> None:
    call = mesh.submit(1, rpc.rpc_sync, 0, echo, (1,), timeout=0)
    with pytest.raises(rpc.WorkerDied, match=f"no connection to it at {one_way} could be made"):
        call.result(SOON)
    with pytest.raises(rpc.WorkerDied, match="it could not connect to this worker"):
        mesh.run(0, rpc.rpc_sync, 1, echo, (1,), timeout=0)


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
