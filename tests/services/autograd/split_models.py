"""Models whose parts are on several workers, and the same in one process to compare with.

A model is a function without arguments that returns its roots. It reaches other workers by
`call`, which is `zrpc.rpc_sync` at a worker and an ordinary call, of copies, elsewhere. The
workers are threads of this process, so that both runs have the same leaves.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import zrpc
import zrpc.autograd as dist_autograd
from tests.support.identity import here
from tests.support.io_threads import await_io_threads
from tests.support.waiting import until
from zrpc.agent.current import find_agent
from zrpc.services.autograd.contexts import PASS_LAYOUT
from zrpc.services.autograd.service import AutogradService
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind, Tag

# The error of a context that a worker does not know, up to its id.
UNKNOWN = "Could not find autograd context with id: "

Model = Callable[[], Any]


def copied(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), value)


def call(to: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if find_agent() is not None:
        return zrpc.rpc_sync(to, here(fn), args, kwargs)
    args, kwargs = copied((args, kwargs))
    return copied(fn(*args, **kwargs))


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


X = leaf(3, seed=1)
W = [leaf(3, 3, seed=10 + rank) for rank in range(3)]  # W[rank] is a parameter of that worker
LEAVES = [X, *W]


def layer(rank: int, x: torch.Tensor) -> torch.Tensor:
    """A layer with that worker's parameter."""
    return torch.tanh(x @ W[rank])


def there_and_back(x: torch.Tensor) -> Any:
    return call("worker0", layer, 0, call("worker2", layer, 2, layer(1, x)))


def round_trip() -> Any:
    """Through all workers, and twice through the caller."""
    x = layer(0, X)
    return (x + call("worker1", there_and_back, x)).sum()


def layers(mesh: Mesh) -> list[AutogradService]:
    return [mesh.agent(name).service(AutogradService) for name in mesh]


def gradients_at(mesh: Mesh, worker: int, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """What a worker holds; nothing where it took no part."""
    return mesh.agent(worker).service(AutogradService).contexts.gradients_if_any(context_id)


def gradients(mesh: Mesh, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Of all workers; summed where several have one of the same leaf."""
    total: dict[torch.Tensor, torch.Tensor] = {}
    for rank in range(len(mesh)):
        for at, gradient in gradients_at(mesh, rank, context_id).items():
            total[at] = total[at] + gradient if at in total else gradient
    return total


def holders(mesh: Mesh, context_id: int) -> list[set[torch.Tensor]]:
    """The leaves whose gradients each worker holds."""
    return [set(gradients_at(mesh, rank, context_id)) for rank in range(len(mesh))]


def roots_of(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def step(mesh: Mesh, model: Model, passes: int = 1) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of a model that this worker runs, of all workers."""
    with dist_autograd.context() as context_id:
        roots = roots_of(model())
        for number in range(passes):
            dist_autograd.backward(context_id, roots, retain_graph=number < passes - 1)
        return gradients(mesh, context_id)


def train(mesh: Mesh, model: Model, passes: int = 1) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of a model that worker0 runs, of all workers."""
    found = mesh.run(0, step, mesh, model, passes)
    assert_freed(mesh)
    return found


def local_gradients(
    model: Model, leaves: Sequence[torch.Tensor], passes: int = 1
) -> list[torch.Tensor | None]:
    """The gradients of a model in this process alone, also if the test is a worker."""
    roots = Context().run(lambda: roots_of(model()))
    found = torch.autograd.grad(
        roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True
    )
    return [None if gradient is None else gradient * passes for gradient in found]


def assert_as_local(
    mesh: Mesh, model: Model, leaves: Iterable[torch.Tensor], passes: int = 1
) -> None:
    """A model's gradients are those that it has in one process, and `.grad` is untouched."""
    leaves = list(leaves)
    expected = local_gradients(model, leaves, passes)
    found = train(mesh, model, passes)
    for index, (at, gradient) in enumerate(zip(leaves, expected, strict=True)):
        assert at.grad is None, f"leaf {index}"
        if gradient is None:
            # Who sees only its own part can't know that it leads nowhere.
            assert at not in found or not found[at].to_dense().any(), f"leaf {index}"
            continue
        assert at in found, f"leaf {index} has no gradient"
        assert found[at].layout == gradient.layout
        torch.testing.assert_close(found[at].to_dense(), gradient.to_dense())


def assert_freed(mesh: Mesh) -> None:
    """No worker has a context any more, once the messages of that have arrived."""
    for layer in layers(mesh):
        until(lambda layer=layer: len(layer) == 0, f"{layer.agent.worker_info} has no context")


def settle(mesh: Mesh, rounds: int = 2) -> None:
    """Lets all arrive that is under way."""
    for _ in range(rounds):
        gc.collect()
        for name in mesh:
            for to in mesh:
                mesh.run(name, zrpc.rpc_sync, to, max, (1, 2))
        await_io_threads(mesh)


@contextmanager
def posted(mesh: Mesh) -> Iterator[Counter[Kind]]:
    """Counts the messages that the workers of a mesh send, by kind.

    As a GRADIENT count all messages with gradients: a request or an answer can bring them too.
    """
    counts: Counter[Kind] = Counter()
    lock = threading.Lock()
    outboxes = [mesh.agent(name).outbox for name in mesh]

    def counting(send: Any) -> Any:
        def count_and_send(rank: int, message: Any, *rest: Any, **more: Any) -> None:
            kinds = {Kind(message.kind)} | {
                Kind.GRADIENT
                for tag, data in message.extensions
                if tag == Tag.PASS and PASS_LAYOUT.unpack(data)[2]
            }
            with lock:
                counts.update(kinds)
            send(rank, message, *rest, **more)

        return count_and_send

    for outbox in outboxes:
        outbox.put = counting(outbox.put)  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        for outbox in outboxes:
            del outbox.put


class Held:
    """Holds back what one worker sends to another, of one kind, until it is released."""

    def __init__(self, mesh: Mesh, kind: Kind, sender: int, receiver: int) -> None:
        self._kind, self._receiver = kind, mesh.agent(receiver).worker_info.member_id
        self._outbox: Any = mesh.agent(sender).outbox
        self._sends: list[Callable[[], None]] = []
        self.any = threading.Event()
        self._outbox.put = partial(self._send, self._outbox.put)

    def _send(self, send: Any, member: int, message: Any) -> None:
        if member == self._receiver and message.kind == self._kind:
            self._sends.append(partial(send, member, message))
            self.any.set()
        else:
            send(member, message)

    def release(self, send: bool = True) -> None:
        """Sends what was held back, or drops it; holds nothing back any more."""
        del self._outbox.put
        for each in self._sends if send else ():
            each()


def residual() -> Any:
    """Uses each parameter several times, at its worker and across hops."""
    x = layer(0, X)
    for rank in (1, 2, 1, 2):
        x = x + call(f"worker{rank}", layer, rank, x)
    return layer(0, x).sum()
