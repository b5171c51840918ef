"""Workers that die: what becomes of the RRefs that they owned, and of those that they held."""

from __future__ import annotations

from typing import Any

import pytest

import zrpc
from tests.services.shm.sharing import drop, keep, kept
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.agent.current import current_agent
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, processes=True, options={"rpc_timeout": 20})

# The functions below run in the workers' processes.


def make_and_keep(to: str) -> None:
    rref = zrpc.remote(to, list, args=((1, 2),))
    assert rref.to_here() == [1, 2]
    keep("rref", rref)


def give_to(to: str) -> None:
    zrpc.rpc_sync(to, keep, args=("rref", kept()["rref"]))


def fetch() -> Any:
    return kept()["rref"].to_here()


def sleep_long() -> None:
    import threading

    threading.Event().wait(60)


def start_to_wait(to: str) -> None:
    """Calls that are in flight when their worker dies."""
    make_and_keep(to)
    keep("waits", [zrpc.remote(to, sleep_long), zrpc.rpc_async(to, sleep_long)])


def errors(to: str) -> list[tuple[str, str]]:
    rref, (unmade, future) = kept()["rref"], kept()["waits"]
    with pytest.raises(zrpc.WorkerDied):  # so the loss is known from here on
        future.wait()
    given_up = rref.rpc_async().append(1)
    uses = [
        future.wait,
        rref.to_here,
        unmade.to_here,
        lambda: rref.rpc_sync().append(1),
        given_up.wait,
        lambda: rref.remote().copy().to_here(),
        lambda: zrpc.rpc_sync(to, echo, args=(rref,)),
        lambda: zrpc.remote(to, echo, args=(rref,)).to_here(),
    ]
    return [error_of(use) for use in uses]


def error_of(use: Any) -> tuple[str, str]:
    try:
        use()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def fetch_unmade(to: str) -> Any:
    return zrpc.remote(to, sleep_long).to_here()


def entries() -> Any:
    layer = current_agent().service(RRefService)
    with layer.lock:
        return sum(layer.references.sizes()), len(layer.values), layer.references.idle


def until_entries(*expected: Any) -> None:
    until(lambda: entries() == expected, lambda: f"{expected}, found {entries()}", collect=True)


def until_lost(rank: Any) -> None:
    until(lambda: rank in current_agent().membership.lost, "the loss is not noticed")


def test_the_rrefs_of_a_dead_owner_fail_at_once(mesh: Mesh) -> None:
    mesh.run(0, start_to_wait, "worker1")
    waiting = mesh.submit(0, fetch_unmade, "worker1")
    # The calls arrive at worker1 before what is asked of it afterwards.
    mesh.run(2, zrpc.rpc_sync, "worker1", max, args=(1, 2))
    mesh.kill(1)
    with pytest.raises(zrpc.WorkerDied, match="worker1"):
        waiting.result()
    # The future reports that the worker is gone; then everything else fails without a wait.
    found = mesh.run(0, errors, "worker1")
    assert [kind for kind, _ in found][:6] == ["WorkerDied", *["OwnerDied"] * 5]
    assert {kind for kind, _ in found[6:]} <= {"WorkerDied", "OwnerDied"}
    assert "worker1" in found[1][1]
    assert "is gone" in found[1][1]
    mesh.run(0, drop, "rref", "waits")
    mesh.run(0, until_entries, 0, 0, True)


def test_the_forks_of_a_dead_user_are_dropped_and_those_of_the_living_are_kept(mesh: Mesh) -> None:
    mesh.run(0, make_and_keep, "worker2")
    mesh.run(0, give_to, "worker1")
    mesh.kill(1)
    mesh.run(2, until_lost, 1)
    assert mesh.run(0, fetch) == [1, 2]
    mesh.run(0, until_lost, 1)
    assert mesh.run(0, error_of, lambda: give_to("worker1"))[0] == "WorkerDied"
    mesh.run(0, drop, "rref")
    for rank in (0, 2):
        mesh.run(rank, until_entries, 0, 0, True)


def test_the_living_shut_down_gracefully_after_a_death(mesh: Mesh) -> None:
    mesh.run(0, make_and_keep, "worker1")
    mesh.run(2, make_and_keep, "worker1")
    mesh.run(0, give_to, "worker2")
    mesh.kill(1)
    mesh.run(0, until_lost, 1)
    for future in [mesh.submit(rank, zrpc.shutdown) for rank in (0, 2)]:
        future.result()
