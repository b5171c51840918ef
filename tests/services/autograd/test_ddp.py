"""DistributedDataParallel in a context gives what it gives alone, with all its options.

Two trainers run a program twice: in a context, with parts of the model on a third worker, and with
``Tensor.backward``, each in its own process.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zrpc
import zrpc.autograd as dist_autograd
from zrpc.agent.current import current_agent
from zrpc.testing import Mesh

# A gloo group leaves descriptors behind, in any process that has used DDP.
pytestmark = pytest.mark.zrpc(workers=3, processes=True, timeout=120, leaks=False)


STEPS = 3
RATE = 0.3


class Model(torch.nn.Module):
    """Has a branch that only some ranks use in some steps, and a parameter that none uses."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, generator=generator))

        self.first, self.second, self.extra = weight(4, 5), weight(5, 2), weight(5, 2)
        self.unused = weight(3) if unused else None

    def forward(self, x: Any, extra: Any, checkpointed: Any) -> Any:
        inner = checkpoint(self.inner, x, use_reentrant=False) if checkpointed else self.inner(x)
        return inner @ self.second + inner @ self.extra if extra else inner @ self.second

    def inner(self, x: Any) -> Any:
        return torch.tanh(x @ self.first)


class Alone:
    """Computes in this process, with ``Tensor.backward``."""

    def __init__(self, leaves: Any) -> None:
        self.leaves = leaves

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Surrounds a step."""
        for leaf in self.leaves:
            leaf.grad = None
        yield

    def tanh(self, x: Any) -> Any:
        return torch.tanh(x)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def gradients(self) -> Any:
        return [leaf.grad for leaf in self.leaves]


class InContext(Alone):
    """Computes in a context, a part of it on another worker."""

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        for leaf in self.leaves:
            leaf.grad = torch.ones_like(leaf)
        with dist_autograd.context() as self.context_id:
            yield
        for leaf in self.leaves:
            assert torch.equal(leaf.grad, torch.ones_like(leaf))

    def tanh(self, x: Any) -> Any:
        return zrpc.rpc_sync("worker2", torch.tanh, (x,))

    def backward(self, loss: Any) -> None:
        dist_autograd.backward(self.context_id, [loss])

    def gradients(self) -> Any:
        found = dist_autograd.get_gradients(self.context_id)
        return [found.get(leaf) for leaf in self.leaves]


class Program:
    """Trains a model in one way.

    Args:
        way: how it computes.
        options: DDP's.
        prepare: what is done to the DDP module.
        extra: whether a rank uses the branch in a step.
        accumulated: how many passes of a step come before the one that reduces. With a static
            graph, torch wants none in the first step.
        steps: of a rank; a rank may have fewer, by ``join``.
        autocast: whether to compute in lower precision.
        checkpointed: whether to compute a part again in the backward pass.
        unused: whether the model has a parameter that no rank uses.
        has_head: whether another DDP module follows on what came from the other worker.
    """

    def __init__(
        self,
        way: type[Alone],
        options: Any,
        prepare: Callable[[Any], Any] = lambda model: None,
        extra: Callable[[int, int], bool] = lambda rank, step: True,
        accumulated: Callable[[int], int] = lambda step: 0,
        steps: Callable[[int], int] | None = None,
        autocast: bool = False,
        checkpointed: bool = False,
        unused: bool = True,
        has_head: bool = False,
    ) -> None:
        self.model = DistributedDataParallel(Model(unused), **options)
        prepare(self.model)
        self.head = (
            DistributedDataParallel(torch.nn.Linear(2, 2)) if has_head else torch.nn.Identity()
        )
        self.plain = torch.linspace(-1, 1, 4).requires_grad_()
        self.way = way([*self.model.parameters(), *self.head.parameters(), self.plain])
        self.rank = dist.get_rank()
        self.extra, self.accumulated, self.steps = extra, accumulated, steps
        self.autocast, self.checkpointed = autocast, checkpointed

    def run(self) -> Any:
        if self.steps is None:
            return [self.step(number) for number in range(STEPS)]
        with self.model.join():
            return [self.step(number) for number in range(self.steps(self.rank))]

    def step(self, number: int) -> Any:
        with self.way.begin():
            for part in range(self.accumulated(number)):
                with self.model.no_sync():
                    self.way.backward(self.loss(number, part))
            self.way.backward(self.loss(number, -1))
            found = [None if g is None else g.clone() for g in self.way.gradients()]
        with torch.no_grad():
            for leaf, gradient in zip(self.way.leaves, found, strict=True):
                if gradient is not None:
                    leaf -= RATE * gradient
        return found

    def loss(self, number: int, part: int) -> Any:
        seed = 1000 * self.rank + 10 * number + part + 1
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        extra = self.extra(self.rank, number)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            # A call of `forward` runs no hooks of the module.
            output = self.model.forward(self.way.tanh(x * self.plain), extra, self.checkpointed)
            return (self.head(self.way.tanh(output)) ** 2).sum()


def tripled(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook."""
    sum_of_all = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return sum_of_all.then(lambda future: future.value()[0] * 3)


