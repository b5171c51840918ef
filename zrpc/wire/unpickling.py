"""Makes the objects in messages; see `zrpc.wire.pickling`."""

from __future__ import annotations

import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zrpc.errors import SerializationError, text_of
from zrpc.runtime.interrupts import raise_if_of_handler
from zrpc.wire.kind import ANSWERS, REQUESTS
from zrpc.wire.memory import aligned
from zrpc.wire.message import Message
from zrpc.wire.tensor_reading import read_table
from zrpc.wire.views import Relation, relate

# .decoder is the message that this thread unpacks, if any.
_unpacking = threading.local()
_NO_OPENERS: Mapping[int, Callable[[Decoder], None]] = {}


class Decoder:
    """Unpacks one message.

    Args:
        owner: the agent that unpacks.
        message: the message.
        openers: by the tag of an attachment. If the message has that attachment, its opener is
            called with this decoder after the tensors have been made and before the body is
            unpickled. It may replace items of `tensors`.

    Attributes:
        tensors: those of the message.
        fills: what was left out of the part that this unpacks; see `zrpc.wire.parts`.
        fetch: see `unpack`.
    """

    fills: Sequence[Any] = ()
    fetch: Callable[[str], Any] | None = None

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

    def unpack(self, fetch: Callable[[str], Any] | None = None) -> Any:
        """Returns the object that the message holds.

        Args:
            fetch: returns what the main script lacks, by its name there; None if that is an error.

        Raises:
            SerializationError: the pickle names something that doesn't exist here, or is damaged.
            MemoryError: there is no memory left for the object.
        """
        before = getattr(_unpacking, "decoder", None)
        try:
            _unpacking.decoder = self
            buffers = self.message.buffers
            ready = map(aligned, buffers) if buffers else ()
            if fetch is not None:
                self.fetch = fetch
                return _Fetching(self.message.body, ready, fetch).load()
            return pickle.loads(self.message.body, buffers=ready)
        except (AttributeError, ImportError) as error:
            raise_if_of_handler(error)
            raise self._unreadable(
                f"{error}. Default RPC pickler does not serialize function code that can be "
                "imported: ensure that functions and classes are defined in modules that both "
                "the caller and the callee can import, and those of a script before its init_rpc"
            ) from error
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            raise_if_of_handler(error)
            raise self._unreadable(
                f"a value that was sent can't be rebuilt here: {text_of(error)}"
            ) from error
        finally:
            _unpacking.decoder = before

    def _unreadable(self, text: str) -> SerializationError:
        error = SerializationError(text)
        if self.message.kind in ANSWERS:
            error.executed = True
        elif self.message.kind in REQUESTS:
            error.executed = False
        return error


def decoder() -> Decoder:
    """Returns the message that this thread unpacks; for rebuilding values.

    Raises:
        SerializationError: this thread unpacks no message.
    """
    current: Decoder | None = getattr(_unpacking, "decoder", None)
    if current is None:
        raise SerializationError("this pickle is part of a message and can only be read there")
    return current


class Holes(list[Any]):
    """The values that are left out of a part, in the order of their fills."""

    def leave_out(self, value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
        """Returns how a value is pickled that each message has a fill for."""
        self.append(value)
        return _fill, (len(self) - 1,)


def _fill(index: int) -> Any:
    return decoder().fills[index]


def unpack_part(part: Message, fills: Sequence[Any]) -> Any:
    """Returns the object in a part of the message that this thread unpacks.

    Args:
        part: its body, table and buffers.
        fills: what was left out of it.
    """
    whole = decoder()
    inner = Decoder(whole.owner, part)
    inner.fills = fills
    ready = map(aligned, part.buffers)
    try:  # errors are those of the whole message
        _unpacking.decoder = inner
        if whole.fetch is not None:
            return _Fetching(part.body, ready, whole.fetch).load()
        return pickle.loads(part.body, buffers=ready)
    finally:
        _unpacking.decoder = whole


class _Fetching(pickle.Unpickler):
    """Unpickles what names in the main script mean that this process lacks."""

    def __init__(self, body: Any, buffers: Iterable[Any], fetch: Callable[[str], Any]) -> None:
        super().__init__(io.BytesIO(body), buffers=buffers)
        self._fetch = functools.cache(fetch)

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a module has under a name."""
        try:
            return super().find_class(module, name)
        except AttributeError as lacking:
            if module != "__main__":
                raise
            try:
                return self._fetch(name)
            except Exception as error:
                raise_if_of_handler(error)
                raise lacking from error
