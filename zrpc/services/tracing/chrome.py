"""The traces of all workers as one, in the Chrome trace format that Perfetto opens.

Each worker is a process of the trace, and its threads are threads there. What a thread did one
after another is on its row. What overlaps is on rows of its own: the time on the wire, in the
queue, and calls whose answers no thread waits for at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zrpc.calls.function_names import call_title, kind_name, readable
from zrpc.calls.recorder import (
    NO_PARENT,
    CallRecord,
    HandlerRecord,
    MessageRecord,
    Record,
)
from zrpc.services.tracing.clock import Clocks, Offset
from zrpc.services.tracing.worker_trace import WorkerTrace

__all__ = ["chrome_trace"]

Event = dict[str, Any]
# A call's caller and number.
_Key = tuple[int, int]

# A message is an instant. It is shown with this length, so that arrows can begin and end there.
_MESSAGE_MICROSECONDS = 1.0


def chrome_trace(traces: Sequence[WorkerTrace], missing: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the traces of several workers as one, ready for JSON.

    Args:
        traces: the first one's clock is the trace's.
        missing: why the traces of other workers are not there, for the reader.
    """
    records = {trace.member: trace.records() for trace in traces}
    offsets = _align(records, traces[0].member) if traces else {}
    begin = min(
        (
            _first_time(each) - _ahead(offsets, member)
            for member in records
            for each in records[member]
        ),
        default=0.0,
    )
    handlers = {
        (each.caller, each.call_id): (member, each)
        for member in records
        for each in records[member]
        if isinstance(each, HandlerRecord)
    }
    events: list[Event] = []
    for trace in traces:
        row = _Row(trace, begin + _ahead(offsets, trace.member))
        events += row.heading()
        for record in records[trace.member]:
            events += row.events(record)
    rows = {trace.member: _Row(trace, begin + _ahead(offsets, trace.member)) for trace in traces}
    for member in records:
        for each in records[member]:
            if isinstance(each, CallRecord) and (member, each.call_id) in handlers:
                callee, handler = handlers[member, each.call_id]
                events += _between(rows[member], each, rows[callee], handler)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "dropped": {trace.name: trace.dropped for trace in traces},
            "missing": list(missing),
            "clock_offsets": {
                trace.name: offsets[trace.member]._asdict()
                for trace in traces
                if trace.member in offsets
            },
        },
    }


def _align(records: Mapping[int, Sequence[Record]], reference: int) -> dict[int, Offset]:
    """Returns how far the workers' clocks are ahead of one of them."""
    handlers = {
        (each.caller, each.call_id, member): each
        for member in records
        for each in records[member]
        if isinstance(each, HandlerRecord)
    }
    clocks = Clocks()
    for member in records:
        for each in records[member]:
            if isinstance(each, CallRecord) and each.sending:
                handler = handlers.get((member, each.call_id, each.peer))
                if handler is not None:
                    times = each.sending, handler.arrived, handler.finished, each.settled
                    clocks.add(member, each.peer, *times)
    return clocks.offsets(reference)


def _ahead(offsets: Mapping[int, Offset], member: int) -> float:
    return offsets[member].seconds if member in offsets else 0.0


def _first_time(record: Record) -> float:
    if isinstance(record, CallRecord):
        return record.packing
    if isinstance(record, HandlerRecord):
        return record.arrived
    return record.at if isinstance(record, MessageRecord) else record.begun


