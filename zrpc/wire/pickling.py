"""Objects to messages and back.

The C pickler goes first, with a dispatch table of our own; cloudpickle only where that fails
(lambdas, closures, classes defined in a function) or where a name in ``__main__`` would mean
something else at the receiver. An upper layer adds types of its own by `register_reducer`.
"""

from __future__ import annotations

import copyreg
import importlib
import inspect
import io
import pickle
import sys
import threading
import types
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import cloudpickle
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.jit._recursive import wrap_cpp_module

from zrpc.errors import RpcError, SerializationError
from zrpc.wire.alignment import aligned
from zrpc.wire.header import Message
from zrpc.wire.tensors import INLINE_BYTES, TensorWriter, make_plain, read_table

__all__ = ["Decoder", "Encoder", "decoder", "encoder", "register_reducer"]

Reducer = Callable[[Any], Any]

# .encoder and .decoder are those of the message that this thread packs or unpacks just now.
_thread = threading.local()

_dispatch_table: dict[type, Reducer] = dict(copyreg.dispatch_table)


def register_reducer(cls: type, reducer: Reducer) -> None:
    """Pickles instances of exactly ``cls`` by ``reducer`` in messages, and nowhere else.

    Args:
        cls: the type; its subclasses are not meant.
        reducer: as for ``copyreg.pickle``; it finds the message by `encoder`.
    """
    _dispatch_table[cls] = reducer


_NO_OPENERS: Mapping[int, Callable[[Decoder], None]] = {}


class _Pickler(pickle.Pickler):
    """The C pickler, with our dispatch table."""

    dispatch_table = _dispatch_table


class _ByValuePickler(cloudpickle.Pickler):
    """cloudpickle's, with our dispatch table first."""

    dispatch_table: ClassVar[Any] = ChainMap(_dispatch_table, cloudpickle.Pickler.dispatch_table)


class Encoder:
    """One message that is being packed.

    Args:
        agent: the sending agent, for reducers of upper layers.
        destination: the rank of the worker that it goes to.
        same_main: whether a name in ``__main__`` means the same at the receiver.
        request: what the message answers; None where it is a request itself.
        finishers: called with this encoder when all tensors of the message are known.
        in_graph: whether tensors that require grad stay part of a graph on their way.
    """

    __slots__ = (
        "_finishers",
        "_plain",
        "_tensors",
        "_undo",
        "agent",
        "buffers",
        "destination",
        "extensions",
        "in_graph",
        "request",
        "same_main",
    )

    def __init__(
        self,
        agent: Any,
        destination: int,
        same_main: bool,
        request: Message | None = None,
        finishers: Sequence[Callable[[Encoder], None]] = (),
        in_graph: bool = False,
    ) -> None:
        self.agent = agent
        self.destination = destination
        self.same_main = same_main
        self.request = request
        self.in_graph = in_graph
        self._finishers = finishers
        self._undo: list[Callable[[], None]] = []
        self._plain = True
        self._tensors: TensorWriter | None = None
        self.extensions: dict[int, bytearray] = {}
        self.buffers: list[Any] = []

    @property
    def tensors(self) -> TensorWriter:
        """The tensors of the message so far."""
        if self._tensors is None:
            self._tensors = TensorWriter(self._plain)
        return self._tensors

    def extension(self, tag: int) -> bytearray:
        """The bytes that travel under ``tag``, for a layer to add to."""
        return self.extensions.setdefault(tag, bytearray())

    def undo(self, action: Callable[[], None]) -> None:
        """Has ``action`` called should the message not be sent after all."""
        self._undo.append(action)

    @property
    def undoable(self) -> bool:
        """Whether reducers have done something that `abort` undoes."""
        return bool(self._undo)

    def abort(self) -> None:
        """Undoes what reducers have done for the message, which will not be sent."""
        for action in reversed(self._undo):
            action()
        self._undo.clear()

    def pack(self, obj: Any, message: Message) -> None:
        """Puts ``obj`` into ``message``.

        Raises:
            SerializationError: it can't be pickled.
            MemoryError: there is no memory for that.
        """
        before = getattr(_thread, "encoder", None)
        _thread.encoder = self
        try:
            message.body = self._pickle(obj)
            for finish in self._finishers:
                finish(self)
            if self._tensors is not None:
                message.table = self._tensors.table(self.buffers)
        except BaseException:
            self.abort()
            raise
        finally:
            _thread.encoder = before
        message.buffers = self.buffers
        if self.extensions:
            message.extensions = [(tag, bytes(data)) for tag, data in self.extensions.items()]

    def _pickle(self, obj: Any) -> bytes:
        try:
            body = self._dump(_Pickler, obj)
            if self.same_main or b"__main__" not in body:
                return body
        except (RpcError, MemoryError):
            raise  # a reducer's own word, or nothing that cloudpickle could do better
        except Exception:  # cloudpickle can do more, and its error says more
            pass
        self._start_again()
        try:
            return self._dump(_ByValuePickler, obj)
        except (RpcError, MemoryError):
            raise
        except Exception as error:
            raise SerializationError(
                f"expected picklable values, found {type(obj).__name__} that holds one that "
                f"can't be pickled: {error}"
            ) from error

    def _dump(self, pickler: Any, obj: Any) -> bytes:
        file = io.BytesIO()
        pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=self._keep_inline).dump(obj)
        if self._tensors is None or not self._tensors.overlapping:
            return file.getvalue()
        self._plain = False
        self._start_again()
        return self._dump(pickler, obj)

    def _start_again(self) -> None:
        self.abort()
        self._tensors, self.extensions, self.buffers = None, {}, []

    def _keep_inline(self, buffer: pickle.PickleBuffer) -> bool:
        """Tells the pickler whether a buffer (of an array, say) stays in the pickle."""
        raw = buffer.raw()
        if raw.nbytes <= INLINE_BYTES:
            return True
        self.buffers.append(raw)
        return False


