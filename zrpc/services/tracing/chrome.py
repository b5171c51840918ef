"""The traces of all workers as one, in the Chrome trace format that Perfetto opens.

Each worker is a process of the trace, and its threads are threads there. What a thread did one
after another is on its row. What overlaps is on rows of its own: the time on the wire, in the
queue, and calls whose answers no thread waits for at once.

Perfetto is stricter than the format: it takes a process or thread with the number 0 for an idle
one, and the thread with its process's number for the main thread. Arrows need a number, not a
text, as their id, and the id of what overlaps must be local to its process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from zrpc.calls.function_names import call_title, kind_name, readable
from zrpc.calls.recorder import NO_PARENT, CallRecord, HandlerRecord, MessageRecord, Record
from zrpc.services.tracing.clock import Clocks, Offset
from zrpc.services.tracing.worker_trace import WorkerTrace

Event = dict[str, Any]

# A message is an instant. It is shown with this length, so that arrows can begin and end there. No
# thread does two things within it: what overlaps in part on a row is not shown.
_MESSAGE_SECONDS = 1e-7


def chrome_trace(traces: Sequence[WorkerTrace], missing: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the traces of several workers as one, ready for JSON.

    Args:
        traces: the first one's clock is the trace's.
        missing: which traces are not there, or not whole, and why; for the reader.
    """
    handlers = {
        (each.caller, each.call_id, trace.member): each
        for trace in traces
        for each in trace.records
        if isinstance(each, HandlerRecord)
    }
    pairs = [
        (trace.member, each, handlers[trace.member, each.call_id, each.peer])
        for trace in traces
        for each in trace.records
        if isinstance(each, CallRecord) and each.sending
        if (trace.member, each.call_id, each.peer) in handlers
    ]
    clocks = Clocks()
    for member, call, handler in pairs:
        clocks.add(member, call.peer, call.sending, handler.begun, handler.finished, call.settled)
    offsets = clocks.offsets(traces[0].member) if traces else {}
    ahead = {each.member: offsets.get(each.member, Offset(0.0, 0.0)).seconds for each in traces}
    begin = min(
        (each.begun - ahead[trace.member] for trace in traces for each in trace.records),
        default=0.0,
    )
    # Numbers of threads that are no process's, and of arrows, by what they are about.
    threads, arrows = count(len(traces) + 1), defaultdict[str, int](count(1).__next__)
    workers = {
        each.member: _Worker(each, process, begin + ahead[each.member], threads, arrows)
        for process, each in enumerate(traces, 1)
    }
    events: list[Event] = []
    for worker in workers.values():
        events += worker.heading()
        for record in worker.trace.records:
            events += worker.events(record)
    for member, call, handler in pairs:
        events += _between(workers[member], call, workers[call.peer], handler)
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


