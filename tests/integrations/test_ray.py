"""Workers in the actors of a real Ray on this machine. Skipped if Ray isn't installed."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import zrpc
from tests.support.waiting import until
from zrpc import autograd
from zrpc.agent.current import set_default_agent
from zrpc.driver.place import MeetingPlace
from zrpc.testing.procfs import state_of

ray = pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")

from zrpc.integrations.ray import (  # noqa: E402
    RayMesh,
    _await_start,
    _host_store,
    _join_with,
    _place,
    _WorkerActor,
    start_mesh,
)

pytestmark = pytest.mark.engine
SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray of one node with four processors, in its own processes."""
    ray.init(num_cpus=4, object_store_memory=80e6, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    set_default_agent(None)  # of the driver, which is this process: log records name it


@pytest.fixture
def lone() -> Iterator[None]:
    """For a test with meshes of its own: fails it if one of them leaves something."""
    yield
    assert not zrpc.is_initialized()
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}


def options(**more: Any) -> zrpc.ZmqRpcBackendOptions:
    return zrpc.ZmqRpcBackendOptions(init_timeout=SECONDS, **more)


def enter(*args: Any, **kwargs: Any) -> None:
    with start_mesh(*args, **kwargs):
        pass


def has_ended(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def test_what_ray_cannot_place_is_an_error_that_names_what_there_is(lone: None) -> None:
    short = zrpc.ZmqRpcBackendOptions(init_timeout=0.5)
    with pytest.raises(zrpc.RendezvousError, match=r"place 9 workers with \{'CPU': 1\}") as error:
        enter(9, rpc_backend_options=short)
    assert "its nodes have {'CPU': 4.0" in str(error.value)
    assert "raise init_timeout" in str(error.value)
    with pytest.raises(zrpc.RendezvousError, match="'GPU': 1"):
        enter(1, {"GPU": 1}, rpc_backend_options=short)


def test_arguments_that_are_not_possible_are_refused(lone: None) -> None:
    with pytest.raises(ValueError, match="STRICT_SPREAD"):
        enter(1, placement="NEAR")
    with pytest.raises(ValueError, match="num_workers=0"):
        enter(0)


def test_the_secret_does_not_appear_in_what_is_printed() -> None:
    place = MeetingPlace("tcp://127.0.0.1:1", 1, "s3cret" * 10, options(), False)
    assert "s3cret" not in repr(place)


def test_an_actor_that_cannot_reach_the_driver_is_named_with_its_error(free_port: int) -> None:
    short = zrpc.ZmqRpcBackendOptions(init_timeout=0.5)
    place = MeetingPlace(f"tcp://127.0.0.1:{free_port}", 1, "s3cret" * 10, short, False)
    actor = ray.remote(_WorkerActor).remote(place, 0)
    with pytest.raises(zrpc.RendezvousError, match="the actor of worker0 failed to start") as error:
        _await_start([actor], time.monotonic() + SECONDS, SECONDS)
    assert f"can't reach the store of the driver at tcp://127.0.0.1:{free_port}" in str(error.value)


def test_an_actor_that_cannot_join_is_named_with_its_error(lone: None) -> None:
    place, store = _host_store(1, options(), False)
    actor = ray.remote(_WorkerActor).remote(replace(place, secret="another one" * 4), 0)
    try:
        with pytest.raises(zrpc.RendezvousError, match="worker0 failed to join") as error:
            _join_with([actor], place, store)
        assert "AuthenticationError" in str(error.value)
    finally:
        ray.kill(actor)


@pytest.fixture(scope="class")
def on_ray(cluster: None) -> Iterator[RayMesh]:
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    with start_mesh(2, placement=group, rpc_backend_options=options()) as mesh:
        yield mesh
        pids = [zrpc.rpc_sync(rank, os.getpid) for rank in range(2)]
    until(lambda: all(map(has_ended, pids)), "the end of the actors", within=SECONDS)
    assert ray.util.placement_group_table(group)["state"] == "CREATED"
    ray.util.remove_placement_group(group)


@pytest.mark.usefixtures("on_ray")
class TestOneMesh:
    """Two workers and the driver, which change nothing that another test sees."""

    def test_each_actor_is_a_worker_and_the_driver_is_a_member(self, on_ray: RayMesh) -> None:
        names = [worker.name for worker in zrpc.get_worker_infos()]
        assert names == ["worker0", "worker1", "driver"]
        assert zrpc.get_worker_info().name == "driver"
        assert len(on_ray.actors) == len(on_ray.placement_group.bundle_specs) == 2
        pids = [zrpc.rpc_sync(rank, os.getpid) for rank in range(3)]
        assert len(set(pids)) == 3
        assert pids[2] == os.getpid()
        # By value: the workers have no module of this name.
        asked = zrpc.rpc_sync("worker0", lambda: zrpc.rpc_sync("worker1", zrpc.get_worker_info))
        assert asked.name == "worker1"
        own = zrpc.rpc_sync("worker1", lambda: zrpc.rpc_sync("driver", os.getpid))
        assert own == os.getpid()
        leaf = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            loss = zrpc.rpc_sync("worker1", torch.mul, args=(leaf, 5.0)).sum()
            autograd.backward(context, [loss])
            assert autograd.get_gradients(context)[leaf].tolist() == [5.0, 5.0, 5.0]

    def test_a_process_that_is_a_worker_already_can_start_no_mesh(self) -> None:
        with pytest.raises(zrpc.RpcError, match="already initialized"):
            enter(1)
        assert zrpc.rpc_sync("worker0", max, args=(1, 2)) == 2

    def test_a_group_with_too_few_bundles_is_refused(self, on_ray: RayMesh) -> None:
        refused = pytest.raises(ValueError, match="each of 3 workers, found one with 2")
        with contextlib.ExitStack() as stack, refused:
            _place(stack, 3, {"CPU": 1}, on_ray.placement_group, 1.0)


def test_actors_that_ray_kills_are_lost_and_rejoin_if_ray_starts_them_again(lone: None) -> None:
    with start_mesh(2, max_restarts=1, rpc_backend_options=options()) as mesh:
        lost, joined = queue.SimpleQueue[str](), queue.SimpleQueue[int]()
        zrpc.on_worker_lost(lambda worker: lost.put(worker.name))
        zrpc.on_worker_joined(lambda worker: worker.incarnation and joined.put(worker.incarnation))
        before = zrpc.rpc_sync("worker1", os.getpid)
        pending = zrpc.rpc_async("worker1", lambda: threading.Event().wait(), timeout=SECONDS)
        ray.kill(mesh.actors[1], no_restart=False)
        with pytest.raises(zrpc.WorkerDied, match="worker1"):
            pending.wait()
        assert lost.get(timeout=SECONDS) == "worker1"
        assert joined.get(timeout=SECONDS) == 1
        assert zrpc.rpc_sync("worker1", os.getpid) != before

        def calls_the_new_one() -> zrpc.WorkerInfo:
            known = threading.Event()  # each worker hears of it in its own time
            zrpc.on_worker_joined(lambda worker: worker.incarnation and known.set())
            assert known.wait(60)
            return zrpc.rpc_sync("worker1", zrpc.get_worker_info)

        named = zrpc.rpc_sync("worker0", calls_the_new_one)
        assert (named.name, named.id, named.incarnation) == ("worker1", 1, 1)
        ray.kill(mesh.actors[0])
        assert lost.get(timeout=SECONDS) == "worker0"
        assert zrpc.rpc_sync("worker1", max, args=(1, 2)) == 2


def test_an_exception_ends_the_mesh_without_waiting_for_calls(lone: None) -> None:
    class Failure(Exception):
        pass

    def program() -> None:
        with start_mesh(1, rpc_backend_options=options()):
            zrpc.rpc_async("worker0", lambda: threading.Event().wait(), timeout=0)
            raise Failure

    with pytest.raises(Failure):
        program()