def power_sgd(model: Any) -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def on(*ranks: int) -> Any:
    return lambda rank, step: rank in ranks


def with_hook(hook: Any) -> Any:
    return lambda model: model.register_comm_hook(None, hook)


FIND = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
VIEWS = {"gradient_as_bucket_view": True}
MANY = {"bucket_cap_mb": 0.00001}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"options": {}, "unused": False},
    "two modules": {"options": {}, "unused": False, "has_head": True},
    "many buckets": {"options": VIEWS | MANY, "unused": False},
    "accumulated in views": {"options": VIEWS, "unused": False, "accumulated": lambda _: 1},
    "checkpointing": {"options": {}, "unused": False, "checkpointed": True},
    "tripled": {"options": VIEWS, "unused": False, "prepare": with_hook(tripled)},
    "static: in views": {"options": STATIC | VIEWS},
    "static: many buckets": {"options": STATIC | FIND | MANY},
    "static: a branch that no rank uses": {"options": STATIC, "extra": on()},
    "static: checkpointing": {"options": STATIC, "checkpointed": True},
    "static: accumulated": {"options": STATIC, "accumulated": lambda step: min(step, 2)},
    "static: autocast": {"options": STATIC, "autocast": True},
    "static: uneven inputs": {"options": STATIC, "steps": lambda rank: 2 + 2 * rank},
    "static: PowerSGD": {"options": STATIC, "prepare": power_sgd},
    "unused: used by one rank": {"options": FIND | VIEWS, "extra": on(1)},
    "unused: used by no rank": {"options": FIND, "extra": on()},
    "unused: used in some steps": {
        "options": FIND | MANY,
        "extra": lambda rank, step: rank != step,
    },
    "unused: accumulated": {"options": FIND, "extra": on(1), "accumulated": lambda _: 1},
    "unused: accumulated in views": {"options": FIND | VIEWS, "accumulated": lambda _: 2},
    "unused: autocast": {"options": FIND, "autocast": True},
    "unused: uneven inputs": {"options": FIND | VIEWS, "steps": lambda rank: 4 - 2 * rank},
    "unused: fp16": {"options": FIND, "prepare": with_hook(default_hooks.fp16_compress_hook)},
}


def both_ways(path: Any) -> Any:
    """Runs all programs; returns what they found, in a context and alone."""
    rank = current_agent().worker_info.id
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        found = {}
        for case, options in CASES.items():
            ways = []
            for way in (InContext, Alone):
                torch.manual_seed(0)
                ways.append(Program(way, **copy.copy(options)).run())
            found[case] = ways
        return found
    finally:
        # In torch 2.13, a thread of gloo's that drops the last reference to its group waits for
        # itself, and the process is aborted. So this process keeps one until it exits.
        dist.group_of_this_test = dist.group.WORLD  # type: ignore[attr-defined]
        dist.destroy_process_group()


def test_ddp_in_a_context_equals_ddp_alone(mesh: Mesh, tmp_path: Path) -> None:
    futures = [mesh.submit(rank, both_ways, str(tmp_path / "group")) for rank in range(2)]
    for rank, future in enumerate(futures):
        for case, (in_context, alone) in future.result(100).items():
            assert len(in_context) == len(alone) >= 2
            for step, (found, expected) in enumerate(zip(in_context, alone, strict=True)):
                where = f"{case}: rank {rank}, step {step}"
                assert any(gradient is not None for gradient in expected), where
                for leaf, (one, other) in enumerate(zip(found, expected, strict=True)):
                    assert (one is None) == (other is None), f"{where}, leaf {leaf}"
                    if one is not None:
                        torch.testing.assert_close(one, other, msg=f"{where}, leaf {leaf}")
