"""Autograd across workers: ``import zrpc.autograd as dist_autograd``.

Within a `context`, every tensor that requires grad and travels between workers, in arguments
or results of any kind of call, stays part of the graph. `backward` goes through all workers that
took part. It leaves the gradients of each worker's parameters in the context, on that worker.

Example:
    >>> import zrpc.autograd as dist_autograd
    >>> weight = torch.ones(2, requires_grad=True)
    >>> with dist_autograd.context() as context_id:
    ...     loss = rpc_sync("worker1", torch.mul, args=(weight, 3)).sum()
    ...     dist_autograd.backward(context_id, [loss])
    ...     dist_autograd.get_gradients(context_id)[weight]
    tensor([3., 3.])

See also ``torch.distributed.autograd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler
from torch.distributed import is_available as is_distributed_available

from zrpc.agent.current import current_agent
from zrpc.services.autograd.service import AutogradService
from zrpc.torch_internals import is_profiling

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Returns whether this build of torch has what distributed autograd needs."""
    return is_distributed_available()


class context:
    """A new autograd context, for the calls of this thread within the ``with`` block.

    Handlers that run for these calls are in it too, at any depth. When the block ends, all
    workers drop the context's graph, messages and gradients. ``with`` gives the context's id,
    unique across all workers.

    The same object can be used for several blocks, one after the other. Each is a new context.

    Raises:
        NotInitializedError: this process is not a worker when the block begins.
        RpcError: this thread is in a context already.
    """

    _block: AbstractContextManager[int]  # the latest

    def __enter__(self) -> int:
        block = _service().contexts.context()
        context_id = block.__enter__()
        self._block = block
        return context_id

    def __exit__(self, *raised: Any) -> None:
        self._block.__exit__(*raised)


def backward(
    context_id: int | Sequence[torch.Tensor],
    roots: Sequence[torch.Tensor] | None = None,
    retain_graph: bool = False,
) -> None:
    """Computes the gradients of all leaves, on all workers, that the roots depend on.

    The older form ``backward(roots)`` takes the context that this thread is in.

    Args:
        context_id: the id of the context that the forward pass was in.
        roots: a list of tensors on this worker with one element each; the pass begins with a
            gradient of one for each.
        retain_graph: keep the graph for another pass.

    Raises:
        RuntimeError: there is no such context; there are no roots; a root requires no grad, is
            not a scalar or is a leaf; or a worker's part failed ("Error on Node N: …").
        WorkerDied: a worker that took part is lost.
        TypeError: ``context_id`` is not an int, or ``roots`` is not a list of tensors.

    Gradients add up in the context over several passes; ``.grad`` is not touched. Several
    contexts may run backward passes at once, even over the same parameters.
    """
    if not isinstance(context_id, int) and roots is None:
        roots = context_id
        context_id = _service().contexts.current()
    with _shown() if is_profiling() else nullcontext():
        _service().backward(context_id, roots, retain_graph)  # type: ignore[arg-type]


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Returns the gradients that a context holds on this worker, by leaf.

    Leaves that were not used are absent.

    Raises:
        RuntimeError: there is no such context on this worker.
        TypeError: ``context_id`` is not an int.
    """
    return _service().contexts.find(context_id).copy_gradients()


def _shown() -> AbstractContextManager[object]:
    """Returns a context manager that shows a pass in profiles, under torch's name."""
    return profiler.record_function("torch::distributed::autograd::backward")


def _service() -> AutogradService:
    return current_agent().service(AutogradService)
