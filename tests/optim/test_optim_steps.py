"""Steps of many at once, errors, and the norm of gradients over all workers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from zrpc.optim import DistributedOptimizer, clip_grad_norm_

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

SOON = 20.0

# The workers are threads of this process: each takes its parameters from here.
PARAMETERS: dict[str, torch.Tensor] = {}
GATES: dict[str, threading.Event] = {}


@pytest.fixture(autouse=True)
def _forget():
    for name in ("entered", "go"):
        GATES[name] = threading.Event()
    yield
    for gate in GATES.values():
        gate.set()
    PARAMETERS.clear()
    GATES.clear()


def refer(name):
    return zrpc.RRef(PARAMETERS[name])


def make(name, owner, value=(1.0, 2.0, 3.0)):
    PARAMETERS[name] = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    return zrpc.rpc_sync(f"worker{owner}", refer, (name,))


def use(rref, factor):
    return (rref.local_value() * factor).sum()


def go_back(context_id, rrefs, factor=1.0):
    """The gradient of each parameter is the factor, in each element."""
    losses = [zrpc.rpc_sync(rref.owner(), use, (rref, factor)) for rref in rrefs]
    dist_autograd.backward(context_id, losses)


def gradients(rref, context_id):
    return zrpc.rpc_sync(rref.owner(), gradient_there, (rref, context_id))


def gradient_there(rref, context_id):
    return dist_autograd.get_gradients(context_id).get(rref.local_value())


# Which context.


def test_step_takes_the_current_context(mesh):
    def run():
        rref = make("w", 1)
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
        with dist_autograd.context() as context_id:
            go_back(context_id, [rref])
            assert optimizer.step() is None
        return PARAMETERS["w"].tolist()

    assert mesh.run(0, run) == [0.5, 1.5, 2.5]


def test_step_outside_of_a_context(mesh):
    def run():
        rref = make("w", 1)
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
        with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 77"):
            optimizer.step(77)
        with dist_autograd.context() as context_id:
            go_back(context_id, [rref])
        with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
            optimizer.step(context_id)
        return PARAMETERS["w"].tolist()

    assert mesh.run(0, run) == [1.0, 2.0, 3.0]


def test_step_from_another_thread(mesh):
    def run():
        rref, untouched = make("w", 1), make("untouched", 2)
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref, untouched], lr=0.5)
        with dist_autograd.context() as context_id:
            go_back(context_id, [rref])

            def step():
                with mesh.agent(0).as_current():
                    optimizer.step(context_id)

            with ThreadPoolExecutor(1) as pool:
                pool.submit(step).result(SOON)
        return PARAMETERS["w"].tolist(), PARAMETERS["untouched"].tolist()

    assert mesh.run(0, run) == ([0.5, 1.5, 2.5], [1.0, 2.0, 3.0])


def test_step_uses_the_gradients_of_its_context_only(mesh):
    def run():
        rref = make("w", 1)
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
        with dist_autograd.context() as context_id:
            go_back(context_id, [rref], 100.0)
        with dist_autograd.context() as context_id:
            go_back(context_id, [rref])
            optimizer.step(context_id)
            optimizer.step(context_id)
        return PARAMETERS["w"].tolist()

    assert mesh.run(0, run) == [0.0, 1.0, 2.0]


# Many at once.


def test_steps_of_many_trainers_over_the_same_parameters(mesh):
    """Each step counts, with its own gradients."""
    count, steps = 16, 5
    rref = mesh.run(0, make, "w", 2, (0.0, 0.0, 0.0))

    def trainer(number):
        with mesh.agent(0).as_current():
            optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=1.0)
            for _ in range(steps):
                with dist_autograd.context() as context_id:
                    go_back(context_id, [rref], float(number))
                    optimizer.step(context_id)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(trainer, range(count)))
    assert PARAMETERS["w"].tolist() == [-steps * sum(range(count))] * 3
    assert PARAMETERS["w"].grad is None


class Checked(torch.optim.Optimizer):
    """Notes whether two of its steps over a parameter run at the same time."""

    running: ClassVar[set[int]] = set()
    overlaps: ClassVar[list[int]] = []

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for p in self.param_groups[0]["params"]:
            if id(p) in Checked.running:
                Checked.overlaps.append(id(p))
            Checked.running.add(id(p))
        zrpc.rpc_sync("worker0", max, (1, 2))  # others have the time to come in
        for p in self.param_groups[0]["params"]:
            Checked.running.discard(id(p))


@pytest.mark.parametrize("kind", ["one optimizer", "several", "in part the same"])
def test_steps_over_a_parameter_are_one_after_the_other(mesh, kind):
    Checked.running.clear()
    Checked.overlaps.clear()
    a, b = mesh.run(0, make, "a", 2), mesh.run(0, make, "b", 2)

    def optimizer(number):
        return DistributedOptimizer(Checked, [[a, b], [b, a], [a]][number % 3])

    one = mesh.run(0, DistributedOptimizer, Checked, [a, b])

    def trainer(number):
        with mesh.agent(0).as_current():
            mine = {"one optimizer": lambda: one, "several": lambda: optimizer(0)}.get(
                kind, lambda: optimizer(number)
            )()
            for _ in range(3):
                with dist_autograd.context() as context_id:
                    go_back(context_id, [a, b])
                    mine.step(context_id)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(trainer, range(6)))
    assert Checked.overlaps == []


class Gated(torch.optim.SGD):
    def step(self):
        GATES["entered"].set()
        assert GATES["go"].wait(SOON)
        super().step()


def test_steps_over_other_parameters_do_not_wait(mesh):
    """While one step is held up, those over other parameters of the same worker are done."""
    a, b = mesh.run(0, make, "a", 2), mesh.run(0, make, "b", 2)

    def slow():
        with mesh.agent(0).as_current():
            optimizer = DistributedOptimizer(Gated, [a], lr=1.0)
            with dist_autograd.context() as context_id:
                go_back(context_id, [a])
                optimizer.step(context_id)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(slow)
        assert GATES["entered"].wait(SOON)

        def run():
            optimizer = DistributedOptimizer(torch.optim.SGD, [b], lr=1.0)
            with dist_autograd.context() as context_id:
                go_back(context_id, [b])
                optimizer.step(context_id)
                optimizer.state_dict()

        mesh.submit(0, run).result(SOON / 2)
        assert PARAMETERS["b"].tolist() == [0.0, 1.0, 2.0]
        assert PARAMETERS["a"].tolist() == [1.0, 2.0, 3.0]
        GATES["go"].set()
        future.result(SOON)
    assert PARAMETERS["a"].tolist() == [0.0, 1.0, 2.0]


# Errors.


class Fails(torch.optim.SGD):
    def step(self):
        raise ArithmeticError("no step on purpose")


def fails_at_worker1(params, lr):
    name = zrpc.get_worker_info().name
    return (Fails if name == "worker1" else torch.optim.SGD)(params, lr=lr)


def test_a_step_that_fails_at_one_owner(mesh):
    """The error reaches the caller, and the other owners have stepped."""

    def run():
        rrefs = [make(f"w{rank}", rank) for rank in range(3)]
        optimizer = DistributedOptimizer(fails_at_worker1, rrefs, lr=1.0)
        with dist_autograd.context() as context_id:
            go_back(context_id, rrefs)
            with pytest.raises(ArithmeticError, match="no step on purpose") as raised:
                optimizer.step(context_id)
            assert "worker1" in str(raised.value.__cause__)
        assert all(PARAMETERS[f"w{rank}"].grad is None for rank in range(3))
        again = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
        with dist_autograd.context() as context_id:
            go_back(context_id, rrefs)
            again.step(context_id)
        return [PARAMETERS[f"w{rank}"].tolist() for rank in range(3)]

    assert mesh.run(0, run) == [[-1.0, 0.0, 1.0], [0.0, 1.0, 2.0], [-1.0, 0.0, 1.0]]


def test_a_constructor_that_fails(mesh):
    def run():
        rrefs = [make("a", 1), make("b", 2)]
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            DistributedOptimizer(torch.optim.SGD, rrefs, lr=-1.0)
        with pytest.raises(TypeError, match="no_such_option"):
            DistributedOptimizer(torch.optim.SGD, rrefs, no_such_option=1)

    mesh.run(0, run)


def test_arguments_that_are_refused(mesh):
    def run():
        rref = make("a", 1)
        with pytest.raises(ValueError, match="empty parameter list"):
            DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
        with pytest.raises(ValueError, match="empty parameter list"):
            DistributedOptimizer(torch.optim.SGD, [{"params": []}], lr=0.1)
        with pytest.raises(ValueError, match="more than once"):
            DistributedOptimizer(torch.optim.SGD, [rref, rref], lr=0.1)
        with pytest.raises(ValueError, match="more than once"):
            DistributedOptimizer(torch.optim.SGD, [{"params": [rref]}, {"params": [rref]}], lr=0.1)
        with pytest.raises(TypeError, match="RRefs of parameters"):
            DistributedOptimizer(torch.optim.SGD, [torch.ones(1)], lr=0.1)
        with pytest.raises(ValueError, match="in the constructor"):
            DistributedOptimizer(torch.optim.SGD, [rref], lr=0.1).add_param_group({"params": []})

    mesh.run(0, run)


def test_an_rref_without_a_parameter(mesh):
    def run():
        with pytest.raises(TypeError, match="can only optimize Tensors"):
            DistributedOptimizer(torch.optim.SGD, [zrpc.remote("worker1", max, (1, 2))], lr=0.1)

    mesh.run(0, run)


def test_the_same_parameter_by_two_rrefs(mesh):
    """Each has an id of its own: the owner finds out."""

    def run():
        first = make("a", 1)
        second = zrpc.rpc_sync("worker1", refer, ("a",))
        assert first != second
        other = make("b", 1)
        for groups in ([first, other, second], [{"params": [first]}, {"params": [other, second]}]):
            with pytest.raises(ValueError, match="more than once"):
                DistributedOptimizer(torch.optim.SGD, groups, lr=1)

    mesh.run(0, run)


def test_hooks_of_steps(mesh):
    def run():
        rref, seen = make("w", 1), []
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
        other = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)

        def note(when):
            return lambda *call: seen.append((when, call[0] is optimizer, call[1:]))

        before = optimizer.register_step_pre_hook(note("before"))
        optimizer.register_step_post_hook(note("after"))
        optimizer.register_step_post_hook(lambda *_: seen.append(PARAMETERS["w"].tolist()))
        with dist_autograd.context() as context_id:
            go_back(context_id, [rref])
            optimizer.step(context_id)
            before.remove()
            seen.append("again")
            optimizer.step(context_id)
            other.step(context_id)
        call = ((optimizer, context_id), {})
        assert seen[:3] == [("before", True, call), ("after", True, call), [0.5, 1.5, 2.5]]
        assert seen[3:] == ["again", ("after", True, call), [0.0, 1.0, 2.0]]

    mesh.run(0, run)


def test_hooks_of_states(mesh):
    def run():
        optimizer, seen = DistributedOptimizer(torch.optim.SGD, [make("w", 1)], lr=0.5), []
        optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
        optimizer.register_state_dict_post_hook(lambda o, state: {**state, "epoch": 7})
        optimizer.register_state_dict_post_hook(lambda o, state: seen.append(state["epoch"]))
        state = optimizer.state_dict()
        assert state["epoch"] == 7

        def shift(optimizer, state):
            seen.append(state.pop("epoch"))
            return {**state, "param_groups": [{"lr": 0.25}]}

        optimizer.register_load_state_dict_pre_hook(shift)
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert state["epoch"] == 7  # what was given is left as it is
        assert seen == ["save", 7, 7, "loaded"]

    mesh.run(0, run)


def step_there(optimizer, rref):
    optimizer.param_groups[0]["lr"] = 0.25
    with dist_autograd.context() as context_id:
        go_back(context_id, [rref])
        optimizer.step(context_id)
    return optimizer.state_dict()["workers"].keys()


def test_it_can_be_passed_to_another_worker(mesh):
    def run():
        rref, other = make("w", 1), make("other", 2)
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref, other], lr=0.5)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps `step`
        with dist_autograd.context() as context_id:
            go_back(context_id, [rref])
            optimizer.step(context_id)
        owners = zrpc.rpc_sync("worker2", step_there, (optimizer, rref))
        assert owners == {"worker1", "worker2"}
        return optimizer.param_groups[0]["lr"], PARAMETERS["w"].tolist()

    assert mesh.run(0, run) == (0.5, [0.25, 1.25, 2.25])


def test_repr(mesh):
    def run():
        rrefs = [make("a", 1), make("b", 2)]
        return repr(DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1))

    text = mesh.run(0, run)
    assert "worker1" in text
    assert "worker2" in text


def owned_then_gone():
    return zrpc.RRef(torch.ones(2, requires_grad=True))


@pytest.mark.zrpc(workers=3, processes=True, timeout=60)
def test_an_owner_that_died(mesh):
    future = mesh.submit(0, optimize_two)
    future.result(SOON)
    mesh.kill("worker2")
    with pytest.raises(ConnectionError, match="worker2"):
        mesh.submit(0, step_of_two).result(SOON)


def optimize_two():
    agent = zrpc.current.current_agent()
    rrefs = [zrpc.rpc_sync(f"worker{rank}", owned_then_gone) for rank in (1, 2)]
    agent.test_optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)


def step_of_two():
    agent = zrpc.current.current_agent()
    optimizer = agent.__dict__.pop("test_optimizer")
    with dist_autograd.context() as context_id:
        optimizer.step(context_id)


# clip_grad_norm_


def clip_both(mesh, factors, max_norm, norm_type=2.0, **options):
    """The norm and gradients by zrpc and by torch; parameters of several workers."""
    owners = [1, 0, 2, 1][: len(factors)]

    def run():
        rrefs = [make(f"w{i}", owner) for i, owner in enumerate(owners)]
        with dist_autograd.context() as context_id:
            used = [(rref, by) for rref, by in zip(rrefs, factors, strict=True) if by is not None]
            if used:
                losses = [zrpc.rpc_sync(rref.owner(), use, (rref, by)) for rref, by in used]
                dist_autograd.backward(context_id, losses)
            norm = clip_grad_norm_(context_id, rrefs, max_norm, norm_type, **options)
            return norm, [gradients(rref, context_id) for rref in rrefs]

    found = mesh.run(0, run)
    locals_ = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in factors]
    for weight, by in zip(locals_, factors, strict=True):
        weight.grad = None if by is None else torch.full_like(weight, by)
    norm = torch.nn.utils.clip_grad_norm_(locals_, max_norm, norm_type)
    return found, (norm, [weight.grad for weight in locals_])


@pytest.mark.parametrize(
    "norm_type",
    [
        2.0,
        1.0,
        3.0,
        float("inf"),
        0.0,
    ],
)
@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_clipping_equals_torchs(mesh, norm_type, max_norm):
    (norm, found), (expected_norm, expected) = clip_both(
        mesh, [1.0, -4.0, 0.25, 3.0], max_norm, norm_type
    )
    torch.testing.assert_close(norm, expected_norm)
    torch.testing.assert_close(found, expected)


def test_clipping_with_a_parameter_without_gradient(mesh):
    (norm, found), (expected_norm, expected) = clip_both(mesh, [1.0, None, 2.0], 0.5)
    torch.testing.assert_close(norm, expected_norm)
    assert found[1] is None
    assert expected[1] is None
    torch.testing.assert_close([found[0], found[2]], [expected[0], expected[2]])


def test_clipping_without_any_gradient(mesh):
    (norm, found), (expected_norm, _) = clip_both(mesh, [None, None], 0.5)
    assert norm.item() == expected_norm.item() == 0.0
    assert found == [None, None]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_norms_that_are_not_finite(mesh, bad):
    (norm, found), (expected_norm, expected) = clip_both(mesh, [1.0, bad, 2.0], 0.5)
    torch.testing.assert_close(norm, expected_norm, equal_nan=True)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_norms_that_are_not_finite_as_an_error(mesh, bad):
    def run():
        rrefs = [make("a", 1), make("b", 2)]
        with dist_autograd.context() as context_id:
            losses = [
                zrpc.rpc_sync(rref.owner(), use, (rref, by))
                for rref, by in zip(rrefs, (bad, 4.0), strict=True)
            ]
            dist_autograd.backward(context_id, losses)
            with pytest.raises(RuntimeError, match=f"{bad}"):
                clip_grad_norm_(context_id, rrefs, 0.5, error_if_nonfinite=True)
            return gradients(rrefs[1], context_id).tolist()

    assert mesh.run(0, run) == [4.0, 4.0, 4.0]


def test_clipping_sparse_gradients(mesh):
    weight = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    PARAMETERS["table"] = weight

    def run():
        table, dense = zrpc.rpc_sync("worker1", refer, ("table",)), make("w", 2)
        with dist_autograd.context() as context_id:
            rows = zrpc.rpc_sync("worker1", look_up, (table,))
            dist_autograd.backward(context_id, [rows, zrpc.rpc_sync("worker2", use, (dense, 2.0))])
            norm = clip_grad_norm_(context_id, [table, dense], 0.5)
            found = gradients(table, context_id)
            assert found.is_sparse
            return norm, found.to_dense(), gradients(dense, context_id)

    norm, sparse, dense = mesh.run(0, run)
    # torch's own refuses sparse gradients: the same with a dense one.
    locals_ = [weight, torch.ones(3, dtype=torch.float64, requires_grad=True)]
    locals_[0].grad = torch.autograd.grad(rows_of(weight, sparse=False), weight)[0]
    locals_[1].grad = torch.full_like(locals_[1], 2.0)
    expected = torch.nn.utils.clip_grad_norm_(locals_, 0.5)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close([sparse, dense], [w.grad for w in locals_])


def look_up(rref):
    return rows_of(rref.local_value(), sparse=True)


def rows_of(weight, sparse):
    indices = torch.tensor([1, 3, 1])
    return torch.nn.functional.embedding(indices, weight, sparse=sparse).sum()


def test_clipping_in_an_unknown_context(mesh):
    def run():
        rref = make("a", 1)
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 77"):
            clip_grad_norm_(77, [rref], 1.0)

    mesh.run(0, run)


def test_clipping_then_stepping(mesh):
    def run():
        rrefs = [make("a", 1), make("b", 2)]
        optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
        with dist_autograd.context() as context_id:
            go_back(context_id, rrefs)
            norm = clip_grad_norm_(context_id, rrefs, 0.5)
            optimizer.step(context_id)
        return norm.item(), PARAMETERS["a"].detach(), PARAMETERS["b"].detach()

    norm, a, b = mesh.run(0, run)
    assert norm == pytest.approx(6**0.5)
    step = 0.5 / 6**0.5
    torch.testing.assert_close(a, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) - step)
    torch.testing.assert_close(b, a)
