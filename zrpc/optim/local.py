"""The optimizer of one owner of parameters, and the options that trainers set for its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from zrpc.agent.current import current_agent
from zrpc.services.autograd.grad_lock import GradLock, Use
from zrpc.services.autograd.service import AutogradService
from zrpc.services.rref.rref import RRef

Options = dict[str, Any]
Params = Sequence[RRef[Any]]


class LocalOptimizer:
    """The optimizer of one owner, for one `DistributedOptimizer`.

    Args:
        optimizer_class: see `DistributedOptimizer`.
        groups: the groups that have parameters here, by index.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        groups: dict[int, Options],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._indices = list(groups)
        rrefs = [rref for group in groups.values() for rref in group["params"]]
        _check_distinct(rrefs)
        self._params = [rref.local_value() for rref in rrefs]
        local = [
            {**group, "params": [rref.local_value() for rref in group["params"]]}
            for group in groups.values()
        ]
        self._optimizer = optimizer_class(local, *args, **kwargs)
        # Guards the optimizer's state. Taken under the parameters' GradLock.
        self._state_lock = threading.Lock()
        if isinstance(self._optimizer, LBFGS):
            group = self._optimizer.param_groups[0]
            if group["max_iter"] != 1 or group["line_search_fn"] is not None:
                raise ValueError(
                    "LBFGS evaluates the loss several times in a step, which a distributed step "
                    "can't: pass max_iter=1 and no line_search_fn"
                )

    def options(self) -> tuple[Options, dict[int, Options]]:
        """Returns the class's defaults, and the options of each group, by index."""
        return self._optimizer.defaults, self._own()

    def _own(self) -> dict[int, Options]:
        groups = zip(self._indices, self._optimizer.param_groups, strict=True)
        return {index: options_of(group) for index, group in groups}

    def step(self, context_id: int, options: dict[int, Options]) -> dict[int, Options]:
        """Steps with the gradients of a context, and with options that the trainer has set.

        Returns the options that the optimizer has changed. It keeps them; the trainer's are for
        this step only, since other trainers have others.
        """
        gradients = current_agent().service(AutogradService).contexts.gradients_if_any(context_id)
        using = GradLock(self._params, Use.STEP, context_id)
        with using, self._state_lock, ExitStack() as stack:
            groups = zip(self._indices, self._optimizer.param_groups, strict=True)
            changed = {i: stack.enter_context(_lent(options[i], group)) for i, group in groups}
            lent = set(map(id, using.lent))
            own = [param for param in self._params if id(param) not in lent]
            before = [param.grad for param in own]
            try:
                for param in own:
                    param.grad = gradients.get(param)
                # LBFGS needs a closure; its loss is not used.
                closure = (lambda: 0.0,) if isinstance(self._optimizer, LBFGS) else ()
                self._optimizer.step(*closure)
            finally:
                for param, grad in zip(own, before, strict=True):
                    param.grad = grad
        return changed

    def zero_grad(self, set_to_none: bool, context_id: int | None) -> None:
        """Clears ``.grad``.

        ``context_id`` is the context of the pass whose hook clears it, if one does: the hook has
        used up that context's gradient.
        """
        with GradLock(self._params, Use.STEP, context_id):
            self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> tuple[dict[str, Any], dict[int, Options]]:
        """Returns the optimizer's state between two steps, and its options by group's index."""
        with self._state_lock:
            # A copy, since another trainer's step may follow while it is sent.
            return deepcopy((self._optimizer.state_dict(), self._own()))

    def load_state_dict(self, state: dict[str, Any]) -> dict[int, Options]:
        """Restores the optimizer's state; returns its options then, by group's index."""
        with self._state_lock:
            self._optimizer.load_state_dict(state)
            return self._own()


def options_of(group: Options) -> Options:
    """Returns a group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def changes(before: Options, after: Options) -> Options:
    """Returns the options that are new, or not what they were."""
    return {k: v for k, v in after.items() if k not in before or not _is_same(v, before[k])}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, ValueError):
        return False  # several arrays or tensors, which can't be compared like this


@contextmanager
def _lent(options: Options, group: Options) -> Iterator[Options]:
    """Sets a group's options for a step; yields a dict for those that the step changes."""
    own = options_of(group)
    group.update(options)
    before = deepcopy(options_of(group))
    changed: Options = {}
    try:
        yield changed
    finally:
        # A copy, since another trainer's step may follow while this one's answer is packed.
        changed.update(deepcopy(changes(before, options_of(group))))
        for key in options.keys() - changed.keys():
            if key in own:
                group[key] = own[key]
            else:
                del group[key]


def _check_distinct(rrefs: Params) -> None:
    """Raises ValueError if two RRefs share a parameter; only their owner can tell."""
    seen: dict[int, RRef[Any]] = {}
    for rref in rrefs:
        value = rref.local_value()
        first = seen.setdefault(id(value), rref)
        if first is not rref and isinstance(value, torch.Tensor):
            raise ValueError(
                f"the parameter of {rref} appears more than once: it is that of {first} as "
                "well. List it once: tied weights are one parameter"
            )
