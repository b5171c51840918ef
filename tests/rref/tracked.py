"""Values whose end can be awaited, and the means to let a mesh come to rest.

The workers that use it are threads of this process, so that what a value notes at its owner
is seen by the test.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable

import zrpc
from zrpc.rref.layer import RRefLayer, layer_of
from zrpc.testing import Mesh

# No wait of these tests is longer, in seconds.
SOON = 10.0

_lock = threading.Lock()
_ended: dict[str, threading.Event] = {}
_gates: dict[str, threading.Event] = {}


def ended(key: str) -> threading.Event:
    """Set once the value of that key has been freed."""
    with _lock:
        return _ended.setdefault(key, threading.Event())


def gate(key: str) -> threading.Event:
    """An event of a name, for functions that are to wait."""
    with _lock:
        return _gates.setdefault(key, threading.Event())


def forget_all() -> None:
    with _lock:
        for event in _gates.values():
            event.set()
        _gates.clear()
        _ended.clear()


class Value:
    """Something at its owner. It can't be copied, so that there is only one of its key."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.number = 0
        weakref.finalize(self, ended(key).set)

    def get_key(self) -> str:
        return self.key

    def add(self, number: int) -> int:
        self.number += number
        return self.number

    def fail(self) -> None:
        raise KeyError(self.key)

    def wait_for(self, name: str) -> str:
        assert gate(name).wait(SOON)
        return self.key

    def make(self, key: str) -> Value:
        return Value(key)

    def me(self) -> zrpc.RRef[Value]:
        return zrpc.RRef(self)

    def __reduce__(self) -> str:
        raise TypeError("a Value stays where it is")


def until(condition: Callable[[], object], what: str = "") -> None:
    """Waits for something that no event tells."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, f"still not true: {what or condition}"
        time.sleep(0.002)


def layers(mesh: Mesh) -> list[RRefLayer]:
    return [layer_of(mesh.agent(name)) for name in mesh]


def entries(layer: RRefLayer) -> int:
    """How many values and forks a worker keeps."""
    with layer._lock:
        return len(layer._references) + len(layer._values)


def nothing() -> None: ...


def rest(mesh: Mesh, rounds: int = 3) -> None:
    """Lets all that has been dropped be told, as far as it goes.

    Messages between two workers stay in order, so an answered call shows that what was sent
    before it has been handled.
    """
    gc.collect()
    for _ in range(rounds):
        for name in mesh:
            told = threading.Event()
            mesh.agent(name).in_io_thread(told.set)
            assert told.wait(SOON)
        for name in mesh:
            mesh.run(name, _call_all, list(mesh))


def _call_all(names: Iterable[str]) -> None:
    for name in names:
        zrpc.rpc_sync(name, nothing)


def is_freed(key: str) -> bool:
    """Waits for the value's end."""
    gc.collect()
    return ended(key).wait(SOON)


def assert_kept(mesh: Mesh, key: str) -> None:
    """Whatever there is to be told has been told, and the value is still there."""
    rest(mesh)
    assert not ended(key).is_set(), f"{key} was freed while it was referred to"


def assert_empty(mesh: Mesh) -> None:
    """No worker keeps anything of any RRef."""
    gc.collect()
    for layer in layers(mesh):
        until(lambda layer=layer: entries(layer) == 0, f"worker {layer.rank} keeps nothing")
        until(layer.quiet, f"worker {layer.rank} is quiet")
