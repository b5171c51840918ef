"""Converts objects to messages; see `zrpc.wire.unpickling` for the way back.

The C pickler is tried first, with a dispatch table of our own. cloudpickle is used only if that
fails (lambdas, closures, classes defined in a function), or if a name in ``__main__`` would mean
something else at the receiver. Upper rooms add types of their own by `register_reducer`.
"""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
import sys
import types
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from zrpc.by_value import ByValuePickler, why_unpicklable
from zrpc.error_parts import ErrorReducers
from zrpc.errors import RpcError, SerializationError
from zrpc.runtime.compiler import when_compiler_is_loaded
from zrpc.runtime.interrupts import raise_if_of_handler, suppressing, uninterrupted
from zrpc.wire.compiled import reduce_compiled_function, reduce_compiled_module, reduce_compiler
from zrpc.wire.devices import DeviceMap, fetched
from zrpc.wire.graph_capture import check_modes, count_modes, is_tracing, uncaptured, warn
from zrpc.wire.member_id import NOBODY, MemberId
from zrpc.wire.message import Message
from zrpc.wire.reducers import REDUCERS, Reducer, packing, reduce_method_by_value, with_attributes
from zrpc.wire.subclasses import check_sendable, reduce_in_graph
from zrpc.wire.tensors import INLINE_BYTES, TensorWriter
from zrpc.wire.unpickling import Decoder, Holes

_dispatch_table: dict[type, Reducer] = {**copyreg.dispatch_table, **REDUCERS}


def register_reducer(cls: type, reducer: Reducer) -> None:
    """Pickles instances of ``cls`` by ``reducer``, in messages only.

    Args:
        cls: the type, without its subclasses.
        reducer: as for ``copyreg.pickle``; it finds the message by `encoder`.
    """
    _dispatch_table[cls] = _Pickler.dispatch_table[cls] = reducer


# What pickle does without a reducer, in C: with classes, and with all others.
_reduce_to_name = operator.attrgetter("__qualname__")
_reduce_by_protocol = operator.methodcaller("__reduce_ex__", pickle.HIGHEST_PROTOCOL)
# The largest copy that is sent beside a name. It is mostly not needed, and large globals of the
# main script would fill the memory of all processes.
_MAX_COPY_BYTES = 1 << 20
# How deep, and in how large containers, to look for a value that can't be pickled.
_SEARCHED_LEVELS = 8
_SEARCHED_PARTS = 1000


class _KnownReducers(ErrorReducers):
    """Our dispatch table, which keeps how instances of a class that can be imported are pickled.

    A pickler asks for the class of each object. It takes long for those that are missing.
    """

    def __missing__(self, cls: type) -> Reducer:
        try:
            reducer = super().__missing__(cls)
        except KeyError:
            reducer = _reduce_to_name if issubclass(cls, type) else _reduce_by_protocol
        if getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls:
            self[cls] = reducer
        return reducer


class _Pickler(pickle.Pickler):
    """The C pickler, with our dispatch table."""

    dispatch_table = _KnownReducers(_dispatch_table)


def _register_what_compiles() -> None:
    from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule

    register_reducer(OptimizedModule, reduce_compiled_module)
    register_reducer(OptimizeContext, reduce_compiler)


when_compiler_is_loaded(_register_what_compiles)


class _GraphPickler(_Pickler):
    """The same for messages that are part of an autograd graph."""

    reducer_override = staticmethod(reduce_in_graph)  # the dispatch table has no subclasses


