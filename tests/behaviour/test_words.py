"""What objects say of themselves, and what they say to a program that uses them as in Ray."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

import zrpc
from tests.support.waiting import until
from zrpc.testing import Mesh


class Table:
    loss = 0.5

    def put(self, row: int) -> int:
        return row


@zrpc.actor
class Counter:
    def add(self, number: int) -> int:
        return number


def own_rrefs(rref: zrpc.RRef[Table]) -> list[str]:
    return [repr(rref), repr(zrpc.RRef(3)), str(zrpc.RRef(3))[:9]]


def numbers() -> Iterator[int]:
    yield from range(3)


def wait_until_cancelled() -> None:
    zrpc.current_call().wait_cancelled(30)


def test_an_rref_says_what_is_where(shared: Mesh) -> None:
    table = zrpc.remote(1, Table)
    assert repr(table) == "RRef(Table on worker1)"
    assert str(table).startswith("UserRRef(RRefId = GloballyUniqueId(created_on=0, ")
    assert repr(zrpc.remote(1, max, args=(1, 2))) == "RRef(value on worker1)"
    assert repr(zrpc.remote(1, Counter)) == "RRef(Counter on worker1)"
    named = zrpc.remote(1, Counter, name="words")
    assert repr(named) == repr(zrpc.get_actor("words")) == "RRef(Counter 'words' on worker1)"
    named.stop()
    tables = zrpc.remote(zrpc.group(["worker1", "worker0"]), Table)
    assert repr(tables) == ("<group of RRefs: RRef(Table on worker1), RRef(Table on worker0)>")
    found = zrpc.rpc_sync(1, own_rrefs, args=(table,))
    assert found == ["RRef(value on worker1)", "RRef(int on worker1)", "OwnerRRef"]


def test_a_future_says_what_it_waits_for_and_how_long(shared: Mesh) -> None:
    future = zrpc.rpc_async(1, wait_until_cancelled)
    text = repr(future)
    assert text.startswith("Future(rpc_async wait_until_cancelled → worker1, pending ")
    assert text.endswith(" s)")
    future.cancel()
    assert repr(future) == "Future(cancelled)"
    done = zrpc.rpc_async(1, max, args=(1, 2))
    until(lambda: repr(done) in ("Future(rpc_async max → worker1, answered)", "Future(done)"))
    done.wait()  # which nobody has read before
    assert repr(done) == "Future(done)"
    failed = zrpc.rpc_async(1, int, args=("a",))
    with pytest.raises(ValueError, match="invalid"):
        failed.wait()
    assert repr(failed) == "Future(failed: ValueError)"
    call = zrpc.remote(1, Table).rpc_async().put(1)
    assert "rpc_async().put → worker1" in repr(call) or repr(call) == "Future(done)"
    call.wait()
    assert repr(zrpc.Future()) == "Future(pending)"


def test_the_future_of_a_group_counts_its_parts(shared: Mesh) -> None:
    future = zrpc.rpc_async(zrpc.group(["worker1", "worker0"]), wait_until_cancelled)
    assert repr(future) == "GroupFuture(2 members of the group, 0 done)"
    future.parts[0].cancel()
    until(lambda: repr(future) == "GroupFuture(2 members of the group, 1 done)")
    future.cancel()


def test_a_stream_says_what_runs_where(shared: Mesh) -> None:
    with zrpc.rpc_stream(1, numbers) as stream:
        assert repr(stream) == "Stream(numbers on worker1)"
    with zrpc.rpc_stream(zrpc.group(["worker1", "worker0"]), numbers) as stream:
        assert repr(stream) == "Stream(numbers on 2 members of the group)"


def test_a_field_that_is_read_by_a_proxy_says_how_to_read_it(shared: Mesh) -> None:
    rref = zrpc.remote(1, Table)
    text = repr(rref.rpc_sync().loss)
    assert text.startswith("<remote method 'loss' of RRef(Table on worker1): call it, as in rref.")
    code = text[text.index("zrpc.rpc_sync(") : text.rindex(">")]
    assert eval(code, {"zrpc": zrpc, "rref": rref}) == 0.5
    put = rref.rpc_sync().put
    assert put.__name__ == "put"
    assert zrpc.rpc_sync(1, put, args=(3,)) == 3  # it can be sent
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        pickle.dumps(put)


def test_calls_as_in_ray_say_what_to_write(shared: Mesh) -> None:
    actor = zrpc.remote(1, Counter)
    with pytest.raises(AttributeError, match=r"rref\.rpc_async\(\)\.add\(\.\.\.\) for a future"):
        actor.add.remote(1)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"call it, as in rref\.rpc_sync\(\)\.add\(\.\.\.\)"):
        actor.rpc_sync().add.remote(1)  # type: ignore[attr-defined]
    assert not hasattr(actor, "__array__")
    assert not hasattr(actor.rpc_sync().add, "__array__")
