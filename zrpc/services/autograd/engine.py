"""One worker's part of a backward pass: a single run of torch's engine.

It brings the gradients of leaves into a context, not into ``.grad``.

Each leaf has an AccumulateGrad node, on which hooks and DDP's reducers hang, and which adds to
``.grad``. All runs of a process share it. If nothing hangs on the nodes of a run, the engine runs
none of them and returns the gradients. Otherwise the run has its own hooks on them while it lasts,
the last ones there, and tells by its graph task which calls of them are its own:

- A leaf without hooks that run after its node: the gradient is taken before the node gets it, which
  then does nothing. So any number of runs can go over the same leaf at once.
- A leaf with such hooks: while the node runs, the context's gradient of the leaf is in
  ``.grad``. Another run that reaches this leaf waits meanwhile, as a second thread does in torch.
- The parameters of a DDP module: the context's gradients are in ``.grad`` for the whole run,
  because the reducer writes to them until the engine is done, and also to parameters that this
  process has not used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zrpc.runtime.forks import free_in_child
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.autograd import ddp
from zrpc.services.autograd.grad_lock import GradLock, Use
from zrpc.services.autograd.nodes import (
    NO_GRADIENT,
    Gradients,
    OwnHook,
    any_registered,
    recorded,
)
from zrpc.services.autograd.state import ContextState
from zrpc.torch_internals import (
    base_of,
    current_graph_task,
    hooks_of_leaf,
    run_backward,
    storage_uses,
    tensor_uses,
)

# Guards the registration of hooks of nodes, so that each run sees which hooks are there.
_hooks_lock = free_in_child(UninterruptedLock())


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


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Raises torch's errors for roots from which no backward pass can begin.

    Raises:
        RuntimeError: there are none, or one requires no grad, is not a scalar, or is a leaf.
        TypeError: ``roots`` is not a list of tensors.
    """
    if not isinstance(roots, list | tuple) or not all(isinstance(r, torch.Tensor) for r in roots):
        raise TypeError(
            "backward(): incompatible function arguments: expected context_id: int, roots: "
            f"List[Tensor], retain_graph: bool = False, but got roots of {type(roots).__name__}"
        )
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"{root.shape} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError("root does not have a valid gradient function")


def run(
    roots: Sequence[torch.Tensor],
    last: torch.Tensor,
    retain_graph: bool,
    state: ContextState,
    reach: int = 0,
) -> None:
    """Runs the graph of the roots, each with a gradient of one, and of ``last`` once.

    ``last`` is ``state.start`` if nothing that was sent leads to the roots of the pass, and
    ``reach`` is what it leads to, as a set of the context's tracer. The gradients of the leaves are
    added to those of the context.
    """
    start = state.start
    waits = () if last is start else (last,)
    if not waits and not roots:
        return
    for root in roots:
        reach |= state.tracer.reach(root)
    state.tracer.forget()
    accumulators = state.tracer.leaves(reach)
    variables = [node.variable for node in accumulators]
    # The nodes of the graph, not the leaves: a leaf has another node if its dtype was changed since
    # then, and is refused if it was frozen. With the start among them the engine also runs the
    # parts that lead to no leaf: the gradients of each tensor that was received must be sent.
    inputs = *(GradientEdge(node, 0) for node in accumulators), start
    gradients = *map(torch.ones_like, roots), *[NO_GRADIENT] * len(waits)
    execute = partial(run_backward, allow_unreachable=True)
    options = retain_graph, False, inputs  # False: create_graph
    if must_run(variables):
        accumulation = _Accumulation(state)
        with accumulation.hooked(accumulators):
            # Other runs may begin at the same roots.
            begins = [recorded(root.view_as, root) for root in roots]
            for begin in begins or [last]:  # a root's node comes first: see `append_wait`
                accumulation.begin_with(begin)
            execute((*begins, *waits), gradients, *options, accumulate_grad=True)
        _add(state, accumulation.taken)
    else:
        found = execute((*roots, *waits), gradients, *options, accumulate_grad=False)
        taken = list(zip(variables, found, strict=False))
        del found  # nothing else may refer to the gradients
        _add(state, taken)


