"""Calls and handlers as spans of OpenTelemetry."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.observed import busy, calls_to, stats_of
from tests.support.waiting import until
from zrpc.calls.open_telemetry import HandlerSpan, configured
from zrpc.errors import ProtocolError
from zrpc.functions import async_execution
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3)
CLIENT, SERVER = SpanKind.CLIENT, SpanKind.SERVER


class Spans:
    """The spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def find(self, name: str, kind: SpanKind) -> list[ReadableSpan]:
        ended = self.exporter.get_finished_spans()
        return [each for each in ended if (each.name, each.kind) == (name, kind)]

    def one(self, name: str, kind: SpanKind) -> Any:
        """The only span with this name, once it has ended: a call may return before that."""
        until(lambda: self.find(name, kind), f"a span {name} of {kind}")
        (found,) = self.find(name, kind)
        return found


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Sets a tracer provider for this test. The API lets a process set one only once."""
    spans = Spans()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", spans.provider)
    yield spans
    spans.provider.shutdown()


def is_child(child: Any, parent: Any) -> bool:
    return (child.parent.span_id, child.context.trace_id) == (
        parent.context.span_id,
        parent.context.trace_id,
    )


def leaf() -> int:
    return 7


def relay() -> int:
    return rpc.rpc_sync("worker2", leaf)


async def relay_async() -> int:
    await asyncio.sleep(0)
    return await rpc.rpc_async("worker2", leaf)


@async_execution
def relay_future() -> Any:
    return rpc.rpc_async("worker2", leaf)


def fail() -> None:
    raise KeyError("on purpose")


async def fail_async() -> None:
    await asyncio.sleep(0)
    raise KeyError("on purpose")


@pytest.mark.parametrize("function", [relay, relay_async, relay_future])
def test_a_nested_call_is_a_child_of_the_handler(mesh: Mesh, spans: Spans, function: Any) -> None:
    def program() -> Any:
        with spans.provider.get_tracer("test").start_as_current_span("step"):
            return rpc.rpc_sync("worker1", function)

    assert mesh.run(0, program) == 7
    name = function.__name__
    chain = [
        spans.one("step", SpanKind.INTERNAL),
        spans.one(name, CLIENT),
        spans.one(name, SERVER),
        spans.one("leaf", CLIENT),
        spans.one("leaf", SERVER),
    ]
    for parent, child in itertools.pairwise(chain):
        assert is_child(child, parent), (child.name, child.kind)
        assert child.status.status_code is StatusCode.UNSET
    assert dict(chain[1].attributes) == {
        "rpc.system": "zrpc",
        "rpc.method": name,
        "server.address": "worker1",
    }
    assert dict(chain[4].attributes) == {
        "rpc.system": "zrpc",
        "rpc.method": "leaf",
        "server.address": "worker2",
        "client.address": "worker1",
    }
    # The handler's span lasts until its outcome, not only until it has returned a future.
    assert chain[2].end_time >= chain[4].end_time


def test_handlers_leave_no_context_behind(mesh: Mesh, spans: Spans) -> None:
    for _ in range(2):
        mesh.run(0, rpc.rpc_sync, "worker1", relay)
    until(lambda: len(spans.find("relay", CLIENT)) == 2)
    assert [each.parent for each in spans.find("relay", CLIENT)] == [None, None]
    assert len({each.context.trace_id for each in spans.find("leaf", SERVER)}) == 2


def test_an_error_is_the_status_of_both_spans(mesh: Mesh, spans: Spans) -> None:
    for function in (fail, fail_async):
        with pytest.raises(KeyError):
            mesh.run(0, rpc.rpc_sync, "worker1", function)
        for kind in (CLIENT, SERVER):
            span = spans.one(function.__name__, kind)
            assert span.status.status_code is StatusCode.ERROR
            assert span.status.description == "KeyError('on purpose')"
            assert span.attributes["error.type"] == "KeyError"
        (event,) = spans.one(function.__name__, SERVER).events
        assert event.name == "exception"
    with Gate() as gate, pytest.raises(rpc.RpcTimeoutError):
        mesh.run(0, rpc.rpc_sync, "worker1", gate.wait_inside, timeout=0.1)
    span = spans.one("Gate.wait_inside", CLIENT)
    assert span.attributes["error.type"] == "RpcTimeoutError"
    assert span.status.status_code is StatusCode.ERROR


def test_asynchronous_calls_and_those_to_rrefs_have_spans(mesh: Mesh, spans: Spans) -> None:
    def program() -> None:
        assert rpc.rpc_async("worker1", max, args=(1, 2)).wait() == 2
        rref = rpc.remote("worker1", leaf)
        assert rref.to_here() == 7
        assert rref.rpc_sync().bit_length() == 3
        with pytest.raises(KeyError):
            rpc.remote("worker1", fail).to_here()

    mesh.run(0, program)
    for name in ("max", "leaf", "bit_length"):
        assert is_child(spans.one(name, SERVER), spans.one(name, CLIENT))
    assert spans.one("fail", SERVER).attributes["error.type"] == "KeyError"


def test_the_end_of_a_span_may_take_long(mesh: Mesh, spans: Spans) -> None:
    proceed = threading.Event()

    class Slow(SimpleSpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            if span.kind is CLIENT:
                assert proceed.wait(20)
            super().on_end(span)

    exporter = InMemorySpanExporter()
    spans.provider.add_span_processor(Slow(exporter))
    try:
        for _ in range(3):
            assert mesh.run(0, rpc.rpc_sync, "worker1", leaf) == 7
        assert not [each for each in exporter.get_finished_spans() if each.kind is CLIENT]
    finally:
        proceed.set()


class Broken(SpanProcessor):
    """Fails at the start or the end of server spans, as the test says."""

    where = "start"

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._fail("start", span)

    def on_end(self, span: Any) -> None:
        self._fail("end", span)

    def _fail(self, where: str, span: Any) -> None:
        if where == self.where and span.kind is SERVER:
            raise ValueError(f"broken at the {where}")


def test_a_span_processor_that_fails_fails_its_call_at_the_start_and_loses_no_answer_at_the_end(
    mesh: Mesh, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    spans.provider.add_span_processor(broken)
    with pytest.raises(ValueError, match="broken at the start"):
        mesh.run(0, rpc.rpc_sync, "worker1", leaf)
    broken.where = "end"
    with pytest.raises(KeyError):
        mesh.run(0, rpc.rpc_sync, "worker1", fail)
    assert mesh.run(0, rpc.rpc_sync, "worker1", leaf) == 7
    until(lambda: caplog.text.count("can't be ended") == 2)


def test_a_context_that_cannot_be_read_is_refused() -> None:
    for extension in (b"", b"{", b"[1, 2]", b'["leaf"]', b"\xff"):
        with pytest.raises(ProtocolError, match="expected a name and a trace context"):
            HandlerSpan(extension)


def sent_by_relay(mesh: Mesh) -> list[int]:
    """How many bytes each of two workers sends to the next one for a call through both."""

    def sent() -> list[int]:
        return [calls_to(mesh, rank + 1, rank).bytes_sent for rank in (0, 1)]

    mesh.run(0, rpc.rpc_sync, "worker1", relay)  # now all names are known
    before = sent()
    assert mesh.run(0, rpc.rpc_sync, "worker1", relay) == 7
    return [now - then for now, then in zip(sent(), before, strict=True)]


def test_a_context_is_sent_with_each_request_if_there_is_a_tracer_provider(
    mesh: Mesh, request: pytest.FixtureRequest
) -> None:
    assert not configured()
    without = sent_by_relay(mesh)
    request.getfixturevalue("spans")
    assert configured()
    assert all(more > less + 50 for less, more in zip(without, sent_by_relay(mesh), strict=True))


@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 1})
def test_a_call_that_is_cancelled_in_the_queue_logs_no_error(
    mesh: Mesh, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    with Gate() as gate, mesh.agent(0).as_current():
        first = rpc.rpc_async("worker1", gate.work_inside)
        gate.await_entry()
        second = rpc.rpc_async("worker1", leaf)
        until(lambda: stats_of(mesh, 1).threads.queued)
        second.cancel()
        gate.open()
        first.wait()
    until(lambda: not busy(mesh) and not stats_of(mesh, 1).threads.running)
    assert "failed" not in caplog.text
