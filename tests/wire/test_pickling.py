"""Objects to messages and back, without a network."""

from __future__ import annotations

import copyreg
import decimal
import enum
import functools
import math
import pickle
import random
import secrets
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from zrpc.errors import SerializationError
from zrpc.wire import pickling
from zrpc.wire.message import Message, parse
from zrpc.wire.pickling import Encoder
from zrpc.wire.tensors import INLINE_BYTES
from zrpc.wire.unpickling import Decoder, decoder


def sent(obj: Any, same_main: bool = True, destination: int = 1) -> Message:
    """Returns the message that an object is packed into."""
    message = Message(1)
    Encoder(None, destination, same_main).pack(obj, message)
    return message


def arrived(message: Message) -> Message:
    """Returns the message as the receiver reads it."""
    return parse(message.first_frame(), [bytearray(buffer) for buffer in message.buffers])


def there(obj: Any, same_main: bool = True) -> Any:
    """Returns the object as it arrives."""
    return Decoder(None, arrived(sent(obj, same_main))).unpack()


@dataclass
class Point:
    x: int
    tensor: torch.Tensor


def function() -> int:
    return 5


def test_builtin_functions_are_pickled_by_module_and_name() -> None:
    for builtin in (
        len,
        math.sqrt,
        torch.add,
        torch.tensor,
        torch.nn.functional.linear,
        torch._C._nn.gelu,
    ):
        assert there(builtin) is builtin
        assert b"getattr" not in sent(builtin).body


def logged(fn: Callable[..., Any]) -> Any:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        return fn(*args)

    return wrapper


@logged
@torch.jit.script
def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_decorated_script_is_pickled_by_its_name() -> None:
    assert there(add_one.__wrapped__) is add_one.__wrapped__
    assert there(add_one).__wrapped__ is add_one.__wrapped__


def test_a_builtin_function_that_replaces_another_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(math, "sqrt", math.floor)
    assert there(math.sqrt)(2.5) == 2


class Hidden:
    def tell(self) -> Hidden:
        return self


def returning(value: Any) -> Callable[[], Any]:
    """Returns a function that has no name, and so goes by value."""
    return lambda: value


_hidden = Hidden()
tell = _hidden.tell


def test_methods_of_an_instance_that_a_module_hides_are_pickled_by_name() -> None:
    for method in (
        random.random,
        random.seed,
        numpy.random.rand,
        numpy.random.set_state,
        secrets.token_hex,
        tell,
    ):
        assert there(method) == method
        assert there([method, returning(method)])[1]() == method  # by value
        assert there(functools.partial(method)).func == method


def test_methods_of_other_instances_are_pickled_with_a_copy() -> None:
    for method in (
        random.Random(1).random,
        random.Random(1).choice,
        numpy.random.RandomState(1).rand,
        Hidden().tell,
    ):
        for copy in (there(method), there(returning(method))()):
            assert copy.__name__ == method.__name__
            assert copy.__self__ is not method.__self__


def test_the_module_of_the_instance_need_not_be_the_one_of_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importer, home = types.ModuleType("zrpc_importer"), types.ModuleType("zrpc_home")
    for module in (importer, home):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    home.hidden = Hidden()  # type: ignore[attr-defined]
    home.tell = importer.tell = home.hidden.tell  # type: ignore[attr-defined]
    assert b"zrpc_home" in sent(home.tell).body
    assert there(home.tell) == home.tell
    assert there(secrets.choice) == secrets.choice


def test_a_method_without_a_name_is_pickled_by_value() -> None:
    value = Point(1, torch.ones(1))
    assert there(types.MethodType(functools.partial(_x_of), value))() == 1


def _x_of(point: Point) -> int:
    return point.x