class Decoder:
    """One message that is being unpacked.

    Args:
        agent: the receiving agent.
        message: the message.
        openers: by the tag of an attachment: called with this decoder when the tensors of a
            message with one are made, and before its body is unpickled; they may put others
            into `tensors`.
    """

    def __init__(
        self,
        agent: Any,
        message: Message,
        openers: Mapping[int, Callable[[Decoder], None]] = _NO_OPENERS,
    ) -> None:
        self.agent = agent
        self.message = message
        self.tensors = read_table(message.table, message.buffers) if message.table else []
        for tag in message.attachments or ():
            if tag in openers:
                openers[tag](self)

    def unpack(self) -> Any:
        """The object that the message holds.

        Raises:
            SerializationError: the pickle names something that isn't here, or is damaged.
            MemoryError: there is no memory for the object.
        """
        before = getattr(_thread, "decoder", None)
        _thread.decoder = self
        try:
            buffers = self.message.buffers
            return pickle.loads(self.message.body, buffers=map(aligned, buffers) if buffers else ())
        except (AttributeError, ImportError) as error:
            raise SerializationError(
                f"{error}. Default RPC pickler does not serialize function code that can be "
                "imported: ensure that functions and classes are defined in modules that both "
                "the caller and the callee can import, and those of a script before its init_rpc"
            ) from error
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            raise SerializationError(
                f"a value that was sent can't be rebuilt here: {type(error).__name__}: {error}"
            ) from error
        finally:
            _thread.decoder = before


def encoder() -> Encoder | None:
    """The message that this thread packs just now, for reducers."""
    return getattr(_thread, "encoder", None)


def decoder() -> Decoder:
    """The message that this thread unpacks just now, for what reducers have named."""
    current: Decoder | None = getattr(_thread, "decoder", None)
    if current is None:
        raise SerializationError("this pickle is part of a message and can only be read there")
    return current


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    # As `_current_encoder().tensors`, without the calls: it is done for each small tensor.
    current = getattr(_thread, "encoder", None) or _current_encoder()
    tensors = current._tensors
    if tensors is None:
        tensors = current.tensors
    plain_row = tensors.add_plain(tensor)
    if plain_row is not None:
        return make_plain, plain_row
    layout = tensor.layout
    if layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        reduced = _receive_tensor, (tensors.add(tensor),)
        return reduced if type(tensor) is torch.Tensor else _with_attributes(tensor, reduced)
    requires_grad, plain = tensor.requires_grad, tensor.detach()
    if requires_grad and _current_encoder().in_graph:
        return _reduce_sparse_in_graph(tensor)
    if type(tensor) is torch.nn.Parameter:
        return _with_attributes(tensor, (torch.nn.Parameter, (plain, requires_grad)))
    if layout is torch.sparse_coo:
        parts = (plain._indices(), plain._values(), tuple(plain.shape), plain.is_coalesced())
        return _rebuild_coo, (*parts, requires_grad)
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        indices = (plain.crow_indices(), plain.col_indices())
        return _rebuild_compressed, (
            *indices,
            plain.values(),
            tuple(plain.shape),
            str(layout),
            requires_grad,
        )
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        indices = (plain.ccol_indices(), plain.row_indices())
        return _rebuild_compressed, (
            *indices,
            plain.values(),
            tuple(plain.shape),
            str(layout),
            requires_grad,
        )
    if tensor.is_quantized and not requires_grad:
        return _reduce_quantized(plain)
    return torch.Tensor.__reduce_ex__(tensor, pickle.HIGHEST_PROTOCOL)


