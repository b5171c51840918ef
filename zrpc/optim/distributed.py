"""The optimizer that a trainer has, and the clipping of gradients over all workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from zrpc.agent.current import current_agent
from zrpc.api import remote, rpc_async
from zrpc.calls.future import Future
from zrpc.membership.worker_info import WorkerInfo
from zrpc.optim.local import LocalOptimizer, Options, Params, changes, options_of
from zrpc.runtime.forks import free_in_child
from zrpc.runtime.interrupts import UninterruptedLock, raise_if_of_handler
from zrpc.services.autograd.service import AutogradService, context_of_hook
from zrpc.services.rref.rref import RRef

T = TypeVar("T")

# Guards what each DistributedOptimizer knows of its owners' options; not held during calls.
_known_lock = free_in_child(UninterruptedLock())


class DistributedOptimizer(Optimizer):
    """Runs an optimizer of ``torch.optim`` on the workers that own the parameters.

    Each owner of parameters has its own optimizer, which stays on that worker. `step` makes all
    of them step at once, with the gradients that an autograd context holds on their workers. It
    is an ``Optimizer`` itself, for learning-rate schedulers: each step sends the options that were
    set in `param_groups`. Hooks registered with it run on this worker, and are not sent with it.

    Args:
        optimizer_class: a class of ``torch.optim``, or a similar one. ``LBFGS`` needs
            ``max_iter=1``, since a distributed step can't evaluate the loss again.
        params_rref: RRefs of parameters, or groups of them: a list of dicts with RRefs under
            ``"params"`` and the group's own options.
        *args: passed to the optimizers.
        **kwargs: passed to the optimizers.

    Attributes:
        param_groups: as in ``torch.optim``, with RRefs under ``"params"``. What an owner's
            optimizer changes in its group, such as a count of steps, is shown here after a
            step. If owners differ, one of their values is shown, and each keeps its own.

    Raises:
        ValueError: there are no parameters, or a parameter appears twice.
        Exception: what the optimizer's constructor raises on an owner.

    It can be passed to other workers, which then step over the same parameters. An option that one
    of them sets in `param_groups` is used for its own steps only.

    Calls from several threads, and steps of several optimizers over the same parameters, run
    one after the other. Steps over other parameters do not wait. A step waits for the hooks of
    its parameters that run in other contexts, and for passes over their DDP module. In a hook that
    runs when a parameter's gradient is accumulated, an optimizer of that parameter alone can step.

    Example:
        >>> import zrpc.autograd as dist_autograd
        >>> from zrpc.optim import DistributedOptimizer
        >>> weight = remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [weight.to_here().sum()])
        ...     optimizer.step(context_id)
        >>> weight.to_here()
        tensor([0.5000, 0.5000], requires_grad=True)

    See also ``torch.distributed.optim.DistributedOptimizer``.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        params_rref: Params | Sequence[Options],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.defaults: Options
        self.state: defaultdict[Any, Any]
        self.param_groups: list[Options]
        # Optimizer.__init__ accepts tensors only. This sets up the same, hooks included.
        groups = _groups(params_rref)
        self.__setstate__({"defaults": {}, "state": defaultdict(dict), "param_groups": groups})
        owners = _by_owner(rref for group in self.param_groups for rref in group["params"])
        # This worker last: its step takes the interpreter's lock, so the others' calls would wait.
        here = current_agent().worker_info
        owners = dict(sorted(owners.items(), key=lambda each: each[0] == here))
        local_optimizers = {
            owner: remote(
                owner, LocalOptimizer, (optimizer_class, self._part(owner), *args), kwargs
            )
            for owner in owners
        }
        self.remote_optimizers = list(local_optimizers.values())
        # The options that the owners' optimizers have themselves, as far as this worker knows:
        # what differs from them in `param_groups` was set here.
        self._known: dict[int, Options] = defaultdict(dict)
        for defaults, options in self._at_owners("options"):
            self.defaults = defaults
            self._note(options)

    def __getstate__(self) -> dict[str, Any]:
        own = {"remote_optimizers": self.remote_optimizers, "_known": self._known}
        return {**super().__getstate__(), **own}

    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]
        """Makes all owners step, and returns when they have.

        Args:
            context_id: the id of the autograd context with the gradients. Default: this
                thread's context. A parameter without a gradient there is not changed.

        Raises:
            RuntimeError: there is no such context.
            Exception: what an owner's step raised; the other owners have stepped.
        """
        contexts = _autograd().contexts
        if context_id is None:
            context_id = contexts.current()
        contexts.find(context_id)
        with _known_lock:
            set_here = self._set_here()
        for changed in reversed(self._at_owners("step", context_id, set_here)):
            self._note(changed, set_here)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``.grad`` of the parameters. Autograd contexts do not use it."""
        self._at_owners("zero_grad", set_to_none, context_of_hook())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all owners' optimizers.

        Returns:
            A dict: ``"workers"`` has the ``state_dict`` of each owner's optimizer, by the owner's
            name, and ``"param_groups"`` the options of each group, as in the attribute.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        states = self._at_owners("state_dict")
        for _, options in reversed(states):
            self._note(options)
        names = [rref.owner_name() for rref in self.remote_optimizers]
        state_dict: dict[str, Any] = {
            "workers": dict(zip(names, [state for state, _ in states], strict=True)),
            "param_groups": [deepcopy(options_of(group)) for group in self.param_groups],
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a result of `state_dict`; the owners must have the same names.

        Raises:
            ValueError: the state has other owners, or another number of groups.
        """
        state_dict = state_dict.copy()  # as torch: hooks may change it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        states = state_dict["workers"]
        names = [rref.owner_name() for rref in self.remote_optimizers]
        if set(states) != set(names) or len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"expected the state of {len(self.param_groups)} groups on {sorted(names)}, found "
                f"{len(state_dict['param_groups'])} groups on {sorted(states)}"
            )
        own = self._at_each("load_state_dict", lambda rref: (states[rref.owner_name()],))
        for restored in reversed(own):
            self._note(restored)
        for group, options in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(options)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: Options) -> None:
        """Not supported: give all groups to the constructor.

        Raises:
            ValueError: always.
        """
        raise ValueError("DistributedOptimizer takes all its groups in the constructor")

    def __repr__(self) -> str:
        owners = ", ".join(rref.owner_name() for rref in self.remote_optimizers)
        return f"{type(self).__name__}({len(self.param_groups)} groups, on {owners})"

    def _at_owners(self, name: str, *args: Any) -> list[Any]:
        """Calls a method of all owners' optimizers at once; returns the results when all are in."""
        return self._at_each(name, lambda _: args)

    def _at_each(self, name: str, args: Callable[[RRef[Any]], tuple[Any, ...]]) -> list[Any]:
        """The same, with arguments for each. The others are called even if one is dead already."""
        proxies = [(rref.rpc_async(), args(rref)) for rref in self.remote_optimizers]
        return _at_once([partial(getattr(proxy, name), *given) for proxy, given in proxies])

    def _part(self, owner: WorkerInfo) -> dict[int, Options]:
        """Returns the groups' parameters of one owner, by the group's index."""
        part = {}
        for index, group in enumerate(self.param_groups):
            params = [rref for rref in group["params"] if rref.owner() == owner]
            if params:
                part[index] = {**group, "params": params}
        return part

    def _set_here(self) -> dict[int, Options]:
        """Returns the options that were set on this worker, by the group's index."""
        groups = enumerate(self.param_groups)
        return {index: changes(self._known[index], options_of(group)) for index, group in groups}

    def _note(self, own: dict[int, Options], used: dict[int, Options] | None = None) -> None:
        """Notes options that an owner's optimizer has, of its own or from the ones that it used.

        What else was set on this worker stays set.
        """
        with _known_lock:
            set_here = self._set_here()
            for index, options in own.items():
                still_set = changes(used[index] if used else {}, set_here[index])
                self._known[index].update(deepcopy(options))
                self.param_groups[index].update({**options, **still_set})


