"""Converts objects to messages and back.

The C pickler is tried first, with a dispatch table of our own. cloudpickle is used only if that
fails (lambdas, closures, classes defined in a function), or if a name in ``__main__`` would mean
something else at the receiver. Upper rooms add types of their own by `register_reducer`.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from zrpc.by_value import ByValuePickler
from zrpc.errors import RpcError, SerializationError
from zrpc.runtime.interrupts import raised_by_handler, uninterrupted
from zrpc.wire.alignment import aligned
from zrpc.wire.current_message import decoder, encoder, thread
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.reducers import REDUCERS, Reducer
from zrpc.wire.subclasses import check_sendable, reduce_in_graph
from zrpc.wire.tensors import INLINE_BYTES, TensorWriter, read_table
from zrpc.wire.views import Relation, relate

__all__ = ["Decoder", "Encoder", "decoder", "encoder", "register_reducer"]

_dispatch_table: dict[type, Reducer] = {**copyreg.dispatch_table, **REDUCERS}


def register_reducer(cls: type, reducer: Reducer) -> None:
    """Has instances of ``cls`` pickled by ``reducer``, in messages only.

    Args:
        cls: the type, without its subclasses.
        reducer: as for ``copyreg.pickle``; it finds the message by `encoder`.
    """
    _dispatch_table[cls] = reducer


# How deep, and in how large containers, to look for a value that can't be pickled.
_SEARCHED_LEVELS = 8
_SEARCHED_PARTS = 1000
_NO_OPENERS: Mapping[int, Callable[[Decoder], None]] = {}


class _Pickler(pickle.Pickler):
    """The C pickler, with our dispatch table."""

    dispatch_table = _dispatch_table


class _GraphPickler(_Pickler):
    """The same for messages that are part of an autograd graph."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduces tensors of subclasses; the dispatch table has none."""
        return reduce_in_graph(obj)


