"""If one part of a worker fails, the others go on."""

from __future__ import annotations

import struct
import threading

import pytest

import zrpc
from tests.support.gates import Gate
from tests.support.waiting import SOON, until
from zrpc.agent.service import Service
from zrpc.errors import ProtocolError
from zrpc.testing import Mesh
from zrpc.transport.chunks import remnant
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message


@pytest.mark.zrpc(workers=3)
def test_what_one_service_makes_of_a_tick_or_a_loss_keeps_nothing_else_from_it(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    agent, ticked, lost, told = mesh.agent(1), *(threading.Event() for _ in range(3))

    class Fails(Service):
        def tick(self) -> None:
            raise KeyError("on purpose")

        def on_member_lost(self, member: MemberId) -> None:
            raise KeyError(member)

    class GoesOn(Service):
        def tick(self) -> None:
            ticked.set()

        def on_member_lost(self, member: MemberId) -> None:
            lost.set()

    before = len(agent.services)
    agent.services += [Fails(agent), GoesOn(agent)]
    agent.lost.add(lambda _: told.set())
    assert ticked.wait(SOON)
    mesh.agent(2).shutdown(graceful=False)
    assert lost.wait(SOON)
    assert told.wait(SOON)
    assert "a part of a tick failed" in caplog.text
    assert "on purpose" in caplog.text
    del agent.services[before:]


@pytest.mark.zrpc(workers=3)
def test_a_context_of_no_member_is_refused_and_a_loss_is_noticed_afterwards(mesh: Mesh) -> None:
    context = struct.pack("<QQ", 9 << 48, 1)
    agent, told = mesh.agent(1), threading.Event()
    agent.lost.add(lambda _: told.set())
    other = mesh.agent(2)
    with other.as_current(), pytest.raises(ProtocolError, match="expected the id of a member"):
        other.caller.call(
            agent.worker_info, Kind.CALL, (max, (1, 2), {}), 20, extension=(Tag.GRAPH, context)
        )
    other.shutdown(graceful=False)
    assert told.wait(SOON)


@pytest.mark.parametrize("lost", ["call", "answer"])
def test_a_message_that_there_is_no_memory_for_fails_its_own_call_only(
    mesh: Mesh, lost: str
) -> None:
    caller, callee = mesh.agent(0), mesh.agent(1)
    with caller.as_current(), Gate() as gate:
        other = zrpc.rpc_async(1, gate.wait_inside, ("done",))
        call = zrpc.rpc_async(1, gate.wait_inside)
        call_id = max(caller.caller.calls.by_id)
        if lost == "call":
            first = Message(Kind.CALL, call_id).first_frame()
            caller.network.send(1, remnant(first))
        else:
            first = Message(Kind.RESULT, call_id).first_frame()
            callee.network.send(0, remnant(first))
        text = rf"there was no memory for the {lost} that has come .*the function has"
        with pytest.raises(zrpc.RpcError, match=text) as info:
            call.wait()
        assert info.value.executed is (lost == "answer")
        gate.open()
        assert other.wait() == "done"
    until(
        lambda: all(
            one.network.sent([two.worker_info.id]) == two.dispatcher.received[one.worker_info.id]
            for one, two in ((caller, callee), (callee, caller))
        )
    )
