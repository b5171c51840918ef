"""What objects and errors say: what they are, whose call it was, and what can be done."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from functools import partial
from typing import Any

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.settled import caught
from tests.support.targets import Unreadable, echo
from tests.support.threads import start_all
from tests.support.waiting import SOON, until
from tests.support.ways import WAYS
from zrpc.testing import Mesh


class Table:
    loss = 0.5

    def put(self, row: int) -> int:
        return row


@rpc.actor
class Counter:
    def add(self, number: int) -> int:
        return number


def own_rrefs(rref: rpc.RRef[Table]) -> list[str]:
    return [repr(rref), repr(rpc.RRef(3)), str(rpc.RRef(3))[:9]]


def wait_until_cancelled() -> None:
    rpc.current_call().wait_cancelled(30)


def test_an_rref_says_what_is_where(shared: Mesh) -> None:
    table = rpc.remote(1, Table)
    assert repr(table) == "RRef(Table on worker1)"
    assert str(table).startswith("UserRRef(RRefId = GloballyUniqueId(created_on=0, ")
    assert repr(rpc.remote(1, max, args=(1, 2))) == "RRef(value on worker1)"
    assert repr(rpc.remote(1, Counter)) == "RRef(Counter on worker1)"
    named = rpc.remote(1, Counter, name="words")
    assert repr(named) == repr(rpc.get_actor("words")) == "RRef(Counter 'words' on worker1)"
    named.stop()
    found = rpc.rpc_sync(1, own_rrefs, args=(table,))
    assert found == ["RRef(value on worker1)", "RRef(int on worker1)", "OwnerRRef"]


def test_a_future_says_what_it_waits_for_and_how_long(shared: Mesh) -> None:
    future = rpc.rpc_async(1, wait_until_cancelled)
    text = repr(future)
    assert text.startswith("Future(rpc_async wait_until_cancelled → worker1, pending ")
    assert text.endswith(" s)")
    future.cancel()
    assert repr(future) == "Future(cancelled)"
    done = rpc.rpc_async(1, max, args=(1, 2))
    until(lambda: repr(done) in ("Future(rpc_async max → worker1, answered)", "Future(done)"))
    done.wait()  # which nobody has read before
    assert repr(done) == "Future(done)"
    failed = rpc.rpc_async(1, int, args=("a",))
    until(failed.done)
    assert caught(failed) is ValueError
    assert repr(failed) == "Future(failed: ValueError)"
    assert repr(rpc.Future()) == "Future(pending)"


def test_a_field_that_is_read_by_a_proxy_says_how_to_read_it(shared: Mesh) -> None:
    rref = rpc.remote(1, Table)
    text = repr(rref.rpc_sync().loss)
    assert text.startswith("<remote method 'loss' of RRef(Table on worker1): call it, as in rref.")
    code = text[text.index("zrpc.rpc_sync(") : text.rindex(">")]
    assert eval(code, {"zrpc": rpc, "rref": rref}) == 0.5
    put = rref.rpc_sync().put
    assert put.__name__ == "put"
    assert rpc.rpc_sync(1, put, args=(3,)) == 3  # it can be sent
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        pickle.dumps(put)


def test_calls_as_in_ray_say_what_to_write(shared: Mesh) -> None:
    actor = rpc.remote(1, Counter)
    with pytest.raises(AttributeError, match=r"rref\.rpc_async\(\)\.add\(\.\.\.\) for a future"):
        actor.add.remote(1)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"call it, as in rref\.rpc_sync\(\)\.add\(\.\.\.\)"):
        actor.rpc_sync().add.remote(1)  # type: ignore[attr-defined]
    assert not hasattr(actor, "__array__")
    assert not hasattr(actor.rpc_sync().add, "__array__")


# Room for one call; each counts two KiB.
ONE_CALL = {"max_bytes_in_flight": 1}


def text_of(gate: Gate, **how: Any) -> str:
    with pytest.raises(rpc.RpcTimeoutError) as info:
        rpc.rpc_sync("worker1", gate.wait_inside, **how)
    return str(info.value)


# -- time-outs ---------------------------------------------------------------------------------


@pytest.mark.system
def test_a_timeout_names_function_and_worker_and_its_origin(caller: Mesh, gate: Gate) -> None:
    assert text_of(gate, timeout=0.1) == (
        "RPC ran for more than set timeout (100 ms) and will now be marked with an error: "
        "Gate.wait_inside on worker1 (rank 1). This is the timeout of the call itself"
    )
    rpc.set_rpc_timeout(0.1)
    assert "This is the default, the option rpc_timeout: pass a longer" in text_of(gate)
    rref = rpc.remote("worker1", gate.wait_inside, timeout=0)
    for call, text in (
        (rpc.rpc_async("worker1", gate.wait_inside).wait, "the option rpc_timeout"),
        (partial(rref.to_here, timeout=0.05), r"to_here on worker1 \(rank 1\)"),
        (partial(rpc.all_gather, 1, timeout=0.02), r"error: all_gather on worker0 \(rank 0\)"),
    ):
        with pytest.raises(rpc.RpcTimeoutError, match=text):
            call()


def calls_on(gate: Gate) -> str:
    try:
        rpc.rpc_sync("worker0", gate.wait_inside)
    except rpc.RpcTimeoutError as error:
        TOLD.append(str(error))
        raise
    return ""


TOLD: list[str] = []


@pytest.mark.system
def test_a_timeout_says_that_it_was_inherited(shared: Mesh) -> None:
    TOLD.clear()
    with Gate() as gate:
        # Not by a call: if its end were known sooner, the inner call would be cancelled.
        rref = rpc.remote("worker1", calls_on, (gate,), timeout=0.2)
        until(lambda: TOLD, "the inner call times out too")
        del rref
    assert "Gate.wait_inside on worker0 (rank 0)" in TOLD[0]
    assert "what was left of the time for the call being handled, calls_on from worker0" in TOLD[0]


# -- whether the function has run ----------------------------------------------------------------


def error_of(call: Any, *args: Any, **kwargs: Any) -> rpc.RpcError:
    with pytest.raises(rpc.RpcError) as info:
        call(*args, **kwargs)
    return info.value


def outcome_of(call: Any, *args: Any, **kwargs: Any) -> tuple[type[rpc.RpcError], bool | None]:
    """Returns the class of a call's error, and whether it says that the function has run."""
    error = error_of(call, *args, **kwargs)
    return type(error), error.executed


