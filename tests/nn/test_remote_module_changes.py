"""Methods that change a module on another worker, and hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.nn.remote_layers import CALLS, Scale, X, double_, value
from zrpc.nn import RemoteModule

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def test_train_and_eval_set_the_mode(module: RemoteModule) -> None:
    assert module.eval() is module
    assert not module.training
    assert not value(module).training
    assert not value(module).linear.training
    assert not module(X).any()
    assert module.train() is module
    assert module.training
    assert value(module).training
    assert module(X).any()
    assert module.train(False) is module
    assert not module.training
    assert not value(module).training
    assert not zrpc.rpc_sync("worker2", is_training, (module,))


def is_training(module: RemoteModule) -> bool:
    return module.training


def test_a_mode_that_the_module_refuses_is_not_set(module: RemoteModule) -> None:
    with pytest.raises(ValueError, match="training mode is expected to be boolean"):
        module.train(2)  # type: ignore[arg-type]
    assert module.training is True


def test_casts_change_the_parameters(module: RemoteModule) -> None:
    for method, dtype in (
        ("double", torch.float64),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float", torch.float32),
    ):
        assert getattr(module, method)() is module
        assert value(module).linear.weight.dtype == dtype
        assert module(X.to(dtype)).dtype == dtype


def test_to_casts_the_module(module: RemoteModule) -> None:
    for args in ((torch.float64,), ("cpu", torch.float64), (torch.ones(1).double(),)):
        assert module.to(*args) is module
        assert value(module).linear.weight.dtype == torch.float64
        assert module.device == "cpu"
        assert module.to(dtype=torch.float32) is module
        assert value(module).linear.weight.dtype == torch.float32


def test_to_moves_the_module_to_a_device(module: RemoteModule) -> None:
    assert module.to("meta") is module
    assert module.device == "meta"
    assert value(module).linear.weight.is_meta


def test_cpu_keeps_the_device(module: RemoteModule) -> None:
    assert module.cpu() is module
    assert module.device == "cpu"


def test_apply_reaches_all_submodules(module: RemoteModule) -> None:
    assert module.apply(double_) is module
    expected = Scale(2.0).apply(double_)
    torch.testing.assert_close(module.state_dict()["factor"], expected.factor.detach())
    torch.testing.assert_close(module(X), expected(X))
    module.apply(lambda each: each.__dict__.update(mark=type(each).__name__))
    assert value(module).mark == "Scale"
    assert value(module).linear.mark == "Linear"


def test_zero_grad_clears_gradients(module: RemoteModule) -> None:
    there = value(module)
    there.factor.grad = torch.ones(())
    module.zero_grad(set_to_none=False)
    assert there.factor.grad == 0
    module.zero_grad()
    assert there.factor.grad is None


def test_requires_grad_reaches_all_parameters(module: RemoteModule) -> None:
    assert module.requires_grad_(False) is module
    assert not any(parameter.requires_grad for parameter in value(module).parameters())
    assert not module(X).requires_grad
    module.requires_grad_()
    assert all(parameter.requires_grad for parameter in value(module).parameters())


def record_forward(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    CALLS.append(("forward", zrpc.get_worker_info().name))
    return output + 100


def record_pre(module: torch.nn.Module, inputs: Any) -> tuple[torch.Tensor]:
    CALLS.append(("pre", zrpc.get_worker_info().name))
    return (inputs[0] * 0,)


def record_keywords(
    module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    CALLS.append(("keywords", sorted(kwargs)))
    return args, {**kwargs, "bias": 5.0}


def record_backward(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    CALLS.append(("backward", outputs[0].shape))


def record_backward_pre(module: torch.nn.Module, outputs: Any) -> None:
    CALLS.append(("backward pre", outputs[0].shape))


def test_forward_hooks_run_on_the_worker(module: RemoteModule) -> None:
    plain = module(X)
    handle = module.register_forward_hook(record_forward)
    torch.testing.assert_close(module(X), plain + 100)
    torch.testing.assert_close(module.forward_async(X).wait(), plain + 100)
    assert CALLS == [("forward", "worker1")] * 2
    handle.remove()
    torch.testing.assert_close(module(X), plain)
    assert len(CALLS) == 2


def test_forward_pre_hooks_run_on_the_worker(module: RemoteModule) -> None:
    handle = module.register_forward_pre_hook(record_pre)
    torch.testing.assert_close(module(X), Scale(2.0)(X * 0))
    assert CALLS == [("pre", "worker1")]
    handle.remove()
    torch.testing.assert_close(module(X), Scale(2.0)(X))


def test_hooks_take_options(module: RemoteModule) -> None:
    with module.register_forward_pre_hook(record_keywords, with_kwargs=True):
        torch.testing.assert_close(module(X, bias=1.0), Scale(2.0)(X, 5.0))
    assert CALLS == [("keywords", ["bias"])]
    torch.testing.assert_close(module(X, bias=1.0), Scale(2.0)(X, 1.0))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hooks_run_on_the_worker(module: RemoteModule) -> None:
    handles = [
        module.register_full_backward_hook(record_backward),
        module.register_full_backward_pre_hook(record_backward_pre),
    ]

    def run_backward() -> None:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [module(X).sum()])

    run_backward()
    assert CALLS == [("backward pre", (2, 3)), ("backward", (2, 3))]
    for handle in handles:
        handle.remove()
    run_backward()
    assert len(CALLS) == 2


NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_module": ("name", torch.nn.Module()),
    "buffers": (),
    "children": (),
    "extra_repr": (),
    "modules": (),
    "named_buffers": (),
    "named_children": (),
    "named_modules": (),
    "parameters": (),
    "register_backward_hook": (record_backward,),
    "register_buffer": ("name", torch.ones(1)),
    "register_parameter": ("name", torch.nn.Parameter(torch.ones(1))),
    "share_memory": (),
    "type": (torch.float64,),
}


def test_unsupported_methods_raise(module: RemoteModule) -> None:
    for name in NOT_SUPPORTED:
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)(*NOT_SUPPORTED[name])


def test_the_error_of_parameters_names_the_alternative(module: RemoteModule) -> None:
    with pytest.raises(ValueError, match="remote_parameters"):
        module.parameters()


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
    whole.eval()
    assert not module.training
    assert not value(module).training
    whole.to("meta")
    assert module.device == "meta"
    assert value(module).calls.is_meta
