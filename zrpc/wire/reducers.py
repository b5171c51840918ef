"""How values of torch's types, and a few of Python's, are pickled in messages.

`REDUCERS` holds one reducer for each type. Pickles name the ``_rebuild...`` functions of this
module, which make the values on arrival.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from cloudpickle.cloudpickle import _should_pickle_by_reference
from torch._ops import OpOverload, OpOverloadPacket
from torch.jit._recursive import wrap_cpp_module

from zrpc import stand_in
from zrpc.errors import SerializationError
from zrpc.wire.graph_capture import PROXIES, refuse_proxy
from zrpc.wire.tensor_reading import make_plain
from zrpc.wire.tensors import TensorWriter, attributes_of
from zrpc.wire.unpickling import decoder

Reducer = Callable[[Any], Any]

_PROTOCOL = pickle.HIGHEST_PROTOCOL
# .encoder is the message that this thread packs.
packing = threading.local()


class PackedMessage(Protocol):
    """A message that is being packed; see `zrpc.wire.pickling.Encoder`."""

    same_main: bool
    in_graph: bool
    _tensors: TensorWriter | None

    @property
    def tensors(self) -> TensorWriter:
        """The tensors that have been added to the message."""

    def sendable(self, attributes: dict[str, Any], /) -> dict[str, Any]:
        """Returns those attributes of a tensor that can be pickled; warns of the others."""


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    current: PackedMessage = packing.encoder
    tensors = current._tensors  # without the call of the property for each small tensor
    if tensors is None:
        tensors = current.tensors
    plain_row = tensors.add_plain(tensor)
    if plain_row is not None:
        return make_plain, plain_row
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return with_attributes(current, tensor, (_receive_tensor, (tensors.add(tensor),)))
    reduced = _reduce_unusual(current, tensor)
    if reduced is None:  # torch's own way keeps the attributes itself
        return torch.Tensor.__reduce_ex__(tensor, _PROTOCOL)
    return with_attributes(current, tensor, reduced)


def with_attributes(
    current: PackedMessage, tensor: torch.Tensor, reduced: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Adds the attributes that a program has set on a tensor, as pickle does."""
    attributes = attributes_of(tensor)
    if attributes is not None:
        attributes = current.sendable(attributes)
    return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(tensor, name, value)


