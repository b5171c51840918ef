"""A module on another worker: making, calling, pickling and training it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.nn.remote_layers import FailsToBegin, Frozen, Scale, X, no_module, value
from zrpc.nn import RemoteModule
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

# Making it.


def test_the_place_names_worker_and_device(caller: Mesh) -> None:
    """`on` is as in the place, as in torch: programs build places from it."""
    for place, on in (("worker1", "worker1"), ("worker1/cpu", "worker1"), ("rank:1", 1)):
        module = RemoteModule(place, Scale)
        assert module.on == on
        assert module.device == "cpu"
        assert module.module_rref.rpc_sync().where() == "worker1"


def test_a_module_can_be_on_this_worker(caller: Mesh) -> None:
    module = RemoteModule("worker0", Scale)
    torch.testing.assert_close(module(X), Scale()(X))
    assert module.get_module_rref().is_owner()


def test_the_constructor_gets_its_arguments(caller: Mesh) -> None:
    module = RemoteModule("worker1", Scale, args=(3.0,), kwargs={"size": 5})
    torch.testing.assert_close(module(torch.ones(5)), Scale(3.0, size=5)(torch.ones(5)))


def test_a_function_can_make_the_module(caller: Mesh) -> None:
    module = RemoteModule("worker1", lambda: torch.nn.Sequential(Scale(), torch.nn.Tanh()))
    torch.testing.assert_close(module(X), torch.tanh(Scale()(X)))


def test_a_remote_module_is_a_module(module: RemoteModule) -> None:
    assert isinstance(module, torch.nn.Module)
    assert isinstance(module.get_module_rref(), zrpc.RRef)
    assert module.get_module_rref().owner_name() == "worker1"
    assert module.get_module_rref() is module.module_rref


def test_an_unknown_worker_is_refused(caller: Mesh) -> None:
    for place in ("nobody", "nobody/cpu", "rank:9", "rank:9/cpu"):
        with pytest.raises(RuntimeError, match="could not find destination"):
            RemoteModule(place, Scale)


def test_an_invalid_place_is_refused(caller: Mesh) -> None:
    for place in ("", "worker1/cpu/0", "worker1/nothing", "rank:x/cpu"):
        with pytest.raises((RuntimeError, ValueError)):
            RemoteModule(place, Scale)


def test_an_object_that_is_not_a_module_is_refused(caller: Mesh) -> None:
    module = RemoteModule("worker1", no_module)
    with pytest.raises(ValueError, match=r"(?s)instance of <class nn\.Module>.*<class 'list'>"):
        module.forward(X)


def test_a_constructors_error_is_raised_by_forward(caller: Mesh) -> None:
    with pytest.raises(OSError, match="no module on purpose"):
        RemoteModule("worker1", FailsToBegin).forward(X)


def test_a_process_without_an_agent_cannot_make_one() -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        RemoteModule("worker1", Scale)


def test_an_existing_module_gets_a_second_handle(module: RemoteModule) -> None:
    other = RemoteModule.init_from_module_rref("worker1/cpu", module.get_module_rref())
    other.zero_grad()
    torch.testing.assert_close(other(X), module(X))
    assert value(module) is value(other)
    assert value(module).calls == 2
    by_rank = RemoteModule.init_from_module_rref("rank:1", module.get_module_rref())
    assert by_rank.on == 1


def test_the_attributes_make_up_a_place(module: RemoteModule) -> None:
    place = f"{module.on}/{module.device}"
    assert RemoteModule.init_from_module_rref(place, module.get_module_rref()).on == "worker1"


def test_a_handle_with_the_name_of_another_worker_than_the_owner_works(
    module: RemoteModule,
) -> None:
    """In torch such a handle calls the module on its owner too."""
    other = RemoteModule.init_from_module_rref("worker2/cpu", module.get_module_rref())
    torch.testing.assert_close(other(X), module(X))
    torch.testing.assert_close(other.forward_async(X).wait(), module(X))
    assert other.module_rref == module.module_rref
    other.zero_grad()
    assert torch.nn.Sequential(other).double()(X.double()).dtype == torch.float64
    torch.nn.Sequential(other).float()
    assert [name for name, _ in other.named_parameters()] == [
        name for name, _ in module.named_parameters()
    ]
    assert zrpc.rpc_sync("worker2", on_and_sum, args=(other,)) == ("worker2", module(X).sum())


def on_and_sum(module: RemoteModule) -> tuple[Any, torch.Tensor]:
    return module.on, module(X).sum()


def test_a_handle_needs_a_worker_that_exists(module: RemoteModule) -> None:
    with pytest.raises(RuntimeError, match="could not find destination 'worker9'"):
        RemoteModule.init_from_module_rref("worker9/cpu", module.get_module_rref())


# Calling it.


def test_forward_runs_on_the_worker(module: RemoteModule) -> None:
    expected = Scale(2.0)(X)
    torch.testing.assert_close(module(X), expected)
    torch.testing.assert_close(module.forward(X), expected)
    torch.testing.assert_close(module.forward(x=X, bias=1.0), expected + 1)
    torch.testing.assert_close(module(X, 1.0), expected + 1)


def test_forward_async_returns_a_future(module: RemoteModule) -> None:
    expected = Scale(2.0)(X)
    futures = [module.forward_async(X, bias=float(i)) for i in range(4)]
    assert all(isinstance(future, torch.futures.Future) for future in futures)
    for i, future in enumerate(futures):
        torch.testing.assert_close(future.wait(), expected + i)


def test_an_error_of_forward_is_raised_here(module: RemoteModule) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        module(torch.ones(2, 2))
    future = module.forward_async("text")
    with pytest.raises(TypeError):
        future.wait()


# Its parts.


def test_remote_parameters_are_rrefs(module: RemoteModule) -> None:
    rrefs = module.remote_parameters()
    assert [rref.owner_name() for rref in rrefs] == ["worker1"] * 3
    for rref, parameter in zip(rrefs, Scale(2.0).parameters(), strict=True):
        here = rref.to_here()
        assert isinstance(here, torch.nn.Parameter)
        torch.testing.assert_close(here, parameter)
    assert len(module.remote_parameters(recurse=False)) == 1
    assert RemoteModule("worker1", Frozen).remote_parameters() == []


def test_named_parameters_have_names_and_rrefs(module: RemoteModule) -> None:
    names = [name for name, _ in Scale().named_parameters()]
    found = dict(module.named_parameters())
    assert list(found) == names
    assert all(isinstance(rref, zrpc.RRef) for rref in found.values())
    assert [name for name, _ in module.named_parameters(prefix="far")] == [
        f"far.{name}" for name in names
    ]
    assert [name for name, _ in module.named_parameters(recurse=False)] == ["factor"]
    torch.testing.assert_close(found["linear.weight"].to_here(), Scale().linear.weight)


def test_state_dict_returns_a_copy(module: RemoteModule) -> None:
    found = module.state_dict()
    expected = Scale(2.0).state_dict()
    assert list(found) == list(expected)
    torch.testing.assert_close(dict(found), dict(expected))
    assert list(module.state_dict(prefix="far.")) == [f"far.{name}" for name in expected]
    found["linear.weight"].zero_()
    torch.testing.assert_close(module.state_dict()["linear.weight"], expected["linear.weight"])


def test_state_dict_of_a_module_on_this_worker_is_a_copy(caller: Mesh) -> None:
    module = RemoteModule("worker0", Scale)
    module.state_dict()["linear.weight"].zero_()
    torch.testing.assert_close(module(X), Scale()(X))


def test_load_state_dict_changes_the_module(module: RemoteModule) -> None:
    state = Scale(9.0).state_dict()
    result = module.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    torch.testing.assert_close(module(X), Scale(9.0)(X))
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})
    result = module.load_state_dict({"other": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["other"]


def test_a_state_can_be_saved_to_a_file(module: RemoteModule) -> None:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = RemoteModule("worker2", Scale)
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other(X), module(X))


# Pickling it.


def run_and_name(module: RemoteModule, x: torch.Tensor) -> tuple[torch.Tensor, str | int, bool]:
    return module(x), module.on, module.get_module_rref().is_owner()


def test_it_can_be_passed_to_a_worker(caller: Mesh) -> None:
    for place, on in (("worker1", "worker1"), ("rank:1", 1)):
        for to in (0, 1, 2):
            module = RemoteModule(place, Scale, args=(2.0,))
            found, there, owner = zrpc.rpc_sync(f"worker{to}", run_and_name, (module, X))
            torch.testing.assert_close(found, Scale(2.0)(X))
            assert there == on
            assert owner == (to == 1)
            assert value(module).calls == 1


def make_there() -> RemoteModule:
    return RemoteModule("worker2", Scale, args=(4.0,))


def test_it_can_be_a_result(caller: Mesh) -> None:
    module = zrpc.rpc_sync("worker1", make_there)
    assert isinstance(module, RemoteModule)
    assert module.on == "worker2"
    torch.testing.assert_close(module(X), Scale(4.0)(X))


class Both(torch.nn.Module):
    """A module with a remote module as a part."""

    def __init__(self, far: RemoteModule) -> None:
        super().__init__()
        self.near = Scale(0.5)
        self.far = far

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.far(self.near(x))


def test_it_can_be_part_of_a_module(module: RemoteModule) -> None:
    both = Both(module)
    expected = Scale(2.0)(Scale(0.5)(X))
    torch.testing.assert_close(both(X), expected)
    both.eval()
    assert not value(module).training
    assert not both.near.training
    both.train()
    assert value(module).training


def test_it_is_part_of_its_parents_state(module: RemoteModule) -> None:
    both = Both(module)
    state = both.state_dict()
    names = list(Scale().state_dict())
    assert list(state) == [f"near.{n}" for n in names] + [f"far.{n}" for n in names]
    changed = {name: value * 0 for name, value in state.items()}
    assert not any(both.load_state_dict(changed))
    assert not both(X).any()
    assert value(module).factor == 0


def test_a_parent_module_can_be_passed_to_a_worker(module: RemoteModule) -> None:
    found = zrpc.rpc_sync("worker2", run_both, (Both(module), X))
    torch.testing.assert_close(found, Scale(2.0)(Scale(0.5)(X)))
    assert value(module).calls == 1


def run_both(both: Both, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(both.far, RemoteModule)
    return both(x)


def test_it_can_be_pickled_in_calls_only(module: RemoteModule) -> None:
    for how in (pickle.dumps, copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
            how(module)


def test_the_repr_names_worker_and_device(module: RemoteModule) -> None:
    assert repr(module).startswith("RemoteModule(worker1/cpu")
    assert "RemoteModule" in repr(Both(module))


# Training.


def test_training_equals_training_in_one_process(caller: Mesh) -> None:
    first = RemoteModule("worker1/cpu", Scale, args=(2.0,)).double()
    second = RemoteModule("rank:2/cpu", Scale, args=(0.5,)).double()
    optimizer = DistributedOptimizer(
        torch.optim.Adam, [*first.remote_parameters(), *second.remote_parameters()], lr=0.1
    )
    local = torch.nn.Sequential(Scale(2.0), Scale(0.5)).double()
    local_optimizer = torch.optim.Adam(local.parameters(), lr=0.1)
    x, target = X.double(), torch.ones(2, 3, dtype=torch.float64)
    losses = []
    for step in range(5):
        with dist_autograd.context() as context_id:
            hidden = first(x) if step % 2 else first.forward_async(x).wait()
            loss = torch.nn.functional.mse_loss(second(hidden), target)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        local_optimizer.zero_grad()
        expected = torch.nn.functional.mse_loss(local(x), target)
        expected.backward()
        local_optimizer.step()
        torch.testing.assert_close(loss.item(), expected.item())
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for module, same in ((first, local[0]), (second, local[1])):
        torch.testing.assert_close(dict(module.state_dict()), dict(same.state_dict()))


def test_one_optimizer_covers_local_and_remote_parts(caller: Mesh) -> None:
    """A module with parts on two workers."""
    far = RemoteModule("worker1", Scale, args=(2.0,))
    both = Both(far)
    rrefs = [*far.remote_parameters(), *map(zrpc.RRef, both.near.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    local = torch.nn.Sequential(Scale(0.5), Scale(2.0))
    local_optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(3):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [both(X).pow(2).mean()])
            optimizer.step(context_id)
        local_optimizer.zero_grad()
        local(X).pow(2).mean().backward()
        local_optimizer.step()
    torch.testing.assert_close(dict(both.near.state_dict()), dict(local[0].state_dict()))
    torch.testing.assert_close(dict(far.state_dict()), dict(local[1].state_dict()))


def test_another_worker_can_train_with_it(module: RemoteModule) -> None:
    def loss_of(module: RemoteModule, x: torch.Tensor) -> torch.Tensor:
        return module(x).sum()

    with dist_autograd.context() as context_id:
        x = X.clone().requires_grad_()
        loss = zrpc.rpc_sync("worker2", loss_of, (module, x))
        dist_autograd.backward(context_id, [loss])
        found = dist_autograd.get_gradients(context_id)[x]
    [expected] = torch.autograd.grad(Scale(2.0)(x).sum(), [x])
    torch.testing.assert_close(found, expected)