def clip_grad_norm_(
    context_id: int,
    params_rref: Params,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients in a context so that their norm, over all workers, is bounded.

    Args:
        context_id: the id of the autograd context.
        params_rref: RRefs of the parameters whose gradients count.
        max_norm: the bound.
        norm_type: the order of the norm; it may be ``float("inf")``.
        error_if_nonfinite: whether to raise, and scale nothing, if the norm is not finite.

    Returns:
        The norm before scaling, a scalar tensor.

    Raises:
        RuntimeError: there is no such context, or the norm is not finite (``error_if_nonfinite``).

    See also ``torch.nn.utils.clip_grad_norm_``.
    """
    _autograd().contexts.find(context_id)
    parts = _by_owner(params_rref)
    norms = _on_owners(parts, _local_norm, context_id, norm_type)
    found = torch.cat(norms) if norms else torch.zeros(0)
    # An empty vector has no largest element.
    total = torch.linalg.vector_norm(found, norm_type) if len(found) else torch.zeros(())
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"expected gradients with a finite norm of order {norm_type}, found {total.item()}: "
            "pass error_if_nonfinite=False to scale them anyway"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    _on_owners(parts, _local_scale, context_id, factor)
    return total


def _on_owners(
    parts: dict[WorkerInfo, list[RRef[Any]]], function: Callable[..., T], *args: Any
) -> list[T]:
    """Calls a function on all owners at once, with their parameters first."""
    return _at_once([partial(rpc_async, o, function, (part, *args)) for o, part in parts.items()])


def _local_norm(rrefs: Params, context_id: int, norm_type: float) -> torch.Tensor:
    """Returns the norms of the gradients of this worker's parameters, as a vector on the CPU."""
    gradients = _autograd().contexts.gradients_if_any(context_id)
    norms = [
        torch.linalg.vector_norm(_values(gradients[param]), norm_type).cpu()
        for param in (rref.local_value() for rref in rrefs)
        if param in gradients
    ]
    return torch.stack(norms) if norms else torch.zeros(0)


def _local_scale(rrefs: Params, context_id: int, factor: torch.Tensor) -> None:
    if (state := _autograd().contexts.state_of(context_id)) is not None:
        state.scale_gradients([rref.local_value() for rref in rrefs], factor)


def _autograd() -> AutogradService:
    return current_agent().service(AutogradService)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the stored entries of a gradient: of a sparse one, the values only."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _groups(params_rref: Params | Sequence[Options]) -> list[Options]:
    """Returns the parameters as groups, after checking each."""
    given: list[Any] = list(params_rref)
    grouped = bool(given) and isinstance(given[0], dict)
    groups: list[Options] = [dict(group) for group in given] if grouped else [{"params": given}]
    seen: set[Any] = set()
    for group in groups:
        group["params"] = list(group["params"])
        for rref in group["params"]:
            if not isinstance(rref, RRef):
                raise TypeError(f"expected RRefs of parameters, found {type(rref).__name__}")
            if rref in seen:
                raise ValueError(
                    f"the parameter of {rref} appears more than once. List it once: tied weights "
                    "are one parameter"
                )
            seen.add(rref)
    if not seen:
        raise ValueError("optimizer got an empty parameter list")
    return groups


def _by_owner(rrefs: Iterator[RRef[Any]] | Params) -> dict[WorkerInfo, list[RRef[Any]]]:
    parts: dict[WorkerInfo, list[RRef[Any]]] = {}
    for rref in rrefs:
        parts.setdefault(rref.owner(), []).append(rref)
    return parts


def _at_once(calls: list[Callable[[], Future[T]]]) -> list[T]:
    """Makes all calls, and returns their values, or raises the first error when all are done."""
    errors: list[Exception] = []

    def outcome(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            raise_if_of_handler(error)
            errors.append(error)

    futures = [future for future in map(outcome, calls) if future is not None]
    values = [outcome(future.wait) for future in futures]
    for error in errors:
        raise error
    return values