def _add(state: ContextState, found: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Adds the gradients of leaves to those of the context; takes them out of the list."""
    # As in torch, gradients that have copies live until all are added. So no copy has the
    # memory in which a hook has seen a gradient.
    own, shared = [], []
    while found:
        leaf, gradient = found.pop()
        if gradient is None or not leaf.requires_grad:  # as in torch's AccumulateGrad
            continue
        uses = _uses(gradient)  # in a statement of its own, which adds no reference to it
        if _is_unshared(gradient, uses):
            own.append((leaf, gradient.detach()))
        else:
            own.append((leaf, gradient.clone()))
            shared.append(gradient)
    state.add_gradients(own)


def _is_unshared(gradient: torch.Tensor, uses: tuple[int, ...]) -> bool:
    """Returns whether nothing else uses a gradient's memory, so that it may be changed in place.

    torch's AccumulateGrad also takes over such a gradient, and copies others. ``uses`` are the
    gradient's `_uses` when it was found.
    """
    if gradient.layout is not torch.strided:
        return False
    # One reference is the gradient's, and one is that of `storage` here. A view may have a third,
    # its base's, if the base is the engine's own: the gradient of a linear layer's weight is made
    # transposed, for instance.
    known = 2 if uses == _USES_OF_NEW else 3 if uses == _USES_OF_NEW_VIEW else 0
    storage = gradient.untyped_storage()
    return storage.nbytes() == gradient.nbytes and storage_uses(storage) <= known


def _uses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns how often a tensor and its base are referred to in C++ and in Python.

    A hook may keep it, or a user's function may have returned one of its own tensors.
    """
    base = base_of(tensor)
    uses = (tensor_uses(tensor), sys.getrefcount(tensor))
    return uses if base is None else (*uses, tensor_uses(base), sys.getrefcount(base))


def _uses_of_new(is_view: bool) -> tuple[int, ...]:
    tensor = torch.empty(2).view(2) if is_view else torch.empty(2)
    return _uses(tensor)


_USES_OF_NEW = _uses_of_new(False)
_USES_OF_NEW_VIEW = _uses_of_new(True)


class _Accumulation:
    """What one run of the engine adds to a context by the nodes of leaves.

    Attributes:
        taken: leaves without hooks after their nodes, and their gradients. The caller adds these to
            the context when the run has succeeded.
    """

    def __init__(self, state: ContextState) -> None:
        self.taken: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._state = state
        self._graph_task: int | None = None

    def begin_with(self, begin: torch.Tensor) -> None:
        """Tells the run its graph task by a tensor that it begins with, before any leaf.

        The tensor's node must belong to this run alone.
        """
        node: Any = begin.grad_fn
        node.register_prehook(OwnHook(self._begun))

    def _begun(self, _: Any) -> None:
        self._graph_task = current_graph_task()

    @contextmanager
    def hooked(self, accumulators: Sequence[Any]) -> Iterator[None]:
        """Surrounds the run, which reaches these AccumulateGrad nodes."""
        reduced = ddp.reduced_with([node.variable for node in accumulators])
        with ExitStack() as stack:
            for leaf in reduced:
                stack.enter_context(_lent(self._state, leaf, Use.RUN))
            reduced_ids = set(map(id, reduced))
            for node in accumulators:
                if id(node.variable) not in reduced_ids:
                    self._hook(node, stack)
            yield

    def _hook(self, node: Any, stack: ExitStack) -> None:
        """Adds this run's hooks to a node."""
        with _hooks_lock:
            if not _has_hooks(node):
                take = node.register_prehook(self._own(partial(self._take, node.variable)))
                stack.callback(take.remove)
                return
            lent = _lent(self._state, node.variable, Use.HOOKS)
            loan = ExitStack()
            stack.push(loan)  # of a node that has failed
            for handle in (
                node.register_prehook(self._own(lambda _: loan.enter_context(lent))),
                node.register_hook(self._own(lambda *_: loan.close())),
            ):
                stack.callback(handle.remove)

    def _own(self, hook: Callable[..., Any]) -> OwnHook:
        """Returns a hook that does nothing in another run."""
        return OwnHook(
            lambda *of_node: hook(*of_node) if current_graph_task() == self._graph_task else None
        )

    def _take(self, leaf: torch.Tensor, gradients: Gradients) -> tuple[None] | None:
        """Takes the gradient before a node gets it."""
        [gradient] = gradients
        if gradient is None:
            return None
        self.taken.append((leaf, gradient))
        return (None,)


@contextmanager
def _lent(state: ContextState, leaf: torch.Tensor, use: Use) -> Iterator[None]:
    """Lends a leaf's ``.grad``, which nothing else uses then, to a context.

    The context's gradient is there meanwhile, and the context keeps what is there at the end, if
    the block succeeds.

    Raises:
        RpcError: two runs would use it as long as they last.
    """
    with GradLock([leaf], use, state.context_id) as lock:
        if lock.lent:
            yield  # a hook of this context runs this pass: the gradient is there already
            return
        before = leaf.grad
        # DDP may have made `.grad` a view of a bucket, which it overwrites.
        saved = before.clone() if use is Use.RUN and before is not None else None
        held = state.gradients.get(leaf)
        # A copy, since the node adds in place. DDP may have cast the leaf for a forward pass.
        dtype = getattr(leaf, "grad_dtype", leaf.dtype)  # new in torch 2.10
        try:
            leaf.grad = None if held is None else held.to(dtype or held.dtype, copy=True)
            yield
            # A copy: hooks may have kept it, and DDP uses its buckets again.
            state.set_gradient(leaf, None if leaf.grad is None else leaf.grad.clone())
        finally:
            leaf.grad = before
            if before is not None and saved is not None:
                before.copy_(saved)


def _has_hooks(accumulator: Any) -> bool:
    """Returns whether a user's hooks run after an AccumulateGrad node; under _hooks_lock.

    Those that run before it get the same gradient in either case. A node does not list its hooks,
    but a new hook joins the dictionary of the existing ones.
    """
    _, after = hooks_of_leaf(accumulator.variable)
    if after:
        return True
    hook = accumulator.register_hook(_nothing)
    hooks = hook.hooks_dict_ref()
    hook.remove()
    return not all(isinstance(each, OwnHook) for each in hooks.values())


_nothing = OwnHook(lambda *_: None)
