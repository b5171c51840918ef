"""Values whose end can be awaited, and the means to let a mesh come to rest.

The workers that use it are threads of this process, so that what a value notes at its owner
is seen by the test.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import zrpc
from tests.support.identity import event
from tests.support.io_threads import await_io_threads
from tests.support.waiting import SOON, until
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh


def ended(key: str) -> threading.Event:
    """Set once the value of that key has been freed."""
    return event(("ended", key))


class Value:
    """Something at its owner. It can't be copied, so that there is only one of its key."""

    def __init__(self, key: Any) -> None:
        self.key = key
        weakref.finalize(self, ended(key).set)

    def get_key(self) -> Any:
        return self.key

    def wait_for(self, name: str) -> str:
        assert event(name).wait(SOON)
        return self.key

    def make(self, key: str) -> Value:
        return Value(key)

    def __reduce__(self) -> str:
        raise TypeError("a Value stays where it is")


def layers(mesh: Mesh) -> list[RRefService]:
    return [mesh.agent(name).service(RRefService) for name in mesh]


def entries(layer: RRefService) -> int:
    """How many values and forks a worker keeps."""
    with layer.lock:
        return sum(layer.references.sizes()) + len(layer.values)


def rest(mesh: Mesh, rounds: int = 3) -> None:
    """Lets all that has been dropped be told, as far as it goes.

    Messages between two workers stay in order, so an answered call shows that what was sent
    before it has been handled.
    """
    gc.collect()
    for _ in range(rounds):
        await_io_threads(mesh)
        for name in mesh:
            mesh.run(name, _call_all, list(mesh))


def _call_all(names: Iterable[str]) -> None:
    for name in names:
        zrpc.rpc_sync(name, ignore)


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
        until(lambda layer=layer: entries(layer) == 0, f"worker {layer.member} keeps nothing")
        until(layer.idle, f"worker {layer.member} is quiet")


def key_of(rref: Any) -> Any:
    return rref.rpc_sync().get_key()


def has_timed_out(rref: Any) -> bool:
    """Whether the timeout of the call that makes the value is known here."""
    try:
        rref.to_here(timeout=0.01)
    except zrpc.RpcTimeoutError as error:
        return "RRef creation via rpc.remote() timed out" in str(error)
    return False


def ignore(*_args: Any) -> Any:
    return None


def give(rref: Any) -> Any:
    return rref


def make_late(key: str, name: str) -> Value:
    assert event(name).wait(SOON)
    return Value(key)
