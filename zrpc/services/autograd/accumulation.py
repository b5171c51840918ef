"""How a run of torch's engine brings the gradients of leaves into a context, not into ``.grad``.

Each leaf has an AccumulateGrad node, on which hooks and DDP's reducers hang, and which adds to
``.grad``. All runs of a process share it. If nothing hangs on the nodes of a run, the engine runs
none of them and returns the gradients. Otherwise the run has its own hooks on them while it lasts,
the last ones there, and tells by its graph task which calls of them are its own:

- A leaf without hooks on its node: the gradient is taken before the node gets it, which then does
  nothing. So any number of runs can go over the same leaf at once.
- A leaf with hooks on its node: while the node runs, the context's gradient of the leaf is in
  ``.grad``. Another run that reaches this leaf waits meanwhile, as a second thread does in torch.
- The parameters of a DDP module: the context's gradients are in ``.grad`` for the whole run,
  because the reducer writes to them until the engine is done, and also to parameters that this
  process has not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.autograd import ddp
from zrpc.services.autograd.grad_lock import GradLock, Use
from zrpc.services.autograd.nodes import Gradients, OwnHook, any_registered, recorded
from zrpc.services.autograd.state import ContextState
from zrpc.torch_internals import current_graph_task, hooks_of_leaf

__all__ = ["Accumulation", "must_run"]

# Guards the registration of hooks of nodes, so that each run sees which hooks are there.
_hooks_lock = UninterruptedLock()


def must_run(leaves: Iterable[torch.Tensor]) -> bool:
    """Returns whether the AccumulateGrad nodes of these leaves must run.

    They must if anything may hang on them. A leaf's own hook may be one over several tensors, which
    asks the engine whether it runs their nodes.
    """
    return (
        any_registered()
        or any(any(hooks_of_leaf(leaf)) for leaf in leaves)
        or bool(ddp.reduced_with(leaves))
    )


class Accumulation:
    """What one run of the engine adds to a context; surrounds the run as a context manager.

    Args:
        state: the context.
        accumulators: the AccumulateGrad nodes of the leaves that the run reaches.

    Attributes:
        taken: leaves without hooks on their nodes, and their gradients. The caller adds these to
            the context when the run has succeeded.
    """

    def __init__(self, state: ContextState, accumulators: Iterable[Any]) -> None:
        self.taken: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._state = state
        self._accumulators = list(accumulators)
        self._graph_task: int | None = None
        self._handles: list[RemovableHandle] = []
        self._reduced: list[_Loan] = []
        self._hooked: list[_Loan] = []

    def begin_at(self, root: torch.Tensor) -> torch.Tensor:
        """Returns a tensor to run from instead of ``root``, of which other runs may begin."""
        begin = recorded(root.view_as, root)
        self.begin_with(begin)
        return begin

    def begin_with(self, begin: torch.Tensor) -> None:
        """Has the run learn its graph task from a tensor that it begins with, before any leaf.

        The tensor's node must belong to this run alone.
        """
        node: Any = begin.grad_fn
        node.register_prehook(OwnHook(self._begun))

    def _begun(self, _: Any) -> None:
        self._graph_task = current_graph_task()

    def is_own(self) -> bool:
        """Returns whether this run has called the hook that asks."""
        return current_graph_task() == self._graph_task

    def __enter__(self) -> Accumulation:
        try:
            leaves = [node.variable for node in self._accumulators]
            reduced = ddp.reduced_with(leaves)
            for leaf in reduced:
                loan = _Loan(self._state, leaf)
                loan.begin(Use.RUN)
                self._reduced.append(loan)
            reduced_ids = set(map(id, reduced))
            for node in self._accumulators:
                if id(node.variable) not in reduced_ids:
                    self._hook(node)
        except BaseException:
            self._end(succeeded=False)
            raise
        return self

    def _hook(self, node: Any) -> None:
        """Adds this run's hooks to a node."""
        with _hooks_lock:
            take = node.register_prehook(OwnHook(_take, self, node.variable))
            if not _has_hooks(node, take):
                self._handles.append(take)
                return
            take.remove()
            loan = _Loan(self._state, node.variable)
            self._hooked.append(loan)
            self._handles.append(node.register_prehook(OwnHook(_borrow, self, loan)))
            self._handles.append(node.register_hook(OwnHook(_give_back, self, loan)))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(succeeded=exc_type is None)

    def _end(self, succeeded: bool) -> None:
        for handle in self._handles:
            handle.remove()
        for loan in self._reduced:
            loan.end(keep=succeeded)
        for loan in self._hooked:
            loan.end(keep=False)  # of a node that has failed


