"""Modules that live on other workers, and weights that are published to other workers."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.remote_device import _remote_device
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from zrpc.agent.current import current_agent
from zrpc.api import get_worker_info, remote, rpc_async, rpc_sync
from zrpc.calls.future import Future
from zrpc.nn.state_loading import load_part, module_names, stand_ins
from zrpc.services.rref.rref import RRef
from zrpc.services.weights.publisher import Publisher, publish
from zrpc.services.weights.subscriber import Subscriber, subscribe
from zrpc.wire.pickling import encoder

__all__ = ["Publisher", "RemoteModule", "Subscriber", "publish", "subscribe"]

T = TypeVar("T")


class RemoteModule(torch.nn.Module):
    """A module that is made on another worker, and whose ``forward`` runs there.

    Within an autograd context, calls to it are part of the graph. It can be passed to other
    workers in calls, and refers to the same module there.

    Args:
        remote_device: like ``"worker1/cpu"`` or ``"rank:1/cuda:0"``; the default is the CPU.
        module_cls: the module's class, or a function that returns a module.
        args: the positional arguments of ``module_cls``.
        kwargs: the keyword arguments of ``module_cls``.

    Attributes:
        on: the worker of ``remote_device``: its name or its rank.
        device: the device there. Arguments are moved to it. Results are moved to the CPU, unless
            this worker has a device map for that one: then they arrive by the map.
        module_rref: the RRef of the module.

    Raises:
        RuntimeError: this process is not a worker, or there is no such worker. An error of
            ``module_cls`` is raised when the module is first used.

    Besides ``forward``, these methods of ``nn.Module`` and hooks work on the remote module:
    `train`, `eval`, `to`, `apply`, `state_dict`, `load_state_dict`, `zero_grad`,
    `requires_grad_`. Those that would return the module's own parts raise ValueError. Calls may
    be made from any thread.

    It can be part of another module, such as ``nn.Sequential``. That module's `train`, `eval`,
    `to`, `apply` and `state_dict` include this one. Its ``parameters``, and what is done with them
    (`zero_grad`, `requires_grad_`), include only parameters of this process.

    Example:
        >>> from zrpc.nn import RemoteModule
        >>> linear = RemoteModule("worker1/cpu", torch.nn.Linear, args=(3, 2))
        >>> linear(torch.ones(4, 3)).shape
        torch.Size([4, 2])
        >>> [name for name, _ in linear.named_parameters()]
        ['weight', 'bias']

    See also ``torch.distributed.nn.RemoteModule``.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._place(remote_device)
        self.module_rref: RRef[torch.nn.Module] = remote(
            self.on, _make, (module_cls, tuple(args or ()), dict(kwargs or {}), self.device)
        )

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[torch.nn.Module]
    ) -> RemoteModule:
        """Returns a RemoteModule for an existing module.

        Args:
            remote_device: see the class. Its device is the one that the module is on. Its worker
                may be another than the module's, as in torch: calls go to the module's owner.
            module_rref: the RRef of the module.

        Raises:
            RuntimeError: this process is not a worker, or there is no such worker.

        Example:
            >>> from zrpc.nn import RemoteModule
            >>> rref = remote("worker1", torch.nn.Linear, args=(3, 2))
            >>> RemoteModule.init_from_module_rref("worker1", rref)(torch.ones(4, 3)).shape
            torch.Size([4, 2])
        """
        module = RemoteModule.__new__(RemoteModule)
        torch.nn.Module.__init__(module)
        module._place(remote_device)
        module.module_rref = module_rref
        return module

    def _place(self, remote_device: str) -> None:
        place = _remote_device(remote_device)
        name = place.worker_name()
        worker = get_worker_info(name if name is not None else place.rank())
        self.on: str | int = worker.name if place.rank() is None else worker.id
        self.device = str(place.device())

    def _remote_device(self) -> str:
        return f"{'rank:' if isinstance(self.on, int) else ''}{self.on}/{self.device}"

    # -- calls ---------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with these arguments, and returns the result."""
        if self.device == "cpu":
            return self.module_rref.rpc_sync().__call__(*args, **kwargs)
        return self._on_owner(_call, self.device, self._is_mapped(), args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls the module with these arguments, and returns a Future of the result."""
        if self.device == "cpu":
            future: Future[Any] = self.module_rref.rpc_async().__call__(*args, **kwargs)
            return future
        arguments = (self.module_rref, self.device, self._is_mapped(), args, kwargs)
        return rpc_async(self.module_rref.owner(), _call, arguments)

    def _is_mapped(self) -> bool:
        """Returns whether this worker has a device map for the module's owner."""
        owner = self.module_rref.owner().member_id
        maps = current_agent().membership.device_maps.get(owner)
        return maps is not None and bool(maps[0].targets)

    # -- parts and state -----------------------------------------------------------------

    def get_module_rref(self) -> RRef[torch.nn.Module]:
        """Returns the RRef of the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:
        """Returns RRefs of the module's parameters, for `zrpc.optim.DistributedOptimizer`.

        Args:
            recurse: whether to include the parameters of submodules.
        """
        return [rref for _, rref in self.named_parameters(recurse=recurse)]

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[torch.nn.Parameter]]]:
        """Yields names and RRefs of the parameters; see ``nn.Module.named_parameters``."""
        yield from self._on_owner(_named_parameters, prefix, recurse, remove_duplicate)

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Returns a copy of the module's state; see ``nn.Module.state_dict``."""
        options = {"prefix": prefix, "keep_vars": keep_vars}
        state = self._on_owner(_state, self._is_mapped(), options)
        if destination is None:
            return state
        destination.update(state)  # called for a module that contains this one
        if hasattr(destination, "_metadata"):
            destination._metadata.update(state._metadata)
        return destination

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state into the module; see ``nn.Module.load_state_dict``."""
        return self.module_rref.rpc_sync().load_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, *found: Any
    ) -> None:
        """Loads this module's part of the state of a module that contains it."""
        state: Any = OrderedDict((k, v) for k, v in state_dict.items() if k.startswith(prefix))
        state._metadata = {}

        def load() -> None:
            self._modules = {}
            assign = local_metadata.get("assign_to_params_buffers", False)
            remote_found = self._on_owner(load_part, state, prefix, assign)
            for mine, more in zip(found[1:], remote_found, strict=True):
                mine.extend(more)

        names = self._on_owner(module_names)
        self._modules = stand_ins(names, state._metadata, prefix, local_metadata, load)

    # -- changes -------------------------------------------------------------------------

    def train(self, mode: bool = True) -> RemoteModule:
        """Sets the module to training mode, or to evaluation mode if ``mode`` is False."""
        self._modify("train", mode)
        self.training = mode
        return self

    def eval(self) -> RemoteModule:
        """Sets the module to evaluation mode."""
        self._modify("eval")
        self.training = False
        return self

    def to(self, *args: Any, **kwargs: Any) -> RemoteModule:
        """Moves or casts the module on its worker; see ``nn.Module.to``."""
        self.device = self._on_owner(_to, self.device, args, kwargs)
        return self

    def cpu(self) -> RemoteModule:
        """Moves the module to its worker's CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = None) -> RemoteModule:
        """Moves the module to a GPU of its worker."""
        return self.to(
            torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
        )

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> RemoteModule:
        """Calls ``fn`` on the worker, with the module and each of its submodules."""
        return self._modify("apply", fn)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``.grad`` of the module's parameters."""
        self._modify("zero_grad", set_to_none)

    def requires_grad_(self, requires_grad: bool = True) -> RemoteModule:
        """Sets whether the module's parameters require grad."""
        return self._modify("requires_grad_", requires_grad)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> RemoteModule:
        """Moves or casts the module as part of a module that contains this one."""
        self.device = self._on_owner(_apply_to_tensors, self.device, fn, recurse)
        return self

    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields this module alone to a module that contains it; else not supported."""
        if memo is None:
            _raise_not_supported("named_modules")
        seen = self in memo
        if remove_duplicate:
            memo.add(self)
        return iter([] if seen else [(prefix, self)])

    def _on_owner(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function on the module's worker, with the module's RRef first."""
        return rpc_sync(self.module_rref.owner(), function, (self.module_rref, *args))

    def _modify(self, name: str, *args: Any) -> RemoteModule:
        """Calls a method of the remote module that returns the module itself or None."""
        self._on_owner(_call_method, name, args)
        return self

    # -- pickling ------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        if encoder() is None:
            raise RuntimeError(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled "
                "when using RPC"
            )
        arguments = (self._remote_device(), self.module_rref)
        return RemoteModule.init_from_module_rref, arguments, {"training": self.training}

    def __repr__(self) -> str:
        return f"RemoteModule({self._remote_device()}, {self.module_rref!r})"


class _RemoteHandle(RemovableHandle):
    """The handle of a hook on another worker."""

    def __init__(self, handle: RRef[RemovableHandle]) -> None:
        super().__init__(OrderedDict())  # has no entry to remove
        self._handle = handle

    def remove(self) -> None:
        """Removes the hook."""
        self._handle.rpc_sync().remove()


def _raise_not_supported(name: str, instead: str = "") -> NoReturn:
    raise ValueError(f"Method ``{name}`` not supported for RemoteModule. {instead}".rstrip())


def _not_supported(name: str, instead: str = "") -> Callable[..., NoReturn]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        _raise_not_supported(name, instead)

    method.__name__ = name
    method.__doc__ = "Not supported: the module's parts are on another worker."
    return method


def _casting(name: str) -> Callable[[RemoteModule], RemoteModule]:
    def method(self: RemoteModule) -> RemoteModule:
        return self._modify(name)

    method.__name__ = name
    method.__doc__ = f"Casts the parameters and buffers on the worker; see ``nn.Module.{name}``."
    return method


def _registering(name: str) -> Callable[..., RemovableHandle]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> RemovableHandle:
        return _RemoteHandle(self._on_owner(_register_hook, name, args, kwargs))

    method.__name__ = name
    method.__doc__ = f"Registers a hook on the worker; see ``nn.Module.{name}``."
    return method


for _name in ("float", "double", "half", "bfloat16"):
    setattr(RemoteModule, _name, _casting(_name))
for _name in (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
):
    setattr(RemoteModule, _name, _registering(_name))

_INSTEAD = {"parameters": "Please use ``remote_parameters`` instead."}
for _name in (
    "add_module",
    "buffers",
    "children",
    "extra_repr",
    "modules",
    "named_buffers",
    "named_children",
    "parameters",
    "register_backward_hook",
    "register_buffer",
    "register_module",
    "register_parameter",
    "share_memory",
    "type",
):
    setattr(RemoteModule, _name, _not_supported(_name, _INSTEAD.get(_name, "")))


# The functions below run on the worker that has the module.


def _make(
    module_cls: Callable[..., torch.nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
) -> torch.nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


def _call(
    module_rref: RRef[torch.nn.Module],
    device: str,
    is_mapped: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    moved, named = tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))
    result = module_rref.local_value()(*moved, **named)
    return result if is_mapped else tree_map_only(torch.Tensor, lambda t: t.cpu(), result)


def _state(module_rref: RRef[torch.nn.Module], is_mapped: bool, options: dict[str, Any]) -> Any:
    """Returns the state of the module; what is on a device is copied to the CPU, unless mapped."""
    state = module_rref.local_value().state_dict(**options)
    if not is_mapped:
        state.update((k, v.cpu()) for k, v in [*state.items()] if isinstance(v, torch.Tensor))
    return state


def _call_method(module_rref: RRef[torch.nn.Module], name: str, args: tuple[Any, ...]) -> None:
    getattr(module_rref.local_value(), name)(*args)


def _register_hook(
    module_rref: RRef[torch.nn.Module], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RRef[RemovableHandle]:
    return RRef(getattr(module_rref.local_value(), name)(*args, **kwargs))


def _to(
    module_rref: RRef[torch.nn.Module], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Moves or casts the module; returns the device it is on then."""
    moved = torch._C._nn._parse_to(*args, **kwargs)[0]
    module_rref.local_value().to(*args, **kwargs)
    return str(moved) if moved is not None else device


def _apply_to_tensors(
    module_rref: RRef[torch.nn.Module],
    device: str,
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool,
) -> str:
    """Calls ``fn`` for each parameter and buffer; returns the device that they are on then."""
    module = module_rref.local_value()
    module._apply(fn, recurse)  # type: ignore[no-untyped-call]
    found = next(itertools.chain(module.parameters(), module.buffers()), None)
    return device if found is None else str(found.device)


def _named_parameters(
    module_rref: RRef[torch.nn.Module], prefix: str, recurse: bool, remove_duplicate: bool
) -> list[tuple[str, RRef[torch.nn.Parameter]]]:
    module = module_rref.local_value()
    named = module.named_parameters(prefix, recurse, remove_duplicate)
    return [(name, RRef(parameter)) for name, parameter in named]