def _with_attributes(parameter: torch.Tensor, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a program has set on a parameter travels with it; torch does so, not for tensors."""
    attributes = parameter.__dict__
    return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced


def _set_attributes(parameter: torch.Tensor, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)


def _reduce_sparse_in_graph(tensor: torch.Tensor) -> Any:
    """A sparse tensor that is part of a graph travels by its values, which are so too."""
    if tensor.layout is not torch.sparse_coo:
        raise SerializationError(
            f"expected dense or sparse COO tensors in an autograd context, found one of layout "
            f"{tensor.layout} that requires grad: send tensor.detach(), or tensor.to_sparse_coo()"
        )
    tensor = tensor.coalesce()
    return _rebuild_coo_in_graph, (tensor.indices(), tensor.values(), tuple(tensor.shape))


def _rebuild_coo_in_graph(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, is_coalesced=True, check_invariants=False
    )


def _reduce_quantized(tensor: torch.Tensor) -> Any:
    if tensor.qscheme() is torch.per_tensor_affine:
        values = (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
        return torch._make_per_tensor_quantized_tensor, values
    if tensor.qscheme() is torch.per_channel_affine:
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        axis = tensor.q_per_channel_axis()
        channels = (tensor.int_repr(), scales, zero_points, axis)
        return torch._make_per_channel_quantized_tensor, channels
    return torch.Tensor.__reduce_ex__(tensor, pickle.HIGHEST_PROTOCOL)


def _receive_tensor(index: int) -> torch.Tensor:
    return decoder().tensors[index]


def _rebuild_coo(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    coalesced: bool,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, is_coalesced=coalesced, check_invariants=False
    )
    return tensor.requires_grad_(requires_grad)


def _rebuild_compressed(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: str,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        shape,
        layout=getattr(torch, layout.removeprefix("torch.")),
        device=values.device,
        check_invariants=False,
    )
    return tensor.requires_grad_(requires_grad)


def _reduce_untyped_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type == "meta":
        return torch.UntypedStorage.__reduce__(storage)
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _rebuild_storage, (whole, None)


def _reduce_typed_storage(storage: torch.TypedStorage) -> Any:
    untyped = storage._untyped_storage
    whole = torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)
    return _rebuild_storage, (whole, storage.dtype)


def _rebuild_storage(whole: torch.Tensor, dtype: torch.dtype | None) -> Any:
    untyped = whole.untyped_storage()
    if dtype is None:
        return untyped
    return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _reduce_script(script: Any) -> Any:
    """TorchScript functions travel by name where they have one, otherwise as their code."""
    if isinstance(script, torch.jit.ScriptFunction):
        *path, name = script.qualified_name.removeprefix("__torch__.").split(".")
        module = ".".join(path) or "__main__"
        # The name may stand for what a decorator has made of the script, such as async_execution.
        if inspect.unwrap(getattr(sys.modules.get(module), name, None)) is script:  # type: ignore[arg-type]
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
    # What a script has forked goes on without it, and would end the process once it is gone.
    decoder().message.keep(script)
    return script


def _reduce_view(view: memoryview) -> Any:
    """Views of bytes or of numbers: a large `pickle.PickleBuffer` arrives as one."""
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
    flat.cast(*rest)  # type: ignore[call-overload]  # else it fails here, and not over there
    return _rebuild_view, (pickle.PickleBuffer(flat), *rest)


def _rebuild_view(data: Any, form: str, shape: tuple[int, ...]) -> memoryview:
    return memoryview(data).cast(form, shape)  # type: ignore[call-overload,no-any-return]


def _reduce_builtin(function: Any) -> Any:
    """Functions of C by their module and name, where they have these: torch's in half the time."""
    name = function.__name__
    module = sys.modules.get(function.__module__)
    return name if getattr(module, name, None) is function else function.__reduce__()


def _reduce_operator(operator: Any) -> Any:
    """Operators of ``torch.ops`` travel by name, custom ones too; without overload all of it."""
    if isinstance(operator, OpOverload):
        return _find_operator, (operator._schema.name, operator._overloadname)
    return _find_operator, (operator._qualified_op_name, None)


def _find_operator(name: str, overload: str | None) -> Any:
    namespace, name = name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return packet if overload is None else getattr(packet, overload)


def _current_encoder() -> Encoder:
    current = encoder()
    if current is None:
        raise SerializationError("tensors are reduced this way only inside of a message")
    return current


register_reducer(torch.Tensor, _reduce_tensor)
register_reducer(torch.nn.Parameter, _reduce_tensor)
register_reducer(torch.UntypedStorage, _reduce_untyped_storage)
register_reducer(torch.TypedStorage, _reduce_typed_storage)
register_reducer(torch.jit.ScriptFunction, _reduce_script)
register_reducer(torch.jit.RecursiveScriptModule, _reduce_script)
register_reducer(torch._C.ScriptMethod, _reduce_script_method)
register_reducer(memoryview, _reduce_view)
register_reducer(types.BuiltinFunctionType, _reduce_builtin)
register_reducer(OpOverload, _reduce_operator)
register_reducer(OpOverloadPacket, _reduce_operator)