class _Loan:
    """The loan of a leaf's ``.grad``, in which a context's gradient is meanwhile."""

    def __init__(self, state: ContextState, leaf: torch.Tensor) -> None:
        self._state = state
        self._leaf = leaf
        self._lock: GradLock | None = None  # the leaf's, while it is held
        self._before: torch.Tensor | None = None
        self._saved: torch.Tensor | None = None

    def begin(self, use: Use) -> None:
        """Waits until nothing else uses ``.grad``, and puts the context's gradient there.

        Raises:
            RpcError: two runs would use it as long as they last.
        """
        leaf = self._leaf
        lock = GradLock([leaf], use, self._state.context_id)
        lock.acquire()
        if lock.lent:
            return  # a hook of this context runs this pass: the gradient is there already
        if use is Use.RUN and leaf.grad is not None:
            # DDP may have made `.grad` a view of a bucket, which it overwrites.
            self._saved = leaf.grad.clone()
        self._lock, self._before = lock, leaf.grad
        held = self._state.gradients.get(leaf)
        # A copy, since the node adds in place. DDP may have cast the leaf for a forward pass.
        dtype = getattr(leaf, "grad_dtype", leaf.dtype)  # new in torch 2.10
        leaf.grad = None if held is None else held.to(dtype or held.dtype, copy=True)

    def end(self, keep: bool) -> None:
        """Puts ``.grad`` back, if that is not done yet; the context keeps what it was."""
        lock, leaf = self._lock, self._leaf
        if lock is None:
            return
        try:
            if keep:
                # A copy: hooks may have kept it, and DDP uses its buckets again.
                gradient = None if leaf.grad is None else leaf.grad.clone()
                self._state.set_gradient(leaf, gradient)
            leaf.grad = self._before
            if self._before is not None and self._saved is not None:
                self._before.copy_(self._saved)
        finally:
            self._before = self._saved = self._lock = None
            lock.release()


def _take(run: Accumulation, leaf: torch.Tensor, gradients: Gradients) -> tuple[None] | None:
    """Takes the gradient before a node gets it."""
    [gradient] = gradients
    if gradient is None or not run.is_own():
        return None
    run.taken.append((leaf, gradient))
    return (None,)


def _borrow(run: Accumulation, loan: _Loan, _: Any) -> None:
    """Has a node add to the context's gradient."""
    if run.is_own():
        loan.begin(Use.HOOKS)


def _give_back(run: Accumulation, loan: _Loan, *_: Any) -> None:
    """Ends what `_borrow` has begun."""
    if run.is_own():
        loan.end(keep=True)


def _has_hooks(accumulator: Any, prehook: RemovableHandle) -> bool:
    """Returns whether a user's hooks run with an AccumulateGrad node; under _hooks_lock.

    A node does not list its hooks, but a new hook joins the dictionary of the existing ones.
    ``prehook`` is one that was added.
    """
    _, after = hooks_of_leaf(accumulator.variable)
    if after:
        return True
    hook = accumulator.register_hook(_nothing)
    hooks = hook.hooks_dict_ref()
    hook.remove()
    prehooks = prehook.hooks_dict_ref() or {}
    return not all(isinstance(each, OwnHook) for each in [*hooks.values(), *prehooks.values()])


_nothing = OwnHook(lambda *_: None)
