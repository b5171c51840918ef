"""Code that torch compiles or records uses zrpc, and compiled functions and modules are sent."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import zrpc
import zrpc.autograd as dist_autograd
from tests.support.identity import here
from zrpc.errors import SerializationError
from zrpc.nn import RemoteModule
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh

pytestmark = [pytest.mark.system, pytest.mark.zrpc(workers=2, timeout=60)]

X = torch.ones(3)


class Model:
    """A value on worker1."""

    def __init__(self) -> None:
        self.linear = torch.nn.Linear(3, 3)

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def weight(self) -> torch.Tensor:
        return torch.full((3,), 2.0, requires_grad=True)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()

    def parameters(self) -> Any:
        return [zrpc.RRef(each) for each in self.linear.parameters()]

    def bias(self) -> torch.Tensor:
        return self.linear.bias.detach().clone()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return torch.compile(function, **{"backend": "eager", **settings})


def frames() -> int:
    """Returns how many functions, and parts of functions, Dynamo has tried to compile."""
    return counters["frames"]["total"]


# -- compiled code that uses zrpc ----------------------------------------------------------------


def by_sync() -> Any:
    return zrpc.rpc_sync("worker1", double, args=(X * 2,)) + 1


def by_async() -> Any:
    return zrpc.rpc_async("worker1", double, args=(X * 2,)).wait() + 1


def by_then() -> Any:
    future = zrpc.rpc_async("worker1", double, args=(X * 2,))
    return future.then(lambda done: done.wait() + 1).wait() * 1


def by_remote() -> Any:
    return zrpc.remote("worker1", double, args=(X * 2,)).to_here() + 1


CALLS = [
    *(by_sync, by_async, by_then, by_remote),
    lambda: zrpc.RRef(X * 2).local_value() * 2 + 1,
    lambda: sum(zrpc.wait_all([zrpc.rpc_async("worker1", double, (X,)) for _ in range(2)])) + 1,
]


@pytest.mark.parametrize("function", CALLS)
def test_only_the_programs_parts_are_compiled(caller: Mesh, function: Callable[[], Any]) -> None:
    assert compiled(function)().tolist() == [5, 5, 5]
    assert 0 < frames() <= 4


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
@pytest.mark.parametrize("makes_proxy", [True, False])
def test_compiled_code_calls_methods_by_proxy(caller: Mesh, way: str, makes_proxy: bool) -> None:
    rref = zrpc.remote("worker1", Model)
    proxy = getattr(rref, way)()

    def function() -> Any:
        return (getattr(rref, way)() if makes_proxy else proxy).double(X * 2)

    results: dict[str, Any] = {"rpc_async": zrpc.Future.wait, "remote": zrpc.RRef.to_here}
    result = results.get(way, torch.Tensor.clone)(compiled(function)())
    assert result.tolist() == [4, 4, 4]
    assert 0 < frames() <= 3


def test_many_calls_of_a_compiled_function_compile_it_once(caller: Mesh) -> None:
    function = compiled(by_sync)
    for _ in range(60):
        function()
    assert frames() == 2


def test_rrefs_futures_and_workers_are_arguments_of_compiled_code(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", Model)
    future = zrpc.rpc_async("worker1", double, (X,))

    def function(rref: Any, future: Any, worker: Any) -> Any:
        return rref.rpc_sync().double(X) + future.wait() + worker.id

    assert compiled(function)(rref, future, rref.owner()).tolist() == [5, 5, 5]
    assert frames() <= 5


def test_a_compiled_step_trains(caller: Mesh) -> None:
    model = zrpc.remote("worker1", Model)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.rpc_sync().parameters(), lr=0.5)
    before = model.rpc_sync().bias()

    def step() -> Any:
        with dist_autograd.context() as context_id:
            loss = model.rpc_sync().loss(X)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            return loss

    compiled(step)()
    assert torch.allclose(model.rpc_sync().bias(), before - 0.5)
    assert frames() <= 8  # torch's own code around a step is among them


def test_a_compiled_module_has_a_remote_module_in_it(caller: Mesh) -> None:
    local, remote = torch.nn.Linear(3, 3), RemoteModule("worker1", torch.nn.Linear, (3, 3))
    module: Any = torch.nn.Sequential(local, remote, torch.nn.ReLU())
    assert torch.allclose(compiled(module)(X), module(X))
    assert frames() <= 3


REFUSED: dict[str, Callable[[], Any]] = {
    "rpc_sync": by_sync,
    "rpc_async": by_async,
    "remote": by_remote,
    "RRef.rpc_sync": lambda: zrpc.RRef(Model()).rpc_sync().double(X),
    "context": lambda: dist_autograd.context().__enter__(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_without_breaks_names_the_use_of_zrpc(caller: Mesh, name: str) -> None:
    with pytest.raises(Exception, match=f"(?s){name}") as raised:
        compiled(REFUSED[name], fullgraph=True)()
    assert type(raised.value).__module__ == "torch._dynamo.exc"


def test_the_graph_breaks_say_why(caller: Mesh) -> None:
    reasons = torch._dynamo.explain(by_sync)().break_reasons
    assert "zrpc is never compiled, since its calls run on other workers" in str(reasons)


def test_handlers_that_run_compiled_functions_are_compiled(caller: Mesh) -> None:
    threads = set()

    @here
    def handler(number: int) -> Any:
        threads.add(threading.get_ident())
        return function(X * number)

    function = compiled(lambda x: x * 2)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(_call_as, caller, handler, number) for number in range(8)]
        assert [each.result().tolist()[0] for each in calls] == [2 * n for n in range(8)]
    assert threading.get_ident() not in threads
    assert frames() > 0


def _call_as(mesh: Mesh, handler: Callable[..., Any], number: int) -> Any:
    with mesh.agent(0).as_current():
        return zrpc.rpc_sync("worker1", handler, (number,))


# -- compiled functions and modules that are sent ------------------------------------------------


@compiled
def compiled_double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@compiled
def factorial(x: torch.Tensor, n: int) -> torch.Tensor:
    return x if n == 0 else factorial(x, n - 1) * n


def own_backend(graph: Any, _inputs: Any) -> Any:
    return graph.forward


SETTINGS: list[dict[str, Any]] = [
    {},
    {"backend": "aot_eager", "fullgraph": True, "dynamic": False},
    {"backend": own_backend, "dynamic": True},
    {"backend": "inductor", "options": {"max_autotune": False}},
]


def settings_of(function: Any) -> Any:
    """Returns what a compiled function was compiled with, as far as it can be seen."""
    context = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))["self"]
    backend = context.cell_contents.callback
    names = []
    while backend is not None:
        names.append((type(backend).__name__, getattr(backend, "compiler_name", None)))
        backend = getattr(
            backend,
            "_torchdynamo_orig_backend",
            getattr(backend, "_torchdynamo_orig_callable", None),
        )
    return names, context.cell_contents._dynamic


def test_a_compiled_function_is_called_by_its_name(caller: Mesh) -> None:
    assert zrpc.rpc_sync("worker1", compiled_double, (X,)).tolist() == [2, 2, 2]
    assert zrpc.rpc_sync("worker1", factorial, (X, 4)).tolist() == [24, 24, 24]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_local_function_arrives_with_its_settings(caller: Mesh, settings: dict[str, Any]) -> None:
    function = compiled(lambda x: x * 3, **settings)
    assert zrpc.rpc_sync("worker1", settings_of, (function,)) == settings_of(function)


def test_local_functions_are_sent_compiled_or_not(caller: Mesh) -> None:
    @functools.wraps(compiled_double)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return compiled_double(x) + 1

    factor = 3
    function = compiled(lambda x: x * factor)
    assert zrpc.rpc_sync("worker1", function, (X,)).tolist() == [3, 3, 3]
    assert frames() == 1
    assert zrpc.rpc_sync("worker1", decorated, (X,)).tolist() == [3, 3, 3]
    disabled = torch.compiler.disable(lambda x: x * 2)
    assert zrpc.rpc_sync("worker1", disabled, (X,)).tolist() == [2, 2, 2]


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[2], {"fullgraph": True}])
def test_a_compiled_module_arrives_compiled(caller: Mesh, settings: dict[str, Any]) -> None:
    module = torch.nn.Linear(3, 3)
    sent = compiled(module, **settings)
    assert torch.allclose(zrpc.rpc_sync("worker1", sent, (X,)), module(X))
    assert counters["stats"]["unique_graphs"] == 1


# -- code that torch records: by torch.jit.trace, torch.export, torch.fx --------------------------

RECORDED: list[Callable[[torch.Tensor], Any]] = [
    lambda x: zrpc.rpc_sync("worker1", double, (x,)),
    lambda x: zrpc.rpc_async("worker1", double, (x,)).wait(),
    lambda x: zrpc.rpc_async("worker1", double, (x,)).then(lambda f: f.wait() * 1).wait(),
    lambda x: zrpc.remote("worker1", double, (x,)).to_here(),
    lambda x: zrpc.remote("worker1", Model).rpc_sync().double(x),
    lambda x: zrpc.remote("worker1", Model).rpc_sync().weight(),
]


class Calling(torch.nn.Module):
    """A module that makes a call."""

    def __init__(self, call: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self._call(x) + x


def test_a_call_is_a_constant_of_a_trace_and_a_warning_says_so(caller: Mesh) -> None:
    for call in RECORDED:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("always", torch.jit.TracerWarning)
            traced: Any = torch.jit.trace(Calling(call), X)
        assert traced(torch.zeros(3)).tolist() == [2, 2, 2]
        assert caught
        for each in caught:
            assert "does not record calls to other workers" in str(each.message)
            assert each.filename == __file__


def test_a_tensor_whose_shape_is_traced_is_sent_as_any(caller: Mesh) -> None:
    def call(x: torch.Tensor) -> Any:
        return zrpc.rpc_sync("worker1", double, (x[: x.shape[0] - 1].expand(2, -1).t(),)).sum() + x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.jit.trace(call, X)(X).tolist() == [9, 9, 9]


def test_a_call_in_a_module_that_is_recorded_is_an_error_that_says_why(caller: Mesh) -> None:
    for call in RECORDED:
        text = r"outside of torch\.export, .* calls to other"
        with pytest.raises(SerializationError, match=text):
            torch.export.export(Calling(call), (X,), strict=False)
        text = "zrpc is never compiled, since its calls run on other"
        with pytest.raises(Exception, match=text):
            torch.export.export(Calling(call), (X,), strict=True)
        for mode in ("real", "fake", "symbolic"):
            text = r"outside of make_fx, .* calls to other workers"
            with pytest.raises(SerializationError, match=text):
                make_fx(Calling(call), tracing_mode=mode)(X)
    for call in RECORDED[:-1]:  # the last one's arguments are not recorded
        text = r"Proxy of torch\.fx\..* in torch\.fx\.wrap"
        with pytest.raises(SerializationError, match=text):
            torch.fx.symbolic_trace(Calling(call))


def by_worker(x: torch.Tensor) -> Any:
    return zrpc.rpc_sync("worker1", double, (x,))


torch.fx.wrap("by_worker")


def test_a_function_that_calls_can_be_wrapped_for_a_symbolic_trace(caller: Mesh) -> None:
    graph = torch.fx.symbolic_trace(lambda x: by_worker(x) + 1)
    assert graph(X).tolist() == [3, 3, 3]


def test_calls_under_other_modes_of_the_dispatcher_go_through(caller: Mesh) -> None:
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert zrpc.rpc_sync("worker1", double, (X,)).tolist() == [2, 2, 2]
