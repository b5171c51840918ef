"""A module on another worker is used as one that is here."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from remote_layers import FailsToBegin, Frozen, Scale, double_, no_module

import zrpc
import zrpc.autograd as dist_autograd
from zrpc.nn import RemoteModule
from zrpc.optim import DistributedOptimizer

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

X = torch.arange(6.0).view(2, 3) / 3


@pytest.fixture
def caller(mesh):
    """The mesh, with worker0 as the worker that the test itself is."""
    with mesh.agent(0).as_current():
        yield mesh


@pytest.fixture
def module(caller):
    return RemoteModule("worker1/cpu", Scale, args=(2.0,))


def value(module):
    """The module itself, by its owner; the workers are threads of this process."""
    return FOUND.pop() if zrpc.rpc_sync(module.on, find, (module.module_rref,)) else None


FOUND = []


def find(rref):
    FOUND.append(rref.local_value())
    return True


# Making one.


@pytest.mark.parametrize(
    ("place", "on"), [("worker1", "worker1"), ("worker1/cpu", "worker1"), ("rank:1", 1)]
)
def test_places(caller, place, on):
    """`on` is what the place says, as in torch: programs make places of it."""
    module = RemoteModule(place, Scale)
    assert module.on == on
    assert module.device == "cpu"
    assert module.module_rref.rpc_sync().where() == "worker1"


def test_at_this_worker(caller):
    module = RemoteModule("worker0", Scale)
    torch.testing.assert_close(module(X), Scale()(X))
    assert module.get_module_rref().is_owner()


def test_arguments(caller):
    module = RemoteModule("worker1", Scale, args=(3.0,), kwargs={"size": 5})
    torch.testing.assert_close(module(torch.ones(5)), Scale(3.0, size=5)(torch.ones(5)))


def test_a_function_that_makes_a_module(caller):
    module = RemoteModule("worker1", lambda: torch.nn.Sequential(Scale(), torch.nn.Tanh()))
    torch.testing.assert_close(module(X), torch.tanh(Scale()(X)))


def test_it_is_a_module(module):
    assert isinstance(module, torch.nn.Module)
    assert isinstance(module.get_module_rref(), zrpc.RRef)
    assert module.get_module_rref().owner_name() == "worker1"
    assert module.get_module_rref() is module.module_rref


@pytest.mark.parametrize("place", ["nobody", "nobody/cpu", "rank:9", "rank:9/cpu"])
def test_an_unknown_worker(caller, place):
    with pytest.raises(RuntimeError, match="could not find destination"):
        RemoteModule(place, Scale)


@pytest.mark.parametrize("place", ["", "worker1/cpu/0", "worker1/nothing", "rank:x/cpu"])
def test_a_place_that_cannot_be_read(caller, place):
    with pytest.raises((RuntimeError, ValueError)):
        RemoteModule(place, Scale)


def test_what_is_no_module(caller):
    module = RemoteModule("worker1", no_module)
    with pytest.raises(ValueError, match=r"(?s)instance of <class nn\.Module>.*<class 'list'>"):
        module.forward(X)


def test_a_constructor_that_raises(caller):
    with pytest.raises(OSError, match="no module on purpose"):
        RemoteModule("worker1", FailsToBegin).forward(X)


def test_without_an_agent():
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        RemoteModule("worker1", Scale)


def test_init_from_module_rref(module):
    other = RemoteModule.init_from_module_rref("worker1/cpu", module.get_module_rref())
    other.zero_grad()
    torch.testing.assert_close(other(X), module(X))
    assert value(module) is value(other)
    assert value(module).calls == 2
    by_rank = RemoteModule.init_from_module_rref("rank:1", module.get_module_rref())
    assert by_rank.on == 1


def test_a_place_made_of_its_attributes(module):
    place = f"{module.on}/{module.device}"
    assert RemoteModule.init_from_module_rref(place, module.get_module_rref()).on == "worker1"


def test_init_from_a_module_of_another_worker(module):
    with pytest.raises(ValueError, match=r"worker2.*worker1"):
        RemoteModule.init_from_module_rref("worker2/cpu", module.get_module_rref())


# Running it.


def test_forward(module):
    expected = Scale(2.0)(X)
    torch.testing.assert_close(module(X), expected)
    torch.testing.assert_close(module.forward(X), expected)
    torch.testing.assert_close(module.forward(x=X, bias=1.0), expected + 1)
    torch.testing.assert_close(module(X, 1.0), expected + 1)


def test_forward_async(module):
    expected = Scale(2.0)(X)
    futures = [module.forward_async(X, bias=float(i)) for i in range(4)]
    assert all(isinstance(future, torch.futures.Future) for future in futures)
    for i, future in enumerate(futures):
        torch.testing.assert_close(future.wait(), expected + i)


def test_a_forward_that_raises(module):
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        module(torch.ones(2, 2))
    future = module.forward_async("text")
    with pytest.raises(TypeError):
        future.wait()


# Its parts.


def test_remote_parameters(module):
    rrefs = module.remote_parameters()
    assert [rref.owner_name() for rref in rrefs] == ["worker1"] * 3
    for rref, parameter in zip(rrefs, Scale(2.0).parameters(), strict=True):
        here = rref.to_here()
        assert isinstance(here, torch.nn.Parameter)
        torch.testing.assert_close(here, parameter)
    assert len(module.remote_parameters(recurse=False)) == 1
    assert RemoteModule("worker1", Frozen).remote_parameters() == []


def test_named_parameters(module):
    names = [name for name, _ in Scale().named_parameters()]
    found = dict(module.named_parameters())
    assert list(found) == names
    assert all(isinstance(rref, zrpc.RRef) for rref in found.values())
    assert [name for name, _ in module.named_parameters(prefix="far")] == [
        f"far.{name}" for name in names
    ]
    assert [name for name, _ in module.named_parameters(recurse=False)] == ["factor"]
    torch.testing.assert_close(found["linear.weight"].to_here(), Scale().linear.weight)


def test_state_dict(module):
    found = module.state_dict()
    expected = Scale(2.0).state_dict()
    assert list(found) == list(expected)
    torch.testing.assert_close(dict(found), dict(expected))
    assert list(module.state_dict(prefix="far.")) == [f"far.{name}" for name in expected]
    found["linear.weight"].zero_()
    torch.testing.assert_close(module.state_dict()["linear.weight"], expected["linear.weight"])


def test_the_state_of_a_module_of_this_worker_is_a_copy(caller):
    module = RemoteModule("worker0", Scale)
    module.state_dict()["linear.weight"].zero_()
    torch.testing.assert_close(module(X), Scale()(X))


def test_load_state_dict(module):
    state = Scale(9.0).state_dict()
    result = module.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    torch.testing.assert_close(module(X), Scale(9.0)(X))
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})
    result = module.load_state_dict({"other": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["other"]


def test_a_state_goes_through_a_file(module):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = RemoteModule("worker2", Scale)
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other(X), module(X))


# What is done to it.


def test_train_and_eval(module):
    assert module.eval() is module
    assert not value(module).training
    assert not value(module).linear.training
    assert not module(X).any()
    assert module.train() is module
    assert value(module).training
    assert module(X).any()
    assert module.train(False) is module
    assert not value(module).training


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("double", torch.float64),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float", torch.float32),
    ],
)
def test_casts(module, method, dtype):
    assert getattr(module, method)() is module
    assert value(module).linear.weight.dtype == dtype
    assert module(X.to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    "args", [(torch.float64,), ("cpu", torch.float64), (torch.ones(1).double(),)]
)
def test_to(module, args):
    assert module.to(*args) is module
    assert value(module).linear.weight.dtype == torch.float64
    assert module.device == "cpu"
    assert module.to(dtype=torch.float32) is module
    assert value(module).linear.weight.dtype == torch.float32


def test_to_a_device(module):
    assert module.to("meta") is module
    assert module.device == "meta"
    assert value(module).linear.weight.is_meta


def test_cpu(module):
    assert module.cpu() is module
    assert module.device == "cpu"


def test_apply(module):
    assert module.apply(double_) is module
    expected = Scale(2.0).apply(double_)
    torch.testing.assert_close(module.state_dict()["factor"], expected.factor.detach())
    torch.testing.assert_close(module(X), expected(X))
    module.apply(lambda each: each.__dict__.update(mark=type(each).__name__))
    assert value(module).mark == "Scale"
    assert value(module).linear.mark == "Linear"


def test_zero_grad(module):
    there = value(module)
    there.factor.grad = torch.ones(())
    module.zero_grad(set_to_none=False)
    assert there.factor.grad == 0
    module.zero_grad()
    assert there.factor.grad is None


def test_requires_grad(module):
    assert module.requires_grad_(False) is module
    assert not any(parameter.requires_grad for parameter in value(module).parameters())
    assert not module(X).requires_grad
    module.requires_grad_()
    assert all(parameter.requires_grad for parameter in value(module).parameters())


CALLS = []


@pytest.fixture(autouse=True)
def _forget():
    yield
    CALLS.clear()
    FOUND.clear()


def note_forward(module, inputs, output):
    CALLS.append(("forward", zrpc.get_worker_info().name))
    return output + 100


def note_pre(module, inputs):
    CALLS.append(("pre", zrpc.get_worker_info().name))
    return (inputs[0] * 0,)


def note_pre_with_keywords(module, args, kwargs):
    CALLS.append(("keywords", sorted(kwargs)))
    return args, {**kwargs, "bias": 5.0}


def note_backward(module, inputs, outputs):
    CALLS.append(("backward", outputs[0].shape))


def note_backward_pre(module, outputs):
    CALLS.append(("backward pre", outputs[0].shape))


def test_forward_hooks(module):
    plain = module(X)
    handle = module.register_forward_hook(note_forward)
    torch.testing.assert_close(module(X), plain + 100)
    torch.testing.assert_close(module.forward_async(X).wait(), plain + 100)
    assert CALLS == [("forward", "worker1")] * 2
    handle.remove()
    torch.testing.assert_close(module(X), plain)
    assert len(CALLS) == 2


def test_forward_pre_hooks(module):
    handle = module.register_forward_pre_hook(note_pre)
    torch.testing.assert_close(module(X), Scale(2.0)(X * 0))
    assert CALLS == [("pre", "worker1")]
    handle.remove()
    torch.testing.assert_close(module(X), Scale(2.0)(X))


def test_hooks_with_options(module):
    with module.register_forward_pre_hook(note_pre_with_keywords, with_kwargs=True):
        torch.testing.assert_close(module(X, bias=1.0), Scale(2.0)(X, 5.0))
    assert CALLS == [("keywords", ["bias"])]
    torch.testing.assert_close(module(X, bias=1.0), Scale(2.0)(X, 1.0))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hooks(module):
    handles = [
        module.register_full_backward_hook(note_backward),
        module.register_full_backward_pre_hook(note_backward_pre),
    ]

    def train():
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [module(X).sum()])

    train()
    assert CALLS == [("backward pre", (2, 3)), ("backward", (2, 3))]
    for handle in handles:
        handle.remove()
    train()
    assert len(CALLS) == 2


NOT_SUPPORTED = {
    "add_module": ("name", torch.nn.Module()),
    "buffers": (),
    "children": (),
    "extra_repr": (),
    "modules": (),
    "named_buffers": (),
    "named_children": (),
    "named_modules": (),
    "parameters": (),
    "register_backward_hook": (note_backward,),
    "register_buffer": ("name", torch.ones(1)),
    "register_parameter": ("name", torch.nn.Parameter(torch.ones(1))),
    "share_memory": (),
    "type": (torch.float64,),
}


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_methods_that_are_not_supported(module, name):
    with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
        getattr(module, name)(*NOT_SUPPORTED[name])


def test_parameters_tell_what_to_use(module):
    with pytest.raises(ValueError, match="remote_parameters"):
        module.parameters()


# Passing it on.


def run_and_name(module, x):
    return module(x), module.on, module.get_module_rref().is_owner()


@pytest.mark.parametrize("to", [0, 1, 2])
@pytest.mark.parametrize(("place", "on"), [("worker1", "worker1"), ("rank:1", 1)])
def test_it_is_passed_to_a_worker(caller, to, place, on):
    module = RemoteModule(place, Scale, args=(2.0,))
    found, there, owner = zrpc.rpc_sync(f"worker{to}", run_and_name, (module, X))
    torch.testing.assert_close(found, Scale(2.0)(X))
    assert there == on
    assert owner == (to == 1)
    assert value(module).calls == 1


def make_there():
    return RemoteModule("worker2", Scale, args=(4.0,))


def test_it_is_a_result(caller):
    module = zrpc.rpc_sync("worker1", make_there)
    assert isinstance(module, RemoteModule)
    assert module.on == "worker2"
    torch.testing.assert_close(module(X), Scale(4.0)(X))


class Both(torch.nn.Module):
    """A module that has a remote one as a part."""

    def __init__(self, far):
        super().__init__()
        self.near = Scale(0.5)
        self.far = far

    def forward(self, x):
        return self.far(self.near(x))


def test_it_is_part_of_a_module(module):
    both = Both(module)
    expected = Scale(2.0)(Scale(0.5)(X))
    torch.testing.assert_close(both(X), expected)
    both.eval()
    assert not value(module).training
    assert not both.near.training
    both.train()
    assert value(module).training


def test_the_state_of_a_module_that_has_it(module):
    both = Both(module)
    state = both.state_dict()
    names = list(Scale().state_dict())
    assert list(state) == [f"near.{n}" for n in names] + [f"far.{n}" for n in names]
    changed = {name: value * 0 for name, value in state.items()}
    assert not any(both.load_state_dict(changed))
    assert not both(X).any()
    assert value(module).factor == 0


def test_a_module_that_has_it_is_passed_on(module):
    found = zrpc.rpc_sync("worker2", run_both, (Both(module), X))
    torch.testing.assert_close(found, Scale(2.0)(Scale(0.5)(X)))
    assert value(module).calls == 1


def run_both(both, x):
    assert isinstance(both.far, RemoteModule)
    return both(x)


@pytest.mark.parametrize(
    "how", [pickle.dumps, copy.deepcopy, lambda m: torch.save(m, io.BytesIO())]
)
def test_it_is_pickled_in_no_other_way(module, how):
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
        how(module)


def test_repr(module):
    assert repr(module).startswith("RemoteModule(worker1/cpu")
    assert "RemoteModule" in repr(Both(module))


# Training.


def test_training_equals_that_in_one_process(caller):
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


def test_parameters_here_and_there(caller):
    """A module with parts on two workers, with one optimizer for all."""
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


def test_training_through_a_handle_that_was_passed_on(module):
    def loss_of(module, x):
        return module(x).sum()

    with dist_autograd.context() as context_id:
        x = X.clone().requires_grad_()
        loss = zrpc.rpc_sync("worker2", loss_of, (module, x))
        dist_autograd.backward(context_id, [loss])
        found = dist_autograd.get_gradients(context_id)[x]
    [expected] = torch.autograd.grad(Scale(2.0)(x).sum(), [x])
    torch.testing.assert_close(found, expected)
