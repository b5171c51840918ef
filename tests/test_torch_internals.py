"""torch's private names still do what zrpc uses them for; a test names the one that has changed."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from zrpc import torch_internals
from zrpc.testing import Mesh, fake_device
from zrpc.torch_internals import (
    ACCUMULATE_NODE,
    EngineLocal,
    any_hook_before,
    apply_function,
    base_of,
    current_graph_task,
    has_process_group,
    hooks_of_leaf,
    is_profiling,
    is_view,
    node_class_of,
    rank_last,
    rank_second_last,
    run_backward,
    saved_without_memory,
    sequence_number,
    storage_uses,
    tensor_uses,
)

ZRPC = Path(torch_internals.__file__).parent
AUTOGRAD = [
    *sorted(ZRPC.glob("services/autograd/*.py")),
    *sorted(ZRPC.glob("optim/*.py")),
    ZRPC / "autograd.py",
]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.fixture
def leaf() -> Any:
    return torch.ones(2, requires_grad=True)


def nothing(*_: Any) -> None: ...


def test_run_backward(leaf: Any) -> None:
    arguments = ((leaf * 3).sum(),), (torch.ones(()),), False, False, (leaf,)
    [found] = run_backward(*arguments, allow_unreachable=True, accumulate_grad=False)
    assert found.tolist() == [3, 3]


def test_current_graph_task(leaf: Any) -> None:
    seen = []
    result = leaf * 1
    result.register_hook(lambda _: seen.append(current_graph_task()))
    for _ in range(2):
        result.sum().backward(retain_graph=True)
    first, second = seen
    assert first != second
    assert current_graph_task() == -1


def test_apply_function(leaf: Any) -> None:
    class Direct(Doubled):
        apply = apply_function

    Direct.apply(leaf).sum().backward()
    assert leaf.grad.tolist() == [2, 2]


def test_node_class_of(leaf: Any) -> None:
    class Renamed(Doubled):
        pass

    node_class_of(Renamed).__name__ = "Other"
    node_class_of(Renamed).apply = lambda ctx, gradient: gradient * 7
    result = Renamed.apply(leaf)
    assert type(result.grad_fn) is node_class_of(Renamed)
    assert result.grad_fn.name() == "Other"
    result.sum().backward()
    assert leaf.grad.tolist() == [7, 7]


def test_accumulate_node(leaf: Any) -> None:
    node: Any = (leaf * 1).grad_fn
    accumulator = node.next_functions[0][0]
    assert type(accumulator) is ACCUMULATE_NODE
    assert accumulator.variable is leaf


def order_of(leaf: torch.Tensor, *ranks: Callable[[Any], None]) -> list[int]:
    """The order in which the engine runs two nodes that are ready at once."""
    order: list[int] = []
    roots = []
    for number, each in enumerate(ranks):
        result: Any = leaf * 1
        each(result.grad_fn)
        result.grad_fn.register_prehook(lambda _, n=number: order.append(n))
        roots.append(result.sum())
    torch.autograd.backward(roots)
    return order


def test_sequence_number_rank_last_and_rank_second_last(leaf: Any) -> None:
    node: Any = (leaf * 1).grad_fn
    for rank, number in ((rank_second_last, 1), (rank_last, 0)):
        rank(node)
        assert sequence_number(node) == number
    assert order_of(leaf, rank_last, rank_second_last) == [1, 0]
    assert order_of(leaf, rank_second_last, rank_last) == [0, 1]


def test_base_of_and_is_view(leaf: Any) -> None:
    view = leaf.view(2, 1)
    assert base_of(view) is leaf
    assert base_of(leaf) is None
    assert (is_view(view), is_view(leaf)) == (True, False)


def test_tensor_uses_and_storage_uses(leaf: Any) -> None:
    """A count that is too high only costs a copy; one that is too low changes a user's tensor."""
    alone = torch.ones(2)
    before = tensor_uses(alone), storage_uses(alone.untyped_storage())
    view = alone.view(2, 1)
    after = tensor_uses(alone), storage_uses(alone.untyped_storage())
    assert view is not None
    assert all(more > fewer for more, fewer in zip(after, before, strict=True))


@pytest.mark.parametrize("disabled", [False, True])
def test_saved_without_memory(leaf: torch.Tensor, disabled: bool) -> None:
    data, factor = torch.zeros(1), leaf * 1
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no") if disabled else nullcontext(),
        saved_without_memory(data),
    ):
        within: Any = (factor * factor).grad_fn
    after: Any = (factor * factor).grad_fn
    saved, whole = [node._saved_self for node in (within, after)]
    assert saved.grad_fn is factor.grad_fn
    assert saved.data_ptr() == data.data_ptr()
    assert whole is factor


