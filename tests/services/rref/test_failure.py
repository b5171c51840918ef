"""Workers that die: what becomes of the RRefs that they owned, and of those that they held."""

from __future__ import annotations

from typing import Any

import pytest

import zrpc
from tests.support.waiting import until
from zrpc.agent.current import current_agent
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, processes=True, options={"rpc_timeout": 20})

# The functions below run in the workers' processes, to which they go by value: each time with
# globals of their own. So what is to last is kept in a module that they import.


def keep(name: Any, value: Any) -> None:
    import zrpc.testing.spec as anywhere

    if not hasattr(anywhere, "kept"):
        anywhere.kept = {}
    anywhere.kept[name] = value


def kept(name: Any) -> Any:
    import zrpc.testing.spec as anywhere

    return anywhere.kept[name]


def make_and_keep(name: Any, to: Any) -> None:
    rref = zrpc.remote(to, list, args=((1, 2),))
    assert rref.to_here() == [1, 2]
    keep(name, rref)


def sleep_long() -> None:
    import threading

    threading.Event().wait(60)


def start_to_wait(name: Any, to: Any) -> None:
    """Calls that are under way when their worker dies."""
    rref = zrpc.remote(to, list)
    rref.to_here()
    unmade = zrpc.remote(to, sleep_long)
    keep(name, [rref, unmade, zrpc.rpc_async(to, sleep_long)])


def types_of_errors(name: Any) -> Any:
    rref, unmade, future = kept(name)
    uses = [
        future.wait,
        rref.to_here,
        unmade.to_here,
        lambda: rref.rpc_sync().append(1),
        lambda: rref.rpc_async().append(1).wait(),
        lambda: rref.remote().copy().to_here(),
    ]
    return [type_of_error(use) for use in uses]


def type_of_error(use: Any) -> Any:
    try:
        use()
    except Exception as error:
        return type(error).__name__
    return "no error"


def entries() -> Any:
    layer = current_agent().service(RRefService)
    with layer.lock:
        return sum(layer.references.sizes()), len(layer.values), layer.references.idle


def until_entries(expected: Any) -> None:
    until(lambda: entries() == expected, lambda: f"{expected}, found {entries()}", collect=True)


def until_lost(rank: Any) -> None:

    until(lambda: rank in current_agent().membership.lost, "the loss is not noticed")


def hold(rref: Any) -> None:
    keep("held", rref)


def identity(value: Any) -> Any:
    return value


def test_the_rrefs_of_a_dead_owner_fail_at_once(mesh: Mesh) -> None:
    mesh.run(0, start_to_wait, "waits", "worker1")
    mesh.kill(1)
    # The future tells that the worker is gone; then everything else fails without a wait.
    assert mesh.run(0, types_of_errors, "waits") == ["WorkerDied", *["OwnerDied"] * 5]


def fetch(name: Any) -> Any:
    return kept(name).to_here()


def fetch_unmade(to: Any) -> Any:
    rref = zrpc.remote(to, sleep_long)
    keep("asked", True)
    return rref.to_here()


def test_a_fetch_in_flight_fails_when_the_owner_dies(mesh: Mesh) -> None:
    waiting = mesh.submit(0, fetch_unmade, "worker1")
    # The call arrives at worker1 before what is asked of it afterwards.
    mesh.run(2, zrpc.rpc_sync, "worker1", max, args=(1, 2))
    mesh.kill(1)
    with pytest.raises(zrpc.WorkerDied, match="worker1"):
        waiting.result()


def message_of_owner_died() -> Any:
    try:
        kept("rref").to_here()
    except zrpc.OwnerDied as error:
        return str(error)
    return "no error"


def test_the_error_names_the_lost_worker(mesh: Mesh) -> None:
    mesh.run(0, make_and_keep, "rref", "worker1")
    mesh.kill(1)
    mesh.run(0, until_lost, 1)
    text = mesh.run(0, message_of_owner_died)
    assert "worker1" in text
    assert "is gone" in text


def give_to(to: Any, rref_name: Any) -> None:
    zrpc.rpc_sync(to, hold, args=(kept(rref_name),))


def forget(name: Any) -> None:
    import zrpc.testing.spec as anywhere

    del anywhere.kept[name]


def test_the_forks_of_a_dead_user_are_dropped(mesh: Mesh) -> None:
    mesh.run(0, make_and_keep, "rref", "worker2")
    mesh.run(0, give_to, "worker1", "rref")
    mesh.run(0, forget, "rref")
    mesh.run(0, until_entries, (0, 0, True))
    mesh.run(2, until_entries, (1, 1, True))  # worker1 has it
    mesh.kill(1)
    mesh.run(2, until_entries, (0, 0, True))


def test_the_forks_of_the_living_are_kept(mesh: Mesh) -> None:
    mesh.run(0, make_and_keep, "rref", "worker2")
    mesh.run(0, give_to, "worker1", "rref")
    mesh.kill(1)
    mesh.run(2, until_lost, 1)
    assert mesh.run(0, fetch, "rref") == [1, 2]
    mesh.run(0, forget, "rref")
    mesh.run(2, until_entries, (0, 0, True))


def call_the_dead(to: Any, name: Any) -> None:
    for call in (zrpc.rpc_sync, zrpc.remote):
        try:
            result = call(to, identity, args=(kept(name),))
            if call is zrpc.remote:
                result.to_here()
        except zrpc.WorkerDied:
            continue
        raise AssertionError("the dead have answered")


def test_an_rref_that_was_sent_to_the_dead_is_freed(mesh: Mesh) -> None:
    mesh.run(0, make_and_keep, "rref", "worker2")
    mesh.kill(1)
    mesh.run(0, until_lost, 1)
    mesh.run(0, call_the_dead, "worker1", "rref")
    mesh.run(0, forget, "rref")
    mesh.run(0, until_entries, (0, 0, True))
    mesh.run(2, until_entries, (0, 0, True))


def test_the_living_shut_down_gracefully_after_a_death(mesh: Mesh) -> None:
    mesh.run(0, make_and_keep, "rref", "worker1")
    mesh.run(2, make_and_keep, "rref", "worker1")
    mesh.run(0, give_to, "worker2", "rref")
    mesh.kill(1)
    mesh.run(0, until_lost, 1)
    for future in [mesh.submit(rank, zrpc.shutdown) for rank in (0, 2)]:
        future.result()
