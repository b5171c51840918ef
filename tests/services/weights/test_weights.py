"""Published weights on one host: what is loaded, what is waited for, and who may publish."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc
from tests.services.weights.publishing import (
    SOON,
    Learner,
    Rollout,
    raised_by,
    value_of,
    weights,
)
from tests.services.weights.test_layout import Mixed
from tests.support.observed import busy
from tests.support.waiting import pending, until
from zrpc.nn import publish, subscribe
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=90)


def test_a_module_is_loaded_with_its_buffers_and_tied_parameters(mesh: Mesh) -> None:
    source, target = Mixed(), Mixed()
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.add_(1)
    parameters = list(target.parameters())
    target.norm.weight.grad = torch.ones(3)
    published = mesh.run(0, publish, "m", source)
    assert mesh.run(0, published.push) == 1
    assert mesh.run(1, lambda: subscribe("m").load_into(target)) == 1
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    assert target.head.weight is target.embed.weight
    assert all(new is old for new, old in zip(target.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad for parameter in parameters)
    assert torch.equal(target.norm.weight.grad, torch.ones(3))


@pytest.mark.parametrize(
    ("count", "options"),
    [(4, {}), (1 << 14, {}), (1 << 17, {}), (1 << 17, {"shared_memory": 0})],
)
def test_each_push_is_a_version_that_all_workers_load(
    make_mesh: MakeMesh, count: int, options: dict[str, Any]
) -> None:
    mesh = make_mesh(workers=3, options=options)
    learner = Learner(mesh, count=count)
    rollouts = [Rollout(mesh, worker, count=count) for worker in range(3)]
    for version in (1, 2, 3, 4, 5):
        assert learner.push() == version == learner.published.version
        assert [rollout.read() for rollout in rollouts] == [(version, version)] * 3
        assert [rollout.subscriber.version for rollout in rollouts] == [version] * 3


def test_a_version_that_is_known_is_not_copied_again(mesh: Mesh) -> None:
    learner, rollout = Learner(mesh, versions=1), Rollout(mesh, 1)
    learner.model["a"].zero_()  # which does not change the version
    assert rollout.read() == (1, 1)
    rollout.model["b"].fill_(9)
    assert rollout.load() == 1
    assert rollout.model["b"].tolist() == [9, 9, 9]
    other = weights(-1)
    assert mesh.run(1, rollout.subscriber.load_into, other) == 1  # which has not got it
    assert value_of(other) == 1
    learner.push()
    assert rollout.read() == (2, 2)


def test_subscribers_wait_for_a_version_and_late_ones_get_the_newest(mesh: Mesh) -> None:
    waiting = [Rollout(mesh, 1).begin_to_load(at_least=3)]
    assert pending(waiting[0], 0.05)
    learner = Learner(mesh)
    waiting += [Rollout(mesh, worker).begin_to_load(at_least=3) for worker in (0, 2)]
    learner.push()
    learner.push()
    assert all(pending(each, 0.05) for each in waiting)
    learner.push()
    assert [each.result(SOON) for each in waiting] == [3, 3, 3]
    late = Rollout(mesh, 2)
    assert late.load(at_least=2) == 3
    assert late.value == 3


def test_what_is_no_name_is_refused(mesh: Mesh) -> None:
    for name in ("", 3, None, ["w"], torch.nn.Linear(1, 1)):
        for use in (zrpc.nn.subscribe, lambda name: zrpc.nn.publish(name, weights(1))):
            with pytest.raises(ValueError, match="expected the name of a publication"):
                mesh.run(0, use, name)


def test_a_wait_ends_at_its_time_limit(mesh: Mesh) -> None:
    rollout, near = Rollout(mesh, 1), Rollout(mesh, 0)
    with pytest.raises(zrpc.RpcTimeoutError, match=r"a version of 'p' within 0.05 s: nobody"):
        rollout.load(timeout=0.05)
    learner = Learner(mesh, versions=1)
    assert rollout.load() == 1
    words = r"expected version 7 or a later one of 'p' within 0.05 s: .*worker0.* has version 1"
    for each in (rollout, near):
        each.load()
        with pytest.raises(zrpc.RpcTimeoutError, match=words):
            each.load(at_least=7, timeout=0.05)
    learner.push()
    assert (rollout.load(), near.load()) == (2, 2)
    until(lambda: not busy(mesh, 0))  # nothing is left of the waits


def test_a_handler_that_waits_ends_with_its_caller(mesh: Mesh) -> None:
    def load() -> int:
        return subscribe("p").load_into(weights(), at_least=5, timeout=SOON)

    def cancelled() -> Any:
        future = zrpc.rpc_async("worker1", load)
        assert future.cancel()
        return raised_by(future.wait)

    Learner(mesh).push()
    assert isinstance(mesh.run(2, cancelled), zrpc.RpcCancelledError)


def test_a_second_live_publisher_is_refused(mesh: Mesh) -> None:
    first = Learner(mesh, 1)
    for worker in range(3):
        words = "no publisher of 'p', found one on " + ("this" if worker == 1 else ".*name=worker1")
        with pytest.raises(zrpc.RpcError, match=words):
            mesh.run(worker, publish, "p", weights())
    assert first.push() == 1
    other = Learner(mesh, 1, "q")
    assert other.push(5) == 1
    rollouts = [Rollout(mesh, 0), Rollout(mesh, 0, "q")]
    assert [rollout.load() for rollout in rollouts] == [1, 1]
    assert [rollout.value for rollout in rollouts] == [1, 5]
    mesh.run(1, first.published.close)
    mesh.run(1, first.published.close)
    with pytest.raises(zrpc.RpcError, match="publisher of 'p' is closed"):
        first.push()
    assert Learner(mesh, 2).push() == 2  # newer than all before


@pytest.mark.parametrize("worker", [1, 2])
def test_a_publisher_that_was_dropped_gives_way_to_another(mesh: Mesh, worker: int) -> None:
    """Until then, its last version can be loaded."""
    learner = Learner(mesh, 1, versions=2)
    del learner
    rollout = Rollout(mesh, 0)
    assert rollout.load() == 2
    another = Learner(mesh, worker)
    assert another.push() == 3
    assert rollout.load(at_least=3) == 3


def test_of_publishers_that_begin_at_once_one_succeeds(mesh: Mesh) -> None:
    def attempt() -> Any:
        try:
            return publish("p", weights())
        except zrpc.RpcError as error:
            return str(error)

    for _ in range(5):
        found = mesh.run_all(attempt)
        errors = [each for each in found if isinstance(each, str)]
        (published,) = (each for each in found if not isinstance(each, str))
        assert len(errors) == 2
        assert all("expected no publisher of 'p', found one on" in each for each in errors)
        mesh.run(found.index(published), published.close)


def test_models_that_do_not_fit_are_refused_before_any_tensor_is_written(mesh: Mesh) -> None:
    learner, rollout = Learner(mesh, versions=1), Rollout(mesh, 1)
    expanded = torch.zeros(1, dtype=torch.int64).expand(3)
    with torch.inference_mode():
        inference = torch.zeros(3, dtype=torch.int64)
    wrong: list[tuple[str, Any]] = [
        ("missing: a; unexpected: c; shape: b", {"b": torch.zeros(4), "c": torch.zeros(1)}),
        ("b with memory for each element", {**weights(-1), "b": expanded}),
        (r"b as a tensor that .* written to, .* its clone\(\)", {**weights(-1), "b": inference}),
    ]
    for words, model in wrong:
        before = {name: tensor.clone() for name, tensor in model.items()}
        with pytest.raises(ValueError, match=words):
            mesh.run(1, rollout.subscriber.load_into, model)
        assert all(torch.equal(model[name], before[name]) for name in model)
        assert rollout.subscriber.version == 0
    with pytest.raises(TypeError, match=r"expected an nn\.Module or"):
        mesh.run(1, rollout.subscriber.load_into, 5)
    with pytest.raises(TypeError, match=r"expected at_least to be a version .* got '5'"):
        mesh.run(1, rollout.subscriber.load_into, weights(-1), at_least="5")
    kept = learner.model.pop("a")
    with pytest.raises(ValueError, match="missing: a"):
        learner.push()
    learner.model["a"] = kept
    assert learner.push() == 2


class Stubborn(torch.Tensor):
    """A tensor into which nothing can be copied the first time."""

    refuses = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and args[0].refuses:
            args[0].refuses = False
            raise ZeroDivisionError
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_version_whose_copy_has_failed_is_not_loaded(mesh: Mesh) -> None:
    learner, rollout = Learner(mesh, versions=1), Rollout(mesh, 1)
    assert rollout.read() == (1, 1)
    learner.push()
    rollout.model["b"] = rollout.model["b"].as_subclass(Stubborn)
    with pytest.raises(ZeroDivisionError):
        rollout.load()
    assert rollout.subscriber.version == 1
    assert rollout.read() == (2, 2)
    assert rollout.subscriber.version == 2


def test_after_the_publisher_is_closed_a_subscriber_is_told_once(mesh: Mesh) -> None:
    learner, rollout = Learner(mesh, versions=1), Rollout(mesh, 1)
    rollout.load()
    waiting = rollout.begin_to_load(at_least=2)
    assert pending(waiting, 0.05)
    mesh.run(0, learner.published.close)
    with pytest.raises(zrpc.RpcError, match=r"publisher on .*worker0.* was closed.* version 1"):
        waiting.result(SOON)
    assert rollout.load() == 1  # what it has stays loadable
    waiting = rollout.begin_to_load(at_least=2)  # of the next publisher
    assert pending(waiting, 0.05)
    successor = Learner(mesh, 2)
    successor.push(7)
    assert waiting.result(SOON) == 2
    assert rollout.value == 7


def test_a_subscriber_that_is_closed_loads_nothing(mesh: Mesh) -> None:
    _learner, rollout = Learner(mesh, versions=1), Rollout(mesh, 1)
    rollout.load()
    mesh.run(1, rollout.subscriber.close)
    with pytest.raises(zrpc.RpcError, match="subscriber of 'p' is closed"):
        rollout.load()
    with mesh.agent(1).as_current(), subscribe("p") as another:
        assert another.load_into(rollout.model) == 1
    assert another.version == 0


def test_weights_are_loaded_inside_an_autograd_context(mesh: Mesh) -> None:
    _learner = Learner(mesh, versions=1)

    def step() -> Any:
        model = torch.nn.ParameterDict({"a": torch.zeros(1 << 17)})
        model.register_buffer("b", torch.zeros(3, dtype=torch.int64))
        with zrpc.autograd.context() as context:
            assert subscribe("p").load_into(model) == 1
            loss = zrpc.rpc_sync("worker2", torch.sum, (model["a"],))
            zrpc.autograd.backward(context, [loss])
            return zrpc.autograd.get_gradients(context)[model["a"]].unique().tolist()

    assert mesh.run(1, step) == [1.0]


def test_computed_tensors_are_refused_inside_an_autograd_context(mesh: Mesh) -> None:
    weight = torch.ones(3, requires_grad=True)

    def in_context(function: Any, *args: Any) -> Any:
        with zrpc.autograd.context():
            return function(*args)

    published = mesh.run(0, publish, "m", {"w": weight * 2})
    with pytest.raises(zrpc.RpcError, match=r"carry no gradients, so pass tensor\.detach"):
        mesh.run(0, in_context, published.push)
    assert mesh.run(0, published.push) == 1  # outside, gradients are not carried by any call
    with pytest.raises(zrpc.RpcError, match="expected w without a graph"):
        mesh.run(1, in_context, subscribe_and_load, {"w": weight * 1})
    target = {"w": torch.zeros(3, requires_grad=True)}
    assert mesh.run(1, in_context, subscribe_and_load, target) == 1
    assert target["w"].tolist() == [2.0] * 3
    published.close()
    published = mesh.run(0, publish, "m", {"w": weight})  # weights themselves are not computed
    assert mesh.run(0, in_context, published.push) == 2


def test_weights_are_loaded_and_pushed_in_inference_mode(mesh: Mesh) -> None:
    source, target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def in_inference_mode(function: Any, *args: Any) -> Any:
        with torch.inference_mode():
            return function(*args)

    published = mesh.run(0, publish, "m", source)
    mesh.run(0, in_inference_mode, published.push)
    assert mesh.run(1, in_inference_mode, subscribe_and_load, target) == 1
    assert torch.equal(target.weight, source.weight)
    target(torch.ones(4)).sum().backward()


def subscribe_and_load(model: torch.nn.Module | dict[str, torch.Tensor]) -> int:
    return subscribe("m").load_into(model)


def test_after_its_worker_has_shut_down_nothing_can_be_loaded_or_pushed(mesh: Mesh) -> None:
    learner, rollout = Learner(mesh, versions=1), Rollout(mesh, 1)
    rollout.load()
    published, subscriber = learner.published, rollout.subscriber
    mesh.run_all(lambda: zrpc.shutdown())
    for function in (published.push, lambda: subscriber.load_into(rollout.model)):
        assert isinstance(raised_by(function), zrpc.NotInitializedError)
    published.close()
    subscriber.close()
    assert subscriber.version == 0


# -- when workers shut down or leave ---------------------------------------------------------------


def load_later() -> int:
    return subscribe("p").load_into(weights(), at_least=2, timeout=0)


@pytest.mark.zrpc(workers=2, timeout=60)
@pytest.mark.parametrize("published", [True, False])
def test_loads_of_handlers_end_once_all_shut_down(mesh: Mesh, published: bool) -> None:
    learner = Learner(mesh) if published else None
    with mesh.agent(0).as_current():
        future = zrpc.rpc_async(1, load_later, timeout=0)
        if learner is not None:
            until(lambda: busy(mesh, 0), "the publisher is asked")
        ends = [mesh.submit(rank, zrpc.shutdown) for rank in (0, 1)]
        with pytest.raises(zrpc.RpcError, match="no worker will push one: all have called"):
            future.wait()
    for end in ends:
        end.result(SOON)


@pytest.mark.zrpc(workers=3, elastic=True, timeout=60)
def test_a_publisher_leaves_an_elastic_mesh_although_a_load_waits(mesh: Mesh) -> None:
    learner = Learner(mesh)
    for _ in range(5):
        learner.push()
    rollout = Rollout(mesh, 1)
    assert rollout.load() == 5
    waiting = mesh.submit(1, raised_by, rollout.subscriber.load_into, rollout.model, 6, 0)
    until(lambda: busy(mesh, 0), "the publisher is asked")
    mesh.submit(0, zrpc.shutdown).result(SOON)
    assert "the publisher's worker leaves" in str(waiting.result(SOON))
    until(lambda: len(mesh.agent(1).membership.living) == 2)
    assert isinstance(raised_by(rollout.load, 6), zrpc.WorkerDied)
    assert rollout.load() == 5
    successor = Learner(mesh, 2)
    assert rollout.load(successor.push()) > 5
