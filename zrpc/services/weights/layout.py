"""How the tensors of a model lie in one flat buffer, and how a model differs from that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from zrpc.errors import RpcError

# What can be published, and loaded: a module, or tensors by name.
Model = torch.nn.Module | Mapping[str, torch.Tensor]

# So that the part of each dtype is aligned for it, and for the processor.
_ALIGNMENT_BYTES = 64
_NAMED_IN_ERROR = 8


class _Place(NamedTuple):
    """Where a tensor lies: at which element, if all elements of the buffer have its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class Layout:
    """The places of named tensors in a flat buffer, which has a part for each dtype.

    Names of one tensor (tied parameters) share a place.

    Args:
        tensors: by name, as `tensors_of` returns them.

    Attributes:
        size: the number of bytes of the buffer.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # The first name of each tensor; an empty one is tied to no other.
        first: dict[Any, str] = {}
        twins = {
            name: first.setdefault(_identity(tensor), name) if tensor.numel() else name
            for name, tensor in tensors.items()
        }
        # Names that share a place, each with the first one that has it.
        self._ties = [(name, twin) for name, twin in twins.items() if name != twin]
        self.size = 0
        places: dict[str, _Place] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
            for name, tensor in tensors.items():
                if tensor.dtype == dtype and twins[name] == name:
                    form = tensor
                    if not tensor.is_contiguous():
                        form = torch.empty(tensor.shape, device="meta")
                    start = self.size // dtype.itemsize
                    places[name] = _Place(dtype, tuple(form.shape), form.stride(), start)
                    self.size += tensor.nbytes
            self.size = -(-self.size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._places = {name: places[twin] for name, twin in twins.items()}

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors in a flat buffer, by name; they share its memory.

        Args:
            flat: ``size`` bytes.
        """
        places = self._places
        wholes = {dtype: flat.view(dtype) for dtype in {each.dtype for each in places.values()}}
        first = {dtype: whole.storage_offset() for dtype, whole in wholes.items()}
        return {  # one step of torch for each: hundreds of slices and views take a millisecond
            name: wholes[dtype].as_strided(shape, strides, first[dtype] + start)
            for name, (dtype, shape, strides, start) in places.items()
        }

    def check_ties(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checks that names which share a place still share a tensor.

        Raises:
            ValueError: some do not; the error lists them.
        """
        found = [
            f"{twin} and {name}"
            for name, twin in self._ties
            if _identity(tensors[name]) != _identity(tensors[twin])
        ]
        if found:
            raise ValueError(
                f"expected tied tensors, as at first, found them apart: {_listed(found)}"
            )

    def check(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        """Compares a model with this one.

        Args:
            tensors: those of the model.
            what: the name of this layout, for the error.

        Raises:
            ValueError: names, shapes or dtypes differ; the error lists the differences.
        """
        places = self._places
        if tensors.keys() == places.keys() and all(
            tensor.shape == places[name].shape and tensor.dtype == places[name].dtype
            for name, tensor in tensors.items()
        ):
            return
        found = "; ".join(
            f"{kind}: {_listed(names)}" for kind, names in self._differences(tensors) if names
        )
        raise ValueError(f"expected a model with the tensors of {what}, found {found}")

    def _differences(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, list[str]]]:
        places = self._places
        yield "missing", [name for name in places if name not in tensors]
        yield "unexpected", [name for name in tensors if name not in places]
        forms: dict[str, Callable[[Any], Any]] = {
            "shape": lambda each: tuple(each.shape),
            "dtype": lambda each: each.dtype,
        }
        for kind, form in forms.items():
            both = [(n, form(tensors[n]), form(places[n])) for n in places if n in tensors]
            yield kind, [f"{n} {found} instead of {own}" for n, found, own in both if found != own]


def _identity(tensor: torch.Tensor) -> Any:
    """Returns what is equal for tensors that have the same elements.

    Names of tied parameters may come with tensors of their own over the same memory.
    """
    start = tensor.data_ptr() or id(tensor)
    form = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, start, form


def _listed(names: list[str]) -> str:
    left = len(names) - _NAMED_IN_ERROR
    return ", ".join(names[:_NAMED_IN_ERROR]) + (f" and {left} more" if left > 0 else "")


def tensors_of(model: Model, in_context: bool = False) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model by name: the memory itself, not copies.

    Of a module these are its parameters and those buffers that ``state_dict`` has, a tied parameter
    under each of its names.

    Args:
        model: the module or mapping.
        in_context: whether this thread is in an autograd context.

    Raises:
        TypeError: it is no module or mapping, or has something that isn't a plain tensor: one of a
            class with a ``__torch_dispatch__`` of its own, for example, would lose what it holds.
        RpcError: gradients in the context would be lost, since a tensor was computed from others.
    """
    if isinstance(model, torch.nn.Module):
        tensors = dict(_tensors_of_module(model))
    elif isinstance(model, Mapping):
        tensors = dict(model)
    else:
        raise TypeError(
            f"expected an nn.Module or a mapping of names to tensors, found a {type(model)}"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a tensor as {name}, found a {type(tensor)}")
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(_no_elements_of_its_own(name, tensor))
        if torch.nn.parameter.is_lazy(tensor):
            raise TypeError(f"expected {name} to be initialized: call the module once before")
        if tensor.is_meta:
            raise TypeError(f"expected {name} to have memory, found it on the device 'meta'")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise TypeError(f"expected a dense tensor as {name}, found {_described(tensor)}")
        if in_context and tensor.grad_fn is not None:
            raise RpcError(
                f"expected {name} without a graph, found a tensor computed from others that need "
                "gradients, in an autograd context: published weights carry no gradients, so pass "
                "tensor.detach()"
            )
    return tensors


def _no_elements_of_its_own(name: str, tensor: torch.Tensor) -> str:
    """Returns the error for a tensor of a class that computes by itself, mostly from others."""
    why = "whose elements may be in other tensors: pass plain ones"
    if hasattr(tensor, "full_tensor"):
        why = (
            "whose elements may be in several processes: publish a mapping of names to what its "
            "full_tensor() returns, and load that into plain tensors"
        )
    return f"expected a plain tensor as {name}, found a {type(tensor).__name__}, {why}"


def _described(tensor: torch.Tensor) -> str:
    if tensor.is_quantized:
        return "a quantized one: pass what dequantize() returns"
    if tensor.is_nested:
        return "a nested one: pass the tensors that it consists of"
    return f"one with the layout {tensor.layout}: pass what to_dense() returns"


def check_writable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Checks that a version can be copied into tensors.

    Raises:
        ValueError: it can't be copied into one of them.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() and tensor.numel():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            if any(size > 1 and not stride for size, stride in pairs):
                raise ValueError(
                    f"expected {name} with memory for each element, found an expanded tensor: load "
                    "into its clone()"
                )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"expected {name} as a tensor that can be written to, found one that was made in "
                "inference mode: load within torch.inference_mode(), or into its clone()"
            )


def _tensors_of_module(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        left_out = module._non_persistent_buffers_set
        # The methods of the base class: those of a RemoteModule ask another worker.
        yield from torch.nn.Module.named_parameters(module, prefix[:-1], False, False)
        for name, buffer in torch.nn.Module.named_buffers(module, prefix[:-1], False, False):
            if name.removeprefix(prefix) not in left_out:
                yield name, buffer