class _Worker:
    """The events of one worker.

    Args:
        trace: what it has recorded.
        process: its number in the trace; that of its main thread is the same.
        begin: the time on this worker's clock that is the trace's 0.
        threads: numbers for its other threads.
        arrows: the number of each arrow, by what it is about.
    """

    def __init__(
        self,
        trace: WorkerTrace,
        process: int,
        begin: float,
        threads: Iterator[int],
        arrows: defaultdict[str, int],
    ) -> None:
        self.trace = trace
        self._process = process
        self._begin = begin
        self._threads = defaultdict[int, int](
            threads.__next__, dict.fromkeys(list(trace.threads)[:1], process)
        )
        self._arrows = arrows

    def heading(self) -> Iterator[Event]:
        trace = self.trace
        title = f"{trace.name} (rank {trace.rank}, {trace.host}, pid {trace.pid})"
        names = {"process_name": {"name": title}, "process_sort_index": {"sort_index": trace.rank}}
        for name, args in names.items():
            yield {"ph": "M", "name": name, **self._place(), "args": args}
        for ident, name in trace.threads.items():
            yield {"ph": "M", "name": "thread_name", **self._place(ident), "args": {"name": name}}

    def _place(self, thread: int | None = None) -> Event:
        number = self._process if thread is None else self._threads[thread]
        return {"pid": self._process, "tid": number}

    def time(self, at: float) -> float:
        """Returns a time of this worker in the trace, in microseconds."""
        return round((at - self._begin) * 1e6, 3)

    def name(self, member: int) -> str:
        return self.trace.names.get(member, f"worker {member}")

    def slice(self, name: str, thread: int, begin: float, end: float, **args: Any) -> Event:
        """Returns what a thread did for some time."""
        ts = self.time(begin)
        dur = max(0.0, round(self.time(end) - ts, 3))
        times = {"ts": ts, "dur": dur}
        return {
            "ph": "X",
            "cat": "zrpc",
            "name": name,
            **times,
            **self._place(thread),
            "args": args,
        }

    def long(
        self, name: str, key: object, begin: float, end: float, kind: str = "", **args: Any
    ) -> list[Event]:
        """Returns what takes some time and may overlap with others of its kind."""
        event = {"cat": kind or name, "name": name, "id2": {"local": str(key)}, **self._place()}
        ts = self.time(begin)
        return [
            {"ph": "b", "ts": ts, **event, "args": args},
            {"ph": "e", "ts": max(ts, self.time(end)), **event},
        ]

    def arrow(self, begins: bool, about: str, thread: int, at: float) -> Event:
        """Returns an end of an arrow."""
        end = {"ph": "s"} if begins else {"ph": "f", "bp": "e"}
        number = {"cat": "call", "name": "call", "id": self._arrows[about]}
        return {**end, **number, **self._place(thread), "ts": self.time(at)}

    def events(self, record: Record) -> Iterator[Event]:
        """Yields what a record shows of this worker alone."""
        if isinstance(record, CallRecord):
            yield from self._call(record)
        elif isinstance(record, HandlerRecord):
            yield from self._handler(record)
        elif isinstance(record, MessageRecord):
            yield from self._message(record)
        elif record.task:
            yield from self.long(record.name, record.task, record.begun, record.ended, "task")
        else:
            yield self.slice(record.name, record.thread, record.begun, record.ended)

    def _call(self, call: CallRecord) -> Iterator[Event]:
        name = call_title(call.kind, call.what, call.waits, self.trace.name, self.name(call.peer))
        key = f"{self.trace.member}.{call.call_id}"
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
        yield self.slice(name, thread, call.begun, call.done if call.waits else left, **args)
        yield self.slice("pack", thread, call.begun, call.packed)
        yield self.slice("wait for room", thread, call.packed, sending)
        yield self.slice("send", thread, sending, left)
        if call.waits:
            yield self.slice("wait", thread, left, call.settled)
            yield self.slice("take the answer", thread, call.settled, call.done)
        else:
            yield from self.long(name, key, left, call.settled, "call", **args)

    def _handler(self, handler: HandlerRecord) -> Iterator[Event]:
        name, send = _about(readable(handler.what) or kind_name(handler.kind), handler.about)
        key = f"{handler.caller}.{handler.call_id}"
        args = {"call": key, "caller": self.name(handler.caller), "failed": handler.failed}
        if send:
            args["gradients"] = True
        yield from self.long("in the queue", key, handler.begun, handler.started)
        if handler.here:
            yield self.slice(name, handler.thread, handler.started, handler.finished, **args)
        else:
            begun = handler.started + _MESSAGE_SECONDS
            yield self.slice(f"begin {name}", handler.thread, handler.started, begun, call=key)
            yield from self.long(name, key, handler.started, handler.finished, "handler", **args)

    def _message(self, message: MessageRecord) -> Iterator[Event]:
        peer = self.name(message.peer)
        name, send = _about(kind_name(message.kind), message.about)
        args = {"to" if message.out else "from": peer, "bytes": message.size}
        end = message.begun + _MESSAGE_SECONDS
        yield self.slice(name, message.thread, message.begun, end, **args)
        if send:
            ends = (self.trace.member, message.peer)
            key = "{}>{} {} {}".format(*(ends if message.out else ends[::-1]), name, send)
            yield self.arrow(message.out, key, message.thread, message.begun)


def _about(name: str, about: str) -> tuple[str, str]:
    """Returns the name of a message with its pass, and which message of the pass it is."""
    its_pass, _, send = about.partition(" #")
    return f"{name} ({its_pass})" if its_pass else name, send


def _between(
    caller: _Worker, call: CallRecord, callee: _Worker, handler: HandlerRecord
) -> Iterator[Event]:
    """Yields what is known of a call from both ends: the arrow, and the time on the wire."""
    key = f"{handler.caller}.{handler.call_id}"
    # Not at the end of the slice before, or it would begin there.
    yield caller.arrow(True, key, call.thread, call.sending + 1e-9)
    yield callee.arrow(False, key, handler.thread, handler.started)
    # The thread that sends may come to note that the message has left only after it has arrived.
    arrived = callee.time(handler.begun)
    left = call.left if caller.time(call.left) <= arrived else call.sending
    # The rows of the receivers show these; the times of departure are the senders'.
    for name, receiver, until, sent in (
        ("on the wire", callee, handler.begun, caller.time(left)),
        ("answer", caller, call.settled, callee.time(handler.finished)),
    ):
        begin, end = receiver.long(name, key, until, until)
        yield {**begin, "ts": min(sent, end["ts"])}
        yield end