class _ByValuePickler(ByValuePickler):
    """The pickler of cloudpickle, with our dispatch table first."""

    dispatch_table: ClassVar[Any] = ChainMap(_dispatch_table, ByValuePickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        """Refuses tensors that can't be sent; reduces functions, and tensors of subclasses."""
        check_sendable(obj)
        current = encoder()
        reduced = NotImplemented
        if current is not None and current.in_graph:
            reduced = reduce_in_graph(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class Encoder:
    """Packs one message.

    Args:
        owner: the agent that packs; reducers of upper rooms compare it.
        destination: the member that the message goes to.
        same_main: whether a name in ``__main__`` means the same at the receiver.
        request: the request that the message answers; None if it is a request itself.
        finishers: called with this encoder when all tensors of the message are known.
        in_graph: whether tensors that require grad stay part of an autograd graph.
    """

    __slots__ = (
        "_finishers",
        "_plain",
        "_tensors",
        "_undo",
        "buffers",
        "destination",
        "extensions",
        "in_graph",
        "owner",
        "request",
        "same_main",
    )

    def __init__(
        self,
        owner: object,
        destination: MemberId,
        same_main: bool,
        request: Message | None = None,
        finishers: Sequence[Callable[[Encoder], None]] = (),
        in_graph: bool = False,
    ) -> None:
        self.owner = owner
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
        """The tensors that have been added to the message."""
        if self._tensors is None:
            self._tensors = TensorWriter(self._plain)
        return self._tensors

    def extension(self, tag: int) -> bytearray:
        """Returns the bytes of the extension with this tag, for a service to append to."""
        return self.extensions.setdefault(tag, bytearray())

    def undo(self, action: Callable[[], None]) -> None:
        """Has ``action`` called if the message is not sent after all."""
        self._undo.append(action)

    @property
    def undoable(self) -> bool:
        """Whether reducers have registered anything that `abort` would undo."""
        return bool(self._undo)

    def abort(self) -> None:
        """Undoes what reducers have done for the message, since it will not be sent."""
        if self._undo:
            with uninterrupted:
                for action in reversed(self._undo):
                    action()
                self._undo.clear()

    def pack(self, obj: Any, message: Message) -> None:
        """Packs ``obj`` into ``message``.

        Raises:
            SerializationError: ``obj`` can't be pickled.
            MemoryError: there is no memory left.
        """
        before = getattr(thread, "encoder", None)
        thread.encoder = self
        try:
            message.body = self._pickle(obj)
            if self._tensors is not None:
                self._tensors.group(self.in_graph)
            for finish in self._finishers:
                finish(self)
            if self._tensors is not None:
                message.table = self._tensors.table(self.buffers)
        except BaseException:
            self.abort()
            raise
        finally:
            thread.encoder = before
        message.buffers = self.buffers
        if self.extensions:
            message.extensions = [(tag, bytes(data)) for tag, data in self.extensions.items()]

    def _pickle(self, obj: Any) -> bytes:
        try:
            body = self._dump(_GraphPickler if self.in_graph else _Pickler, obj)
            if self.same_main or b"__main__" not in body:
                return body
        except (RpcError, MemoryError):
            raise  # a reducer's own error, or one that cloudpickle can't avoid
        except Exception as error:  # cloudpickle pickles more types, and its errors say more
            if raised_by_handler(error):
                raise
        self._start_over()
        try:
            return self._dump(_ByValuePickler, obj)
        except (RpcError, MemoryError):
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            found = type(self._unpicklable(obj)).__name__
            raise SerializationError(
                f"expected picklable values, found one of type {found} that can't be pickled: "
                f"{error}; send what it is made of, or create it on the worker that uses it"
            ) from error

    def _unpicklable(self, obj: Any, levels: int = _SEARCHED_LEVELS) -> Any:
        """Returns the innermost value in containers that can't be pickled, for the error."""
        parts: Sequence[Any] = obj if type(obj) in (tuple, list) else ()
        if type(obj) is dict:
            parts = [*obj, *obj.values()]
        if levels and len(parts) <= _SEARCHED_PARTS:
            for part in parts:
                if not self._is_picklable(part):
                    return self._unpicklable(part, levels - 1)
        return obj

    def _is_picklable(self, obj: Any) -> bool:
        self._start_over()
        try:
            self._dump(_ByValuePickler, obj)
        except Exception as error:
            if raised_by_handler(error):
                raise
            return False
        return True

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


class Decoder:
    """Unpacks one message.

    Args:
        owner: the agent that unpacks.
        message: the message.
        openers: by the tag of an attachment. If the message has that attachment, its opener is
            called with this decoder after the tensors have been made and before the body is
            unpickled. It may replace items of `tensors`.
    """

    def __init__(
        self,
        owner: object,
        message: Message,
        openers: Mapping[int, Callable[[Decoder], None]] = _NO_OPENERS,
    ) -> None:
        self.owner = owner
        self.message = message
        self.tensors: list[torch.Tensor] = []
        relations: list[Relation] = []
        if message.table:
            self.tensors, relations = read_table(message.table, message.buffers)
        for tag in message.attachments or ():
            if tag in openers:
                openers[tag](self)
        if relations:
            relate(self.tensors, relations)

    def unpack(self) -> Any:
        """Returns the object that the message holds.

        Raises:
            SerializationError: the pickle names something that doesn't exist here, or is damaged.
            MemoryError: there is no memory left for the object.
        """
        before = getattr(thread, "decoder", None)
        thread.decoder = self
        try:
            buffers = self.message.buffers
            return pickle.loads(self.message.body, buffers=map(aligned, buffers) if buffers else ())
        except (AttributeError, ImportError) as error:
            if raised_by_handler(error):
                raise
            raise SerializationError(
                f"{error}. Default RPC pickler does not serialize function code that can be "
                "imported: ensure that functions and classes are defined in modules that both "
                "the caller and the callee can import, and those of a script before its init_rpc"
            ) from error
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            if raised_by_handler(error):
                raise
            raise SerializationError(
                f"a value that was sent can't be rebuilt here: {type(error).__name__}: {error}"
            ) from error
        finally:
            thread.decoder = before