class _Row:
    """The events of one worker.

    Args:
        begin: the time on this worker's clock that is the trace's 0.
    """

    def __init__(self, trace: WorkerTrace, begin: float) -> None:
        self._trace = trace
        self._begin = begin
        self._threads = {ident: number for number, ident in enumerate(trace.threads, 1)}

    def heading(self) -> Iterator[Event]:
        trace = self._trace
        title = f"{trace.name} (rank {trace.rank}, {trace.host}, pid {trace.pid})"
        yield self._meta("process_name", 0, name=title)
        yield self._meta("process_sort_index", 0, sort_index=trace.rank)
        for ident, name in trace.threads.items():
            yield self._meta("thread_name", self._thread(ident), name=name)

    def _meta(self, what: str, thread: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": self._trace.member, "tid": thread, "args": args}

    def _thread(self, ident: int) -> int:
        return self._threads.setdefault(ident, len(self._threads) + 1)

    def time(self, at: float) -> float:
        """Returns a time of this worker in the trace, in microseconds."""
        return round((at - self._begin) * 1e6, 3)

    def name(self, member: int) -> str:
        return self._trace.names.get(member, f"worker {member}")

    def slice(self, name: str, thread: int, begin: float, end: float, **args: Any) -> Event:
        """Returns what a thread did for some time."""
        ts = self.time(begin)
        duration = max(0.0, round(self.time(end) - ts, 3))
        place = {"pid": self._trace.member, "tid": self._thread(thread)}
        return {
            "ph": "X",
            "cat": "zrpc",
            "name": name,
            "ts": ts,
            "dur": duration,
            **place,
            "args": args,
        }

    def long(
        self, category: str, name: str, key: object, begin: float, end: float, **args: Any
    ) -> list[Event]:
        """Returns what takes some time and may overlap with others of its kind."""
        place = {"pid": self._trace.member, "tid": 0, "cat": category, "name": name, "id": str(key)}
        ts = self.time(begin)
        return [
            {"ph": "b", "ts": ts, **place, "args": args},
            {"ph": "e", "ts": max(ts, self.time(end)), **place, "args": {}},
        ]

    def arrow(self, begins: bool, key: str, thread: int, at: float) -> Event:
        """Returns an end of an arrow."""
        place = {"pid": self._trace.member, "tid": self._thread(thread), "ts": self.time(at)}
        end = {"ph": "s"} if begins else {"ph": "f", "bp": "e"}
        return {**end, "cat": "call", "name": "call", "id": key, **place}

    def events(self, record: Record) -> Iterator[Event]:
        """Yields what a record shows of this worker alone."""
        if isinstance(record, CallRecord):
            yield from self._call(record)
        elif isinstance(record, HandlerRecord):
            yield from self._handler(record)
        elif isinstance(record, MessageRecord):
            yield from self._message(record)
        elif record.task:
            yield from self.long("task", record.name, record.task, record.begun, record.ended)
        else:
            yield self.slice(record.name, record.thread, record.begun, record.ended)

    def _call(self, call: CallRecord) -> Iterator[Event]:
        ends = self._trace.name, self.name(call.peer)
        name = call_title(call.kind, call.what, call.waits, *ends)
        key = f"{self._trace.member}.{call.call_id}"
        args = {
            "call": key,
            "parent": None if tuple(call.parent) == NO_PARENT else "{}.{}".format(*call.parent),
            "failed": call.failed,
            "bytes": call.sent_bytes,
            "shared_memory": call.sent_shared,
            "answer_bytes": call.answer_bytes,
            "answer_shared_memory": call.answer_shared,
        }
        sending = call.sending or call.settled  # it may never have been sent
        left = min(call.left, call.settled)
        thread = call.thread
        yield self.slice(name, thread, call.packing, call.done if call.waits else left, **args)
        yield self.slice("pack", thread, call.packing, call.packed)
        yield self.slice("wait for room", thread, call.packed, sending)
        yield self.slice("send", thread, sending, left)
        if call.waits:
            yield self.slice("wait", thread, left, call.settled)
            yield self.slice("take the answer", thread, call.settled, call.done)
        else:
            yield from self.long("call", name, key, left, call.settled, **args)

    def _handler(self, handler: HandlerRecord) -> Iterator[Event]:
        name = readable(handler.what) or kind_name(handler.kind)
        about, _, send = handler.about.partition(" #")
        if about:
            name = f"{name} ({about})"
        key = f"{handler.caller}.{handler.call_id}"
        args = {"call": key, "caller": self.name(handler.caller), "failed": handler.failed}
        if send:
            args["gradients"] = True
        yield from self.long("queue", "in the queue", key, handler.arrived, handler.started)
        if handler.here:
            yield self.slice(name, handler.thread, handler.started, handler.finished, **args)
        else:
            begun = handler.started + _MESSAGE_MICROSECONDS / 1e6
            yield self.slice(f"begin {name}", handler.thread, handler.started, begun, call=key)
            yield from self.long("handler", name, key, handler.started, handler.finished, **args)

    def _message(self, message: MessageRecord) -> Iterator[Event]:
        kind, peer = kind_name(message.kind), self.name(message.peer)
        about, _, send = message.about.partition(" #")
        name = f"{kind} ({about})" if about else kind
        end = message.at + _MESSAGE_MICROSECONDS / 1e6
        direction = {"to": peer} if message.out else {"from": peer}
        args = {**direction, "bytes": message.size}
        yield self.slice(name, message.thread, message.at, end, **args)
        if send:
            ends = (self._trace.member, message.peer)
            pair = ends if message.out else ends[::-1]
            key = "{}>{} {} {}".format(*pair, kind, message.about)
            yield self.arrow(message.out, key, message.thread, message.at)


def _between(
    caller: _Row, call: CallRecord, callee: _Row, handler: HandlerRecord
) -> Iterator[Event]:
    """Yields what is known of a call from both ends: the arrow, and the time on the wire."""
    if not call.sending:
        return
    key = f"{handler.caller}.{handler.call_id}"
    yield caller.arrow(True, key, call.thread, call.sending)
    yield callee.arrow(False, key, handler.thread, handler.started)
    arrived = callee.time(handler.arrived)
    # The thread that sends may come to note that the message has left only after it has arrived.
    left = call.left if caller.time(call.left) <= arrived else call.sending
    yield from _wire("on the wire", key, caller, left, callee, handler.arrived)
    yield from _wire("answer", key, callee, handler.finished, caller, call.settled)


def _wire(
    name: str, key: str, sender: _Row, left: float, receiver: _Row, arrived: float
) -> Iterator[Event]:
    begin, end = receiver.long("wire", name, key, arrived, arrived)
    begin["ts"] = min(sender.time(left), end["ts"])
    yield from (begin, end)
