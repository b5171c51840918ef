"""Autograd across workers: ``import zrpc.autograd as dist_autograd``.

Within a `context`, every tensor that requires grad and travels between workers, in arguments
or results of any kind of call, stays part of the graph; `backward` goes through all workers
that took part, and leaves the gradients of each worker's parameters in the context, at that
worker.

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
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch.distributed import is_available as is_distributed_available

from zrpc.autograd.layer import AutogradLayer
from zrpc.current import current_agent

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Whether this build of torch has what distributed autograd needs."""
    return is_distributed_available()


class context:
    """A new autograd context, for the calls of this thread within the ``with`` block.

    Handlers that run for these calls are in it too, at any depth. With the block's end it is
    forgotten at all workers: its graph, its messages and its gradients. ``with`` gives its id,
    unique across all workers.

    The same object can be used for one block after the other, each of which is a new context.

    Raises:
        NotInitializedError: there is no agent, when the block begins.
        RpcError: this thread is in a context already.
    """

    _block: AbstractContextManager[int]  # the one that was begun last

    def __enter__(self) -> int:
        block = _layer().contexts.context()
        context_id = block.__enter__()
        self._block = block
        return context_id

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._block.__exit__(exc_type, exc_value, traceback)


def backward(
    context_id: int | Sequence[torch.Tensor],
    roots: Sequence[torch.Tensor] | None = None,
    retain_graph: bool = False,
) -> None:
    """Computes the gradients of all leaves, at all workers, that the roots depend on.

    The older form ``backward(roots)`` takes the context that this thread is in.

    Args:
        context_id: of the context that the forward pass was in.
        roots: a list of tensors at this worker with one element each; the pass begins with a
            gradient of one for each.
        retain_graph: keep the graph for another pass.

    Raises:
        RuntimeError: there is no such context; there are no roots; a root requires no grad, is
            no scalar or is a leaf; or a worker's part failed ("Error on Node N: …").
        WorkerDied: a worker that took part is gone.
        TypeError: ``roots`` is no list of tensors.

    Gradients add up in the context over several passes; ``.grad`` is not touched. Several
    contexts may go backward at once, over the same parameters too.
    """
    if not isinstance(context_id, int) and roots is None:
        roots = context_id
        context_id = _layer().contexts.current()
    _layer().passes.backward(context_id, roots, retain_graph)  # type: ignore[arg-type]


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that a context holds at this worker, by leaf; unused leaves are absent.

    Raises:
        RuntimeError: there is no such context at this worker.
    """
    return _layer().contexts.gradients(context_id)


def _layer() -> AutogradLayer:
    return current_agent().layer(AutogradLayer)