def test_a_call_that_ended_on_its_way_may_have_run(shared: Mesh, gate: Gate) -> None:
    cancelled = rpc.rpc_async(1, gate.wait_inside)
    gate.await_entry()
    cancelled.cancel()
    late = rpc.rpc_async(1, gate.wait_inside, timeout=0.05)
    for future in (late, cancelled):
        assert error_of(future.wait).executed is None
    assert error_of(rpc.rpc_sync, 1, gate.wait_inside, timeout=0.05).executed is None
    assert rpc.RpcError("anything").executed is None


@pytest.mark.zrpc(workers=2, options=ONE_CALL)
def test_a_call_that_was_never_sent_has_not_run(caller: Mesh, gate: Gate) -> None:
    first = rpc.rpc_async(1, gate.wait_inside, timeout=0)
    gate.await_entry()
    error = outcome_of(rpc.rpc_sync, 1, gate.wait_inside, timeout=0.05)
    assert error == (rpc.RpcTimeoutError, False)
    asyncio.run(send_none(gate))
    gate.open()
    first.wait()
    assert not gate.entered.acquire(blocking=False)


async def send_none(gate: Gate) -> None:
    """In an event loop no call waits for room before it returns its future."""
    times_out = rpc.rpc_async(1, gate.wait_inside, timeout=0.05)
    cancelled = rpc.rpc_async(1, gate.wait_inside)
    cancelled.cancel()
    with pytest.raises(rpc.RpcTimeoutError):
        await times_out
    for _ in range(2):
        assert outcome_of(times_out.wait) == (rpc.RpcTimeoutError, False)
    assert outcome_of(cancelled.wait) == (rpc.RpcCancelledError, False)


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
def test_a_call_to_a_lost_worker_may_have_run_before_and_not_after(
    caller: Mesh, gate: Gate
) -> None:
    rref = rpc.remote("worker2", dict)
    rref.to_here()
    future = rpc.rpc_async("worker2", gate.wait_inside)
    gate.await_entry()
    close = start_all([caller.agent(2).close], SOON)
    assert outcome_of(future.wait) == (rpc.WorkerDied, None)
    assert outcome_of(rpc.rpc_sync, "worker2", echo, (1,)) == (rpc.WorkerDied, False)
    assert outcome_of(rref.rpc_sync().get, 1) == (rpc.OwnerDied, False)
    gate.open()
    close()


def call_what_is_gone() -> None:
    error = rpc.WorkerDied("worker2 is gone")
    error.executed = False
    raise error


def test_what_cannot_be_unpickled_has_not_run_unless_it_is_the_result(shared: Mesh) -> None:
    for call, to in itertools.product(WAYS, (0, 1)):
        error = outcome_of(call, to, echo, (Unreadable(),))
        assert error == (rpc.SerializationError, False)
        # A function has run though a call of its own has not.
        assert error_of(call, to, call_what_is_gone).executed is None
        assert error_of(call, to, call_with_what_is_unreadable).executed is None
        assert outcome_of(call, 1, Unreadable) == (rpc.SerializationError, True)
    rref = rpc.remote("worker1", list)
    assert error_of(rref.rpc_sync().append, Unreadable()).executed is False
    assert rref.to_here() == []


def call_with_what_is_unreadable() -> None:
    rpc.rpc_sync("worker0", echo, (Unreadable(),))


# -- unknown destinations ------------------------------------------------------------------------


def test_a_similar_name_is_suggested(shared: Mesh) -> None:
    with pytest.raises(rpc.RpcError, match=r"'workr1': the workers are .*; did you mean 'worker1'"):
        rpc.rpc_sync("workr1", echo, (1,))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_mesh_of_one_says_how_others_join(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with rpc.session(), pytest.raises(rpc.RpcError, match=r"alone: .*zrpc launch -n 2 SCRIPT"):
        rpc.rpc_sync(1, echo, (1,))
    monkeypatch.delenv("WORLD_SIZE")
    with rpc.session(), pytest.raises(rpc.RpcError, match="others may still join, since no world"):
        rpc.rpc_sync("trainer", echo, (1,))