def unnamed(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator without functools.wraps."""

    def call(self: Any) -> Any:
        return method(self)

    return call


class Client:
    @unnamed
    def fetch(self) -> str:
        return "fetched"

    def call(self) -> str:
        return "called"


def test_a_method_with_the_name_of_another_one_is_pickled_by_value() -> None:
    assert there(Client().fetch)() == "fetched"


@pytest.mark.parametrize("same_main", [True, False])
def test_a_method_of_main_is_pickled_by_name_if_that_means_the_same(
    monkeypatch: pytest.MonkeyPatch, same_main: bool
) -> None:
    main = types.ModuleType("__main__")
    exec("class Of: \n def go(self): return self\nof = Of()\ngo = of.go", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert (there(main.go, same_main)() is main.of) == same_main


def test_objects_that_cannot_be_pickled_are_refused() -> None:
    for obj in (threading.Lock(), (x for x in ()), [1, {"a": threading.Event()}], lambda: LOCK):
        with pytest.raises(SerializationError, match="can't be pickled"):
            sent(obj)


LOCK = threading.Lock()


@given(st.binary(max_size=80))
@example(b"\x8e" + (1 << 56).to_bytes(8, "little"))  # announces this many bytes, which don't follow
def test_a_damaged_pickle_is_refused(body: bytes) -> None:
    # Bytes that name nothing dangerous: no GLOBAL, STACK_GLOBAL, INST, OBJ, REDUCE. And neither PUT
    # nor LONG_BINPUT: Python clears memory for as many objects as it says, up to all there is.
    body = bytes(byte for byte in body if byte not in b"ci\x93oR\x81\x92pr")
    try:
        Decoder(None, Message(1, body=body)).unpack()
    except (SerializationError, MemoryError):  # the latter if it announces more than fits
        return
    assert pickle.loads(body) is not ...


def test_the_current_message_is_restored_after_an_error() -> None:
    with pytest.raises(SerializationError):
        sent(threading.Lock())
    assert pickling.encoder() is None
    with pytest.raises(SerializationError, match="only be read there"):
        decoder()


# -- buffers -------------------------------------------------------------------------------


def test_large_arrays_and_tensors_have_frames_of_their_own() -> None:
    small = [(size, 0) for size in (0, 1, INLINE_BYTES)]
    for size, frames in (*small, (INLINE_BYTES + 1, 1), (100_000, 1)):
        array = numpy.arange(size).astype(numpy.uint8)
        for value in (array, torch.from_numpy(array)):
            message = sent(value)
            assert len(message.buffers) == frames
            assert len(message.body) + len(message.table) < 600 + (0 if frames else size)
            assert numpy.array_equal(there(value), array)


SIZES = [0, 1, 100, INLINE_BYTES, INLINE_BYTES + 1, 10 * INLINE_BYTES]


def test_a_pickle_buffer_arrives_as_bytes_that_can_be_sent_on() -> None:
    for kind in (bytes, bytearray):
        for size in SIZES:
            value = kind(b"a" * size)
            buffer = there(pickle.PickleBuffer(value))
            assert type(buffer) is (kind if size <= INLINE_BYTES else memoryview)
            again = there(buffer)
            assert type(again) is type(buffer)
            for copy in (buffer, again):
                assert copy == value
                view = memoryview(copy)
                assert (view.format, view.readonly) == ("B", kind is bytes)
                if size and kind is bytearray:
                    copy[0] = 0
                    assert view[0] == 0
            assert value == b"a" * size


def test_memoryviews_keep_format_shape_and_access() -> None:
    for form in ("B", "b", "c", "?", "d", "q", "@i"):
        for read_only in (False, True):
            for size in SIZES[1:]:
                value = memoryview(bytearray(8 * size)).cast(form)
                if read_only:
                    value = value.toreadonly()
                view = there(value)
                assert (view.format, view.shape, view.readonly) == (
                    value.format,
                    value.shape,
                    read_only,
                )
                assert view == value


@pytest.mark.system
def test_memoryviews_of_many_dimensions() -> None:
    for rows in (1, INLINE_BYTES):
        table = numpy.arange(6 * rows, dtype=numpy.int32).reshape(rows, 2, 3)
        for value in (table, table[..., ::-1], table.T, table[0, 0, 0]):
            view = there(memoryview(value))
            assert view.shape == value.shape
            assert view.tolist() == value.tolist()


def test_memoryviews_of_other_formats_are_refused() -> None:
    with pytest.raises(SerializationError, match="format"):
        sent(memoryview(numpy.ones(3, dtype=numpy.complex128)))


class Registered:
    """A class whose module registers how to pickle it only when that is needed."""


def test_a_reducer_that_the_program_registers_later_counts() -> None:
    copyreg.pickle(Registered, lambda _: (str, ("reduced",)))
    assert there([Registered()]) == ["reduced"]


class Shape(enum.Enum):
    ROUND = 1


def test_objects_arrive_as_pickle_has_them_each_time() -> None:
    for _ in range(2):
        values = [Point(1, 2), Shape.ROUND, Shape, decimal.Decimal("1.5"), range(3)]
        assert there(values) == values


# -- reducers of upper rooms ---------------------------------------------------------------


class Special:
    pass


class MoreSpecial(Special):
    pass


@pytest.fixture
def reducer() -> list[Any]:
    calls: list[Any] = []

    def reduce(special: Any) -> Any:
        encoder = pickling.encoder()
        number = len(calls)
        calls.append(("reduced", encoder.destination))
        encoder.extension(77).append(number)
        encoder.undo(lambda: calls.append(("undone", number)))
        return list, ((number,),)

    pickling.register_reducer(Special, reduce)
    return calls


def test_a_reducer_sees_the_message(reducer: list[Any]) -> None:
    message = sent([Special(), Special()], destination=5)
    assert reducer == [("reduced", 5), ("reduced", 5)]
    assert list(message.extensions) == [(77, b"\x00\x01")]
    assert Decoder(None, arrived(message)).unpack() == [[0], [1]]


def test_a_reducer_is_for_messages_only(reducer: list[Any]) -> None:
    pickle.dumps(Special())
    assert reducer == []
    sent(MoreSpecial())
    assert reducer == []


def test_the_actions_of_reducers_are_undone_if_packing_fails(reducer: list[Any]) -> None:
    with pytest.raises(SerializationError):
        sent([Special(), threading.Lock()])
    undone = [call[1] for call in reducer if call[0] == "undone"]
    reduced = sum(call[0] == "reduced" for call in reducer)
    assert reduced >= 1
    assert sorted(set(undone)) == sorted(
        n for n, call in enumerate(reducer) if call[0] == "reduced"
    )
    assert len(undone) == reduced


def test_messages_can_be_packed_while_packing() -> None:
    class Nested:
        def __reduce__(self) -> Any:
            inner = sent(torch.ones(2))
            return bytes, (inner.body,)

    values = [torch.zeros(1), Nested(), torch.full((2,), 7.0)]
    first, _, last = there(values)
    assert first.tolist() == [0]
    assert last.tolist() == [7, 7]