def test_hooks_of_leaf(leaf: Any) -> None:
    assert not any(hooks_of_leaf(leaf))
    handles = [leaf.register_hook(nothing), leaf.register_post_accumulate_grad_hook(nothing)]
    assert [list(each or {}) for each in hooks_of_leaf(leaf)] == [[h.id] for h in handles]


def test_wrap_hook_registration(leaf: Any) -> None:
    seen = []
    function: Any = torch.autograd.Function
    registered = function._register_hook

    def noting(register: Callable[..., Any]) -> Callable[..., Any]:
        return lambda hooks, hook: (seen.append(hook), register(hooks, hook))[1]

    torch_internals.wrap_hook_registration(noting)
    try:
        node: Any = (leaf * 1).grad_fn
        node.register_hook(nothing)
        node.register_prehook(nothing)
    finally:
        function._register_hook = staticmethod(registered)
    assert seen == [nothing, nothing]


def test_wrap_engine(leaf: Any) -> None:
    seen = []
    before = torch.autograd.graph._engine_run_backward

    def noting(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda roots, *args, **more: (seen.append(args[3]), run(roots, *args, **more))[1]

    torch_internals.wrap_engine(noting)
    try:
        (leaf * 2).sum().backward()
        (leaf * 2).sum().backward(inputs=[leaf])
        torch.autograd.grad((leaf * 2).sum(), leaf)
    finally:
        torch_internals.wrap_engine(lambda _: before)
    assert list(map(tuple, seen)) == [(), (leaf,), (leaf,)]


def test_any_hook_before(leaf: Any) -> None:
    before = RemovableHandle.next_id
    leaf.register_hook(nothing)
    assert before + 1 == RemovableHandle.next_id
    assert any_hook_before()


def see_values_in_threads() -> list[tuple[bool, str | None]]:
    fake_device()
    local: EngineLocal[str] = EngineLocal("a test's")
    caller, seen = threading.get_ident(), []

    def run() -> None:
        y = torch.ones(2, device="fake:0", requires_grad=True) * 2
        y.register_hook(lambda _: seen.append((threading.get_ident() != caller, local.get())))
        y.sum().backward()

    assert local.set("outer") is None
    assert local.set("inner") == "outer"
    run()
    local.set(None)
    run()
    return seen


@pytest.mark.zrpc(workers=1, processes=True)
def test_enginelocal(mesh: Mesh) -> None:
    """The values of a thread hold in the threads of torch's engine that it calls, and end."""
    assert mesh.run(0, see_values_in_threads) == [(True, "inner"), (True, None)]


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch removes none")
def test_a_thread_ends_without_the_values_of_an_enginelocal() -> None:
    """To free one it would need the interpreter's lock, as the interpreter may be finalized."""
    local: EngineLocal[str] = EngineLocal("another test's")
    for value in ("outer", "inner"):
        before = local.set(value)
        assert torch._C._is_key_in_tls("another test's")
        local.set(before)
    assert not torch._C._is_key_in_tls("another test's")


def test_has_process_group() -> None:
    assert has_process_group() == torch.distributed.is_initialized()


def test_is_profiling() -> None:
    assert not is_profiling()
    with torch.autograd.profiler.profile():
        assert is_profiling()
    assert not is_profiling()


def test_each_name_has_a_test() -> None:
    names = set()
    for each in ast.parse(Path(torch_internals.__file__).read_text()).body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            names.add(each.name)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
    tests = [name for name in globals() if name.startswith("test_")]
    public = {name for name in names if not name.startswith("_")}
    assert len(public) > 15
    assert {name for name in public if not any(name.lower() in test for test in tests)} == set()


def is_private_to_torch(name: str) -> bool:
    node = (torch.ones(1, requires_grad=True) * 1).grad_fn
    holders = (torch, torch._C, torch.Tensor, torch.autograd.Function, node)
    public = not name.startswith("_") or name.endswith("__")
    return not public and any(hasattr(holder, name) for holder in holders)


@pytest.mark.parametrize("path", AUTOGRAD, ids=lambda path: path.stem)
def test_autograd_uses_no_other_private_names(path: Path) -> None:
    read = {
        each.attr
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Attribute) and getattr(each.value, "id", "") != "self"
    }
    assert not set(filter(is_private_to_torch, read))
