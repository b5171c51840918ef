"""A module on another worker: making, calling, pickling, changing and training it."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.support.identity import emptied
from zrpc.nn import RemoteModule
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


X = torch.arange(6.0).view(2, 3) / 3
# Calls of hooks. The workers are threads of this process.
CALLS: list[tuple[str, Any]] = emptied([])
FOUND: list[torch.nn.Module] = emptied([])


def value(module: RemoteModule) -> Any:
    """Returns the module itself, which is in this process too."""
    zrpc.rpc_sync(module.on, find, (module.module_rref,))
    return FOUND.pop()


def find(rref: zrpc.RRef[torch.nn.Module]) -> None:
    FOUND.append(rref.local_value())


class Scale(torch.nn.Module):
    """A module with parameters of its own, a submodule, a buffer and modes."""

    def __init__(self, factor: float = 1.0, *, size: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.linear = torch.nn.Linear(size, size)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.factor = torch.nn.Parameter(torch.tensor(factor))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
        self.calls += 1
        out = self.linear(x) * self.factor + bias
        return out if self.training else out * 0

    def where(self) -> str:
        return zrpc.get_worker_info().name


class FailsToBegin(torch.nn.Module):
    def __init__(self) -> None:
        raise OSError("no module on purpose")


@pytest.fixture
def module(caller: Mesh) -> RemoteModule:
    return RemoteModule("worker1/cpu", Scale, args=(2.0,))


def test_a_place_names_worker_and_device(caller: Mesh) -> None:
    """`on` is as in the place, as in torch: programs build places from it."""
    places = (("worker1", "worker1"), ("worker1/cpu", "worker1"), ("rank:1", 1), ("worker0", None))
    for place, on in places:
        module = RemoteModule(place, Scale, args=(3.0,), kwargs={"size": 5})
        assert module.on == on or place == "worker0"
        assert module.device == "cpu"
        assert module.get_module_rref().is_owner() == (place == "worker0")
        assert module.module_rref.rpc_sync().where() == ("worker1" if on else "worker0")
        torch.testing.assert_close(module(torch.ones(5)), Scale(3.0, size=5)(torch.ones(5)))


def test_what_is_wrong_with_a_place_or_a_module_is_raised(module: RemoteModule) -> None:
    unknown = "could not find destination"
    for place, text in (
        *((place, unknown) for place in ("nobody", "nobody/cpu", "rank:9", "rank:9/cpu")),
        *((place, None) for place in ("", "worker1/cpu/0", "worker1/nothing", "rank:x/cpu")),
    ):
        with pytest.raises((RuntimeError, ValueError), match=text):
            RemoteModule(place, Scale)
    with pytest.raises(RuntimeError, match=f"{unknown} 'worker9'"):
        RemoteModule.init_from_module_rref("worker9/cpu", module.get_module_rref())
    no_list = r"(?s)instance of <class nn\.Module>.*<class 'list'>"
    with pytest.raises(ValueError, match=no_list):
        RemoteModule("worker1", list).forward(X)
    with pytest.raises(OSError, match="no module on purpose"):
        RemoteModule("worker1", FailsToBegin).forward(X)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        module(torch.ones(2, 2))
    with pytest.raises(TypeError):
        module.forward_async("text").wait()


def test_a_process_without_an_agent_cannot_make_one() -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        RemoteModule("worker1", Scale)


def test_an_existing_module_gets_a_second_handle(module: RemoteModule) -> None:
    """Also by another worker's name than the owner's: calls go to the owner, as in torch."""
    plain = module(X)
    for place, on in (("worker1/cpu", "worker1"), ("rank:1", 1), ("worker2/cpu", "worker2")):
        other = RemoteModule.init_from_module_rref(place, module.get_module_rref())
        assert other.on == on
        assert other.module_rref == module.module_rref
        torch.testing.assert_close(other(X), plain)
        torch.testing.assert_close(other.forward_async(X).wait(), plain)
        other.zero_grad()
        assert other.double()(X.double()).dtype == torch.float64
        other.float()
        names = [name for name, _ in other.named_parameters()]
        assert names == [name for name, _ in module.named_parameters()]
        found, there, _ = zrpc.rpc_sync("worker2", run_and_name, (other, X))
        torch.testing.assert_close(found, plain)
        assert there == on


def test_forward_runs_on_the_worker(module: RemoteModule) -> None:
    expected = Scale(2.0)(X)
    torch.testing.assert_close(module(X), expected)
    torch.testing.assert_close(module.forward(x=X, bias=1.0), expected + 1)
    futures = [module.forward_async(X, bias=float(i)) for i in range(4)]
    assert all(isinstance(future, torch.futures.Future) for future in futures)
    for i, future in enumerate(futures):
        torch.testing.assert_close(future.wait(), expected + i)


def test_parameters_are_rrefs(module: RemoteModule) -> None:
    local = dict(Scale(2.0).named_parameters())
    found = dict(module.named_parameters())
    assert list(found) == list(local)
    for rrefs in (module.remote_parameters(), found.values()):
        for rref, parameter in zip(rrefs, local.values(), strict=True):
            assert rref.owner_name() == "worker1"
            here = rref.to_here()
            assert isinstance(here, torch.nn.Parameter)
            torch.testing.assert_close(here, parameter)
    names = [name for name, _ in module.named_parameters(prefix="far")]
    assert names == [f"far.{name}" for name in local]
    assert [name for name, _ in module.named_parameters(recurse=False)] == ["factor"]
    assert len(module.remote_parameters(recurse=False)) == 1
    assert RemoteModule("worker1", torch.nn.Identity).remote_parameters() == []


def test_state_dict_returns_a_copy(module: RemoteModule) -> None:
    found = module.state_dict()
    expected = Scale(2.0).state_dict()
    assert list(found) == list(expected)
    torch.testing.assert_close(dict(found), dict(expected))
    assert list(module.state_dict(prefix="far.")) == [f"far.{name}" for name in expected]
    found["linear.weight"].zero_()
    torch.testing.assert_close(module.state_dict()["linear.weight"], expected["linear.weight"])


def test_load_state_dict_changes_the_module(module: RemoteModule) -> None:
    state = Scale(9.0).state_dict()
    result = module.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    torch.testing.assert_close(module(X), Scale(9.0)(X))
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})
    result = module.load_state_dict({"other": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["other"]


def run_and_name(module: RemoteModule, x: torch.Tensor) -> tuple[torch.Tensor, str | int, bool]:
    return module(x), module.on, module.get_module_rref().is_owner()


def test_it_can_be_passed_to_a_worker(caller: Mesh) -> None:
    """Which can also train with it."""
    x = X.clone().requires_grad_()
    [expected] = torch.autograd.grad(Scale(2.0)(x).sum(), [x])
    for place, on in (("worker1", "worker1"), ("rank:1", 1)):
        for to in (0, 1, 2):
            module = RemoteModule(place, Scale, args=(2.0,))
            with dist_autograd.context() as context_id:
                found, there, owner = zrpc.rpc_sync(f"worker{to}", run_and_name, (module, x))
                dist_autograd.backward(context_id, [found.sum()])
                gradient = dist_autograd.get_gradients(context_id)[x]
            torch.testing.assert_close(found.detach(), Scale(2.0)(X).detach())
            torch.testing.assert_close(gradient, expected)
            assert there == on
            assert owner == (to == 1)
            assert value(module).calls == 1


def test_it_can_be_part_of_a_module(module: RemoteModule) -> None:
    """Which can be passed to a worker."""
    whole = torch.nn.Sequential(OrderedDict(near=Scale(0.5), far=module))
    expected = Scale(2.0)(Scale(0.5)(X))
    torch.testing.assert_close(whole(X), expected)
    found = zrpc.rpc_sync("worker2", torch.nn.Module.__call__, (whole, X))
    torch.testing.assert_close(found, expected)
    assert value(module).calls == 2
    whole.eval()
    assert not value(module).training
    assert not whole.near.training
    whole.train()
    assert value(module).training
    state = whole.state_dict()
    names = list(Scale().state_dict())
    assert list(state) == [f"near.{n}" for n in names] + [f"far.{n}" for n in names]
    changed = {name: value * 0 for name, value in state.items()}
    assert not any(whole.load_state_dict(changed))
    assert not whole(X).any()
    assert value(module).factor == 0


class Versioned(torch.nn.Module):
    """Has stored half of its factor since version 2, and converts what is older."""

    _version = 2

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.stored = torch.nn.Parameter(torch.tensor(factor / 2))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *found: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "stored"] = state_dict[prefix + "stored"] / 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *found)


def versioned(factor: float) -> torch.nn.Module:
    inner = torch.nn.Sequential(Versioned(factor), torch.nn.Sequential(Versioned(factor)))
    return torch.nn.Sequential(inner, torch.nn.ReLU())


@pytest.mark.parametrize("of_old_version", [False, True])
@pytest.mark.parametrize("saved_locally", [False, True])
def test_a_parent_keeps_the_versions_of_its_parts(
    caller: Mesh, saved_locally: bool, of_old_version: bool
) -> None:
    local = torch.nn.Sequential(versioned(8.0), Versioned(8.0))
    remote = torch.nn.Sequential(
        RemoteModule("worker1", versioned, (8.0,)), RemoteModule("worker1", Versioned, (8.0,))
    )
    assert remote.state_dict()._metadata == local.state_dict()._metadata
    state = copy.deepcopy((local if saved_locally else remote).state_dict())
    if of_old_version:
        for metadata in state._metadata.values():
            metadata["version"] = 1
    for whole in (local, remote):
        assert not any(whole.load_state_dict(state))
        stored = {each.item() for each in whole.state_dict().values()}
        assert stored == {2.0 if of_old_version else 4.0}
    assert list(remote.modules()) == [remote, *remote]


def test_a_parent_assigns_the_tensors_of_a_state_if_asked(caller: Mesh) -> None:
    whole = torch.nn.Sequential(RemoteModule("worker1", versioned, (8.0,)))
    doubles = torch.nn.Sequential(versioned(3.0).double()).state_dict()
    whole.load_state_dict(doubles)
    assert {each.dtype for each in whole.state_dict().values()} == {torch.float32}
    whole.load_state_dict(doubles, assign=True)
    assert {each.dtype for each in whole.state_dict().values()} == {torch.float64}


def test_a_parent_finds_what_is_wrong_in_a_state_as_a_local_one_does(caller: Mesh) -> None:
    local = torch.nn.ModuleList([torch.nn.Linear(3, 2), Scale(), torch.nn.Linear(3, 2)])
    remote = torch.nn.ModuleList([local[0], RemoteModule("worker1", Scale), local[2]])
    state = local.state_dict()
    for name in ("0.weight", "1.linear.weight", "1.linear.bias", "2.weight"):
        state[name] = torch.ones(7)
    del state["1.calls"]
    state["1.other"] = state["1.linear.other"] = torch.ones(1)
    errors = []
    for whole in (local, remote):
        with pytest.raises(RuntimeError, match=r"size mismatch for 1\.linear\.weight") as info:
            whole.load_state_dict(state)
        errors.append(str(info.value))
        assert whole[1].state_dict()["factor"] == 1
    assert errors[0] == errors[1]
    right = {name: each for name, each in state.items() if each.shape != (7,)}
    assert remote.load_state_dict(right, strict=False) == local.load_state_dict(right, strict=False)


def test_it_can_be_pickled_in_calls_only(module: RemoteModule) -> None:
    for how in (pickle.dumps, copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
            how(module)
    assert repr(module).startswith("RemoteModule(worker1/cpu")


def test_train_and_eval_set_the_mode(module: RemoteModule) -> None:
    for change, mode in (
        (module.eval, False),
        (module.train, True),
        (lambda: module.train(False), False),
    ):
        assert change() is module
        assert module.training is mode
        assert value(module).training is value(module).linear.training is mode
        assert module(X).any().item() is mode
        assert zrpc.rpc_sync("worker2", getattr, (module, "training")) is mode
    with pytest.raises(ValueError, match="training mode is expected to be boolean"):
        module.train(2)  # type: ignore[arg-type]
    assert module.training is False


def test_casts_change_the_parameters(module: RemoteModule) -> None:
    casts: list[tuple[Callable[[], RemoteModule], torch.dtype]] = [
        (module.double, torch.float64),
        (module.half, torch.float16),
        (module.bfloat16, torch.bfloat16),
        (module.float, torch.float32),
        (lambda: module.to(torch.float64), torch.float64),
        (lambda: module.to(dtype=torch.float32), torch.float32),
        (lambda: module.to("cpu", torch.float64), torch.float64),
        (module.cpu, torch.float64),
        (lambda: module.to(torch.ones(1)), torch.float32),
    ]
    for cast, dtype in casts:
        assert cast() is module
        assert module.device == "cpu"
        assert value(module).linear.weight.dtype == dtype
        assert module(X.to(dtype)).dtype == dtype
    assert module.to("meta") is module
    assert module.device == "meta"
    assert value(module).linear.weight.is_meta


def test_apply_reaches_all_submodules(module: RemoteModule) -> None:
    assert module.apply(lambda each: each.__dict__.update(mark=type(each).__name__)) is module
    assert value(module).mark == "Scale"
    assert value(module).linear.mark == "Linear"


def test_zero_grad_and_requires_grad_reach_all_parameters(module: RemoteModule) -> None:
    there = value(module)
    there.factor.grad = torch.ones(())
    module.zero_grad(set_to_none=False)
    assert there.factor.grad == 0
    module.zero_grad()
    assert there.factor.grad is None
    assert module.requires_grad_(False) is module
    assert not any(parameter.requires_grad for parameter in there.parameters())
    assert not module(X).requires_grad
    module.requires_grad_()
    assert all(parameter.requires_grad for parameter in there.parameters())


def record_forward(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    CALLS.append(("forward", zrpc.get_worker_info().name))
    return output + 100


def record_keywords(
    module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    CALLS.append(("keywords", sorted(kwargs)))
    return args, {**kwargs, "bias": 5.0}


def record_backward(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    CALLS.append(("backward", outputs[0].shape))


def record_backward_pre(module: torch.nn.Module, outputs: Any) -> None:
    CALLS.append(("backward pre", outputs[0].shape))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_run_on_the_worker_until_they_are_removed(module: RemoteModule) -> None:
    def run() -> torch.Tensor:
        with dist_autograd.context() as context_id:
            found: torch.Tensor = module(X, bias=1.0)
            dist_autograd.backward(context_id, [found.sum()])
            return found.detach()

    plain = run()
    handles = [
        module.register_forward_hook(record_forward),
        module.register_forward_pre_hook(record_keywords, with_kwargs=True),
        module.register_full_backward_hook(record_backward),
        module.register_full_backward_pre_hook(record_backward_pre),
    ]
    torch.testing.assert_close(run(), plain + 104)
    calls = [("keywords", ["bias"]), ("forward", "worker1")]
    calls += [("backward pre", (2, 3)), ("backward", (2, 3))]
    assert calls == CALLS
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(run(), plain)
    assert calls == CALLS


NOT_SUPPORTED = [
    "add_module",
    "buffers",
    "children",
    "extra_repr",
    "modules",
    "named_buffers",
    "named_children",
    "named_modules",
    "parameters",
    "register_backward_hook",
    "register_buffer",
    "register_parameter",
    "share_memory",
    "type",
]


def test_unsupported_methods_raise(module: RemoteModule) -> None:
    for name in NOT_SUPPORTED:
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)()


def test_a_module_that_contains_it_has_its_own_parameters(module: RemoteModule) -> None:
    linear = torch.nn.Linear(3, 3)
    whole = torch.nn.Sequential(linear, module)
    assert list(whole.parameters()) == list(linear.parameters())
    assert [name for name, _ in whole.named_modules()] == ["", "0", "1"]
    assert list(whole.modules()) == [whole, linear, module]
    assert list(whole.buffers()) == []
    linear.weight.grad = torch.ones(3, 3)
    whole.zero_grad()
    assert linear.weight.grad is None
    whole.requires_grad_(False)
    assert not linear.bias.requires_grad
    assert value(module).factor.requires_grad


def test_a_module_that_contains_it_is_cast_and_moved_with_it(module: RemoteModule) -> None:
    whole = torch.nn.Sequential(torch.nn.Linear(3, 3), module)
    assert whole.to(torch.float64)(X.double()).dtype == torch.float64
    assert value(module).linear.weight.dtype == torch.float64
    assert whole.float()(X).dtype == torch.float32
    whole.to("meta")
    assert module.device == "meta"
    assert value(module).calls.is_meta