def _reduce_unusual(current: PackedMessage, tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Reduces a tensor that is not made from strided memory; None if torch must do it."""
    layout, requires_grad, plain = tensor.layout, tensor.requires_grad, tensor.detach()
    if requires_grad and current.in_graph:
        return _reduce_unusual_in_graph(tensor)
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter, (plain, requires_grad)
    if str(layout).startswith("torch.sparse"):
        return _rebuild_sparse, (layout, _sparse_parts(plain), requires_grad)
    if tensor.is_quantized and not requires_grad:
        # A copy, since torch sends all of the storage; but torch can't copy those of embeddings.
        if plain.qscheme() is not torch.per_channel_affine_float_qparams:
            plain = plain.clone()
        reduced: tuple[Any, ...] = torch.Tensor.__reduce_ex__(plain, _PROTOCOL)
        return reduced
    return None


def _sparse_parts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what a sparse tensor consists of. torch's own way doesn't do so on all devices."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values(), tensor.shape, tensor.is_coalesced()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        indices = tensor.crow_indices(), tensor.col_indices()
    else:
        indices = tensor.ccol_indices(), tensor.row_indices()
    return *indices, tensor.values(), tensor.shape


def _reduce_unusual_in_graph(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reduces a sparse tensor of a graph to its values, which are part of the graph as well."""
    if tensor.is_nested:
        raise SerializationError(
            "expected dense, jagged or sparse COO tensors in an autograd context, found a nested "
            "tensor of layout torch.strided that requires grad: send tensor.unbind(), or "
            "tensor.detach()"
        )
    if tensor.layout is not torch.sparse_coo:
        raise SerializationError(
            "expected dense, jagged or sparse COO tensors in an autograd context, found one of "
            f"layout {tensor.layout} that requires grad: send tensor.detach(), or "
            "tensor.to_sparse_coo()"
        )
    tensor = tensor.coalesce()
    # Without the flag: whether it requires grad follows from the values.
    parts = tensor.indices(), tensor.values(), tensor.shape, True
    return _rebuild_sparse, (tensor.layout, parts, False)


def _receive_tensor(index: int) -> torch.Tensor:
    return decoder().tensors[index]


def _rebuild_sparse(
    layout: torch.layout, parts: tuple[Any, ...], requires_grad: bool
) -> torch.Tensor:
    """Makes a sparse tensor. torch's own function would keep it alive."""
    options = {"device": parts[0].device, "check_invariants": False}
    if layout is torch.sparse_coo:
        *data, options["is_coalesced"] = parts
        tensor = torch.sparse_coo_tensor(*data, **options)
    else:
        tensor = torch.sparse_compressed_tensor(*parts, layout=layout, **options)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_untyped_storage(storage: torch.UntypedStorage, dtype: torch.dtype | None = None) -> Any:
    if dtype is None and storage.device.type == "meta":
        return torch.UntypedStorage.__reduce__(storage)
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _rebuild_storage, (whole, dtype)


def _reduce_typed_storage(storage: torch.TypedStorage) -> Any:
    return _reduce_untyped_storage(storage._untyped_storage, storage.dtype)


def _rebuild_storage(whole: torch.Tensor, dtype: torch.dtype | None) -> Any:
    untyped = whole.untyped_storage()
    if dtype is None:
        return untyped
    return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _reduce_script(script: Any) -> Any:
    """Reduces a TorchScript function to its name if it has one, otherwise to its code."""
    if isinstance(script, torch.jit.ScriptFunction):
        *path, name = script.qualified_name.removeprefix("__torch__.").split(".")
        module = ".".join(path) or "__main__"
        named = module != "__main__" or packing.encoder.same_main
        # The name may refer to what a decorator has made of the script, such as async_execution.
        found: Any = getattr(sys.modules.get(module), name, None)
        if named and inspect.unwrap(found) is script:
            return _import_script, (module, name)
    file = io.BytesIO()
    torch.jit.save(script, file)
    return _rebuild_script, (file.getvalue(),)


def _reduce_script_method(method: Any) -> Any:
    return getattr, (wrap_cpp_module(method.owner), method.name)


def _import_script(module: str, name: str) -> Any:
    return inspect.unwrap(getattr(importlib.import_module(module), name))


def _rebuild_script(code: bytes) -> Any:
    script = torch.jit.load(io.BytesIO(code))
    # Tasks that a script has forked outlive its call, and crash the process if the script is freed.
    decoder().message.keep(script)
    return script


def _reduce_view(view: memoryview) -> Any:
    """Reduces a view of bytes or numbers; a large `pickle.PickleBuffer` arrives as a view, too."""
    if not view.nbytes:
        return memoryview, (b"" if view.readonly else bytearray(),)
    if not view.c_contiguous:
        copy = view.tobytes()
        dense = memoryview(copy if view.readonly else bytearray(copy))
        view = dense.cast(view.format, view.shape)  # type: ignore[call-overload]
    rest = (view.format, view.shape)
    if rest == ("B", (view.nbytes,)):
        return memoryview, (pickle.PickleBuffer(view),)
    flat = view.cast("B")
    flat.cast(*rest)  # type: ignore[call-overload]  # fails here rather than at the receiver
    return _rebuild_view, (pickle.PickleBuffer(flat), *rest)


def _rebuild_view(data: Any, form: str, shape: tuple[int, ...]) -> memoryview:
    return memoryview(data).cast(form, shape)  # type: ignore[call-overload,no-any-return]


def _reduce_builtin(function: Any) -> Any:
    """Reduces a C function to its module and name; for torch's this halves the time."""
    name = function.__name__
    module = sys.modules.get(function.__module__)
    if getattr(module, name, None) is function:
        return name
    return _reduce_to_module(function) or function.__reduce__()


def _reduce_method(method: types.MethodType) -> Any:
    reduced = _reduce_to_module(method)
    if reduced is None and getattr(method.__self__, method.__name__, None) != method:
        # Of a decorator without functools.wraps: its name is another method's, or none's.
        raise pickle.PicklingError(f"{method.__qualname__} is not found by its name")
    return reduced or method.__reduce__()


def reduce_method_by_value(method: types.MethodType) -> Any:
    """Reduces a bound method for cloudpickle, which may send its function by value."""
    return (
        _reduce_to_module(method)
        or _reduce_to_class(method)
        or (types.MethodType, (method.__func__, method.__self__))
    )


def _reduce_to_class(method: types.MethodType) -> Any:
    """Reduces a class method of a class that goes by name; None for other methods.

    cloudpickle would send its function by value, as the class has a bound method of that name.
    """
    owner, name = method.__self__, getattr(method, "__name__", "")
    if not isinstance(owner, type) or getattr(owner, name, None) != method:
        return None
    return (getattr, (owner, name)) if _should_pickle_by_reference(owner) else None


def _reduce_to_module(method: Any) -> Any:
    """Reduces a bound method that a module offers as a function, such as ``random.random``.

    Its object is an instance that the module hides, and each process has its own. Returns None if
    no module offers the method.
    """
    module = _module_that_offers(method)
    # In torch, a copy of the object is sent, which the other script need not have.
    copied = not packing.encoder.same_main or stand_in.is_active()
    if module is None or (module == "__main__" and copied):
        return None
    return _import_function, (module, method.__name__)


def _module_that_offers(method: Any) -> Any:
    of_class = type(method.__self__).__module__
    if _offers(of_class, method):
        return of_class
    of_function = getattr(method, "__module__", None)
    if of_function != of_class and _offers(of_function, method):
        return of_function
    named_alike = _modules_with(getattr(method, "__name__", ""), len(sys.modules))
    others = [module for module in named_alike if _offers(module, method)]
    # Those that have only imported the function don't have the instance.
    others.sort(key=lambda module: (not _has(module, method.__self__), module == "__main__"))
    return others[0] if others else None


def _offers(module: Any, method: Any) -> bool:
    found = _globals_of(module).get(getattr(method, "__name__", ""))
    return type(found) is type(method) and found == method


def _has(module: str, instance: object) -> bool:
    return any(value is instance for value in _globals_of(module).values())


def _globals_of(module: Any) -> dict[str, Any]:
    return getattr(sys.modules.get(module), "__dict__", {})


@functools.lru_cache(maxsize=1024)
def _modules_with(name: str, modules: int) -> tuple[str, ...]:
    """Returns the modules that have a bound method of this name.

    They are looked up again when there is another number of ``modules``, as that takes long.
    """
    kinds = (types.MethodType, types.BuiltinFunctionType)
    return tuple(each for each in list(sys.modules) if type(_globals_of(each).get(name)) in kinds)


def _import_function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _reduce_operator(operator: Any) -> Any:
    """Reduces an operator of ``torch.ops`` to its name, with its overload if it has one."""
    if isinstance(operator, OpOverload):
        return _find_operator, (operator._schema.name, operator._overloadname)
    return _find_operator, (operator._qualified_op_name, None)


def _find_operator(name: str, overload: str | None) -> Any:
    namespace, name = name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return packet if overload is None else getattr(packet, overload)


REDUCERS: dict[type, Reducer] = {
    torch.Tensor: _reduce_tensor,
    torch.nn.Parameter: _reduce_tensor,
    torch.UntypedStorage: _reduce_untyped_storage,
    torch.TypedStorage: _reduce_typed_storage,
    torch.jit.ScriptFunction: _reduce_script,
    torch.jit.RecursiveScriptModule: _reduce_script,
    torch._C.ScriptMethod: _reduce_script_method,
    memoryview: _reduce_view,
    types.BuiltinFunctionType: _reduce_builtin,
    types.MethodType: _reduce_method,
    OpOverload: _reduce_operator,
    OpOverloadPacket: _reduce_operator,
    **dict.fromkeys(PROXIES, refuse_proxy),
}