class _ByValuePickler(ByValuePickler):
    """The pickler of cloudpickle, with our dispatch table first.

    Args:
        *args: as for `ByValuePickler`.
        first: tried first; returns NotImplemented for what it does not reduce.
        **options: as for `ByValuePickler`.
    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.MethodType: reduce_method_by_value}, _dispatch_table, ByValuePickler.dispatch_table
    )

    def __init__(self, *args: Any, first: Reducer | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._first = first

    def reducer_override(self, obj: Any) -> Any:
        """Refuses tensors that can't be sent; reduces functions, and tensors of subclasses."""
        current: Encoder = packing.encoder
        if self._first is not None:
            with suppressing(Exception):
                reduced = self._first(obj)
                if reduced is not NotImplemented and isinstance(obj, torch.Tensor):
                    return with_attributes(current, obj, reduced)
                if reduced is not NotImplemented:
                    return reduced
        check_sendable(obj)
        reduced = reduce_compiled_function(obj)
        if reduced is not NotImplemented and self.path_in_main(obj) is not None:
            reduced = NotImplemented
        if reduced is NotImplemented and current.in_graph:
            reduced = reduce_in_graph(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced

    def copy(self, obj: Any) -> bytes:
        """Returns an object as a pickle, in which it goes by value.

        Raises:
            SerializationError: it can't be pickled, or is too large to be sent beside its name.
        """
        packer, message = _BytesEncoder(same_main=False), Message(0)
        packer.pack(obj, message)
        if message.nbytes > _MAX_COPY_BYTES:
            raise SerializationError(
                f"a copy has {message.nbytes} bytes, and may have {_MAX_COPY_BYTES}"
            )
        return pickle.dumps(_Packed(message), pickle.HIGHEST_PROTOCOL)


class Envelope:
    """Something of zrpc's own, in which the program's values are sent."""

    __slots__ = ()

    @property
    def contents(self) -> Sequence[Any]:
        """The program's values."""
        raise NotImplementedError


class Encoder:
    """Packs one message.

    Args:
        owner: the agent that packs; reducers of upper rooms compare it.
        destination: the member that the message goes to.
        same_main: whether a name in ``__main__`` means the same at the receiver.

    Attributes:
        request: the request that the message answers; None if it is a request itself.
        finishers: called with this encoder when all tensors of the message are known.
        in_graph: whether tensors that require grad stay part of an autograd graph.
        to_undo: the actions that undo what reducers have done for the message.
        extensions: the bytes of each extension, by its tag.
        holds: what must live until the request is answered.
        holes: what is left out, if this packs a part of several messages; else None. See
            `zrpc.wire.parts`.
        devices: where the tensors on devices arrive; None if there must be none.
        memory: gets the destination and a size, and returns memory for large buffers that are
            copied from devices, to be sent without another copy; or None if there is none.
    """

    # Defaults on the class: one is made for each message, and few need more than `__init__`.
    request: Message | None = None
    finishers: Sequence[Callable[[Encoder], None]] = ()
    in_graph = False
    to_undo: list[Callable[[], None]] | None = None
    extensions: Mapping[int, bytearray] = {}
    holds: Sequence[Any] = ()
    holes: Holes | None = None
    devices: DeviceMap | None = None
    memory: Callable[[MemberId, int], Any] | None = None
    _plain = True
    _tensors: TensorWriter | None = None
    _has_attributes = False
    # Whether an attribute of a tensor can be pickled, by its id. None: they are not looked at.
    _attributes: dict[int, bool] | None = None

    def __init__(self, owner: object, destination: MemberId, same_main: bool) -> None:
        self.owner = owner
        self.destination = destination
        self.same_main = same_main
        self.buffers: list[Any] = []

    @property
    def tensors(self) -> TensorWriter:
        """The tensors that have been added to the message."""
        if self._tensors is None:
            self._tensors = TensorWriter(self._plain, self.devices)
        return self._tensors

    def extension(self, tag: int) -> bytearray:
        """Returns the bytes of the extension with this tag, for a service to append to."""
        if tag not in self.extensions:
            self.extensions = {**self.extensions, tag: bytearray()}
        return self.extensions[tag]

    def undo(self, action: Callable[[], None]) -> None:
        """Calls ``action`` if the message is not sent after all."""
        if self.to_undo is None:
            self.to_undo = []
        self.to_undo.append(action)

    def abort(self) -> None:
        """Undoes what reducers have done for the message, since it will not be sent."""
        if self.to_undo:
            with uninterrupted:
                for action in reversed(self.to_undo):
                    action()
                self.to_undo = None

    def sendable(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Returns those attributes of a tensor that can be pickled; warns of the others.

        Only a message that can't be pickled is looked at in such detail.
        """
        self._has_attributes = True
        if self._attributes is None:
            return attributes
        return {name: value for name, value in attributes.items() if self._may_send(name, value)}

    def _may_send(self, name: str, value: Any) -> bool:
        found = self._attributes
        assert found is not None
        if id(value) not in found:
            found[id(value)] = True  # for a value that refers to the tensor
            trial = Encoder(self.owner, self.destination, self.same_main)
            trial.request, trial.in_graph = self.request, self.in_graph
            trial.devices = self.devices
            trial._attributes = found
            try:
                trial.pack(value, Message(0))
                trial.abort()
            except RpcError as error:
                found[id(value)] = False
                warnings.warn(
                    f"the attribute {name!r} of a tensor is not sent, since a value of type "
                    f"{type(value).__name__} can't be pickled: {error}",
                    stacklevel=2,
                )
        return found[id(value)]

    def pack(self, obj: Any, message: Message) -> None:
        """Packs ``obj`` into ``message``.

        Raises:
            SerializationError: ``obj`` can't be pickled.
            MemoryError: there is no memory left.
        """
        if is_tracing():
            warn()
            with uncaptured():
                self.pack(obj, message)
            return
        if count_modes():
            check_modes()
        before = getattr(packing, "encoder", None)
        packing.encoder = self
        try:
            try:
                message.body = self._pickle(obj)
            except RpcError:
                if not self._has_attributes or self._attributes is not None:
                    raise
                self._attributes = {}
                self._start_over()
                message.body = self._pickle(obj)
            if self._tensors is not None or self.finishers:
                message.table = self._finish()
        except BaseException:
            self.abort()
            raise
        finally:
            packing.encoder = before
        message.buffers = self.buffers
        if self.extensions:
            message.extensions = [(tag, bytes(data)) for tag, data in self.extensions.items()]

    def _finish(self) -> bytes:
        """Lets the finishers add to the message; returns its tensor table."""
        if self._tensors is not None:
            self._tensors.group(self.in_graph)
        for finish in self.finishers:
            finish(self)
        if self._tensors is None:
            return b""
        table = self._tensors.table(self.buffers)
        if self.devices is not None:
            self.buffers = fetched(
                self.buffers, self.memory and partial(self.memory, self.destination)
            )
        return table

    def _pickle(self, obj: Any) -> bytes:
        try:
            body = self._dump(_GraphPickler if self.in_graph else _Pickler, obj)
            if self.same_main or b"__main__" not in body:
                return body
        except (RpcError, MemoryError):
            raise  # a reducer's own error, or one that cloudpickle can't avoid
        except Exception as error:  # cloudpickle pickles more types, and its errors say more
            raise_if_of_handler(error)
        self._start_over()
        return self._pickle_by_value(obj)

    def _pickle_by_value(self, obj: Any) -> bytes:
        try:
            return self._dump(self._by_value, obj)
        except (RpcError, MemoryError):
            raise
        except Exception as error:
            raise_if_of_handler(error)
            raise SerializationError(
                f"expected picklable values, found {why_unpicklable(self._unpicklable(obj), error)}"
            ) from error

    def _unpicklable(self, obj: Any, levels: int = _SEARCHED_LEVELS) -> Any:
        """Returns the innermost value in containers that can't be pickled, for the error."""
        parts: Sequence[Any] = obj if type(obj) in (tuple, list) else ()
        if type(obj) is dict:
            parts = [*obj, *obj.values()]
        if isinstance(obj, Envelope):
            parts = obj.contents
        if levels and len(parts) <= _SEARCHED_PARTS:
            for part in parts:
                if not self._is_picklable(part):
                    return self._unpicklable(part, levels - 1)
        return obj

    def _is_picklable(self, obj: Any) -> bool:
        self._start_over()
        try:
            self._dump(self._by_value, obj)
        except Exception as error:
            raise_if_of_handler(error)
            return False
        return True

    def _by_value(self, *args: Any, **options: Any) -> _ByValuePickler:
        return _ByValuePickler(*args, same_main=self.same_main, **options)

    def _dump(self, pickler: Any, obj: Any) -> bytes:
        file = io.BytesIO()
        pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=self._keep_inline).dump(obj)
        if self._tensors is None or not self._tensors.overlapping:
            return file.getvalue()
        self._plain = False
        self._start_over()
        return self._dump(pickler, obj)

    def _start_over(self) -> None:
        self.abort()
        self._tensors, self.extensions, self.buffers = None, {}, []

    def _keep_inline(self, buffer: pickle.PickleBuffer) -> bool:
        """Returns whether a buffer (of an array, for example) stays in the pickle."""
        raw = buffer.raw()
        if raw.nbytes <= INLINE_BYTES:
            return True
        self.buffers.append(raw)
        return False


def encoder() -> Encoder | None:
    """Returns the message that this thread packs, if any; for reducers."""
    return getattr(packing, "encoder", None)


class _BytesEncoder(Encoder):
    """Packs what is no message of a mesh.

    It asks cloudpickle at once, which may have been told to send a module by value.
    """

    def __init__(self, same_main: bool, **options: Any) -> None:
        super().__init__(None, NOBODY, same_main)
        self._options = options

    def _pickle(self, obj: Any) -> bytes:
        return self._pickle_by_value(obj)

    def _by_value(self, *args: Any, **options: Any) -> _ByValuePickler:
        return super()._by_value(*args, **self._options, **options)


def dumps(
    obj: Any,
    same_main: bool = False,
    copies: bool = False,
    first: Reducer | None = None,
    whole: str | None = None,
) -> bytes:
    """Returns an object as a pickle that may hold all that a message does, except for RRefs.

    Args:
        obj: the object.
        same_main: whether a name in ``__main__`` means the same where the pickle is read.
        copies: whether a copy is added for each such name, in case that it is missing there.
        first: reduces some objects before all else; NotImplemented for the others. What it fails to
            reduce is reduced as in a message.
        whole: a name in ``__main__`` that the receiver lacks: what it means goes by value.

    Raises:
        SerializationError: ``obj`` can't be pickled.
    """
    message = Message(0)
    packer = _BytesEncoder(same_main, copies=copies, first=first, whole=whole)
    packer.pack(obj, message)
    return pickle.dumps(_Packed(message), pickle.HIGHEST_PROTOCOL)


class _Packed:
    """A message that is pickled as the object in it."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __reduce__(self) -> Any:
        # Tensors are made in the memory of the buffers, and may be changed.
        buffers = [bytearray(buffer) for buffer in self._message.buffers]
        return _unpack, (self._message.body, self._message.table, buffers)


def _unpack(body: bytes, table: bytes, buffers: Sequence[bytearray]) -> Any:
    return Decoder(None, Message(0, body=body, table=table, buffers=buffers)).unpack()
