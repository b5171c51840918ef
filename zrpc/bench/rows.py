"""The rows of the benchmark."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from zrpc.bench.library import ACTOR_LIBRARIES, EVERY_LIBRARY
from zrpc.bench.row import Group, Limit, Row, Unit

# Rows that all libraries can measure; many calls in flight; streams and queues; zrpc alone.
_of_all = partial(Row, libraries=EVERY_LIBRARY)
# With that many calls in flight, both ends of RPyC wait without limit until the other one reads.
_of_many = partial(Row, libraries=[each for each in EVERY_LIBRARY if each != "rpyc"])
_with_ray = partial(Row, libraries=("zrpc", "ray"))
_own = partial(Row, libraries=("zrpc",))
_KIB = 1024
_MIB = 1024 * 1024
_SIZES = {f"{number} KiB": number * _KIB for number in (4, 64)}
_SIZES |= {f"{number} MiB": number * _MIB for number in (1, 16, 128)}
# From this size on, workers on one host need not send the bytes through a socket.
_MIN_SHARED_BYTES = _MIB
# Enough for a launcher to start 32 processes that import torch on two cores.
_START_DEADLINE_SECONDS = 300.0


def _zmq(size: int = 16, times: int = 1) -> Limit:
    return Limit("ZeroMQ", "baselines:echo", (size, times))


def _copies(size: int, times: int, name: str = "memcpy") -> Limit:
    return Limit(name, "baselines:memcpy", (size, times))


_RATE = Limit("ZeroMQ", "baselines:pipelined")


def _beside_copies(size: int, copies: int, messages: int) -> dict[str, Any]:
    """Returns the limits of a row: copies on one host, and messages over tcp."""
    return {"limit": _copies(size, copies), "tcp_limit": _zmq(size, messages)}


def _tensor_rows() -> Iterator[Row]:
    for name, size in _SIZES.items():
        one_way = Limit("ZeroMQ", "baselines:one_way", (size,))
        for row, copies, raw in (
            (_of_all(f"one way, {name}", "tensors:one_way", (size,)), 1, one_way),
            (_of_all(f"echo, {name}", "tensors:echo", (size,)), 2, _zmq(size)),
        ):
            limit = _copies(size, copies) if size >= _MIN_SHARED_BYTES else raw
            on_device = _copies(size, copies, "device copy")
            yield replace(row, limit=limit, tcp_limit=raw, device_limit=on_device)
    row = _of_all("echo, 100 tensors of 1 KiB", "tensors:echo_many", (100, _KIB))
    on_device = _copies(_KIB, 200, "device copy")
    yield replace(row, limit=_zmq(100 * _KIB), device_limit=on_device)


def _cost_rows() -> Iterator[Row]:
    for name, width in (("a call", 0), ("an autograd step", 16)):
        yield Row(f"processor time of {name}", "costs:processor_time", (width,))
        yield Row(f"context switches of {name}", "costs:context_switches", (width,), Unit.COUNT)
        yield _own(f"messages of {name}", "costs:messages", (width,), Unit.COUNT)


def _skeleton_rows() -> Iterator[Row]:
    """Makes rows with zrpc's workload, and that of the same name of the skeleton as its limit."""
    for row in (
        _own("plain call", "calls:empty"),
        _own("tensor of 2 elements, and back", "tensors:echo", (8,)),
        _own("each of 200 in flight", "calls:in_flight", (200,)),
        _own("1 MiB one way", "tensors:one_way", (_MIB,)),
        _own("16 MiB one way", "tensors:one_way", (16 * _MIB,)),
        _own("step of width 16", "autograd:step", (16,)),
        _own("step of width 512", "autograd:step", (512,)),
    ):
        workload = f"skeleton:{row.workload.partition(':')[2]}"
        limit = Limit("skeleton", workload, row.arguments)
        yield replace(row, name=f"skeleton: {row.name}", limit=limit, default=False)


def _step_rows() -> Iterator[Row]:
    for number, kind in enumerate(("", " of an RRef's method", " of an actor's method")):
        for end in ("caller", "callee"):
            name = f"steps at the {end}{kind}"
            yield _own(name, f"steps:{end}", (number,), Unit.COUNT, default=False)


def _floor(name: str, workload: str, bound: float, *arguments: float) -> Row:
    """Returns a row that compares two operations of zrpc, or one with a copy."""
    return _own(name, f"floors:{workload}", arguments, Unit.COUNT, bound=bound, default=False)


def _autograd_rows() -> Iterator[Row]:
    for width in (16, 512):
        limit = Limit("local+ZeroMQ", "baselines:local_step", (width,))
        yield Row(f"autograd step, width {width}", "autograd:step", (width,), limit=limit)


def _start_rows() -> Iterator[Row]:
    start = partial(Row, default=False, deadline=_START_DEADLINE_SECONDS)
    for count in (2, 8, 32):
        yield start(f"start and stop of {count} workers", "startup:start_and_stop", (count,))
    yield start("launch of 32 processes that import torch", "startup:launch_bare", (32,))


def _memory_rows() -> Iterator[Row]:
    limit = Limit("import torch", "baselines:memory")
    memory = partial(Row, unit=Unit.BYTES, limit=limit, above_limit=True)
    yield memory("memory after start", "costs:after_start")
    yield memory("memory after 10,000 calls", "costs:after_calls", (10_000,))


_CALLS = (
    _of_all("empty call", "calls:empty", limit=_zmq()),
    Row("recorded call", "calls:recorded", limit=_zmq()),
    _of_all("call with a small tensor", "calls:small_tensor", limit=_zmq()),
    Row("torch operator", "calls:torch_operator", limit=_zmq()),
    Row("call to a peer, then to this worker", "calls:peer_and_own", limit=_zmq(times=2)),
    Row("nested calls, 8 hops", "calls:nested", (8,), limit=_zmq(times=8)),
)
_CALLS_AT_ONCE = (
    Row("each of 5 calls made at once", "calls:in_flight", (5,)),
    _of_many("pipelined calls per second", "calls:pipelined", (), Unit.RATE, _RATE),
    _of_all("calls of 8 threads per second", "calls:threads", (8,), Unit.RATE, _RATE),
    Row("call while the peer is busy", "calls:peer_busy", limit=_zmq()),
)
_FAN_OUT = _of_all(
    "fan-out, 1 MiB to 7 workers", "tensors:fan_out", (_MIB,), **_beside_copies(_MIB, 7, 7)
)
_FIRST = "first large message, 100 MB from each of 5 workers and back"
_DROPPED = "RRefs made and dropped per second"
_REFERENCES = (
    Row("remote and to_here", "references:remote_to_here", limit=_zmq()),
    _of_all("RRef method", "references:method", limit=_zmq()),
    _of_all("actor call", "references:actor_call", limit=_zmq()),
    _of_many("each of 1,000 actor calls in flight", "references:actor_calls_in_flight", (1000,)),
    Row(_DROPPED, "references:made_and_dropped", (), Unit.RATE, _RATE),
)
# Beside Ray's fastest calls; zrpc's are plain ones.
_GRAPHS = tuple(
    _with_ray(f"compiled graph, echo of {name or 'None'}", "tensors:compiled_echo", (size,))
    for name, size in {"": 0, **_SIZES}.items()
    if not size or size >= _MIN_SHARED_BYTES
)
_QUEUE = "queue, items put and taken per second"
_BATCHES = "queue, items taken in batches of 32 per second"
_COLLECTED = (
    _with_ray(_QUEUE, "items:one_by_one", (), Unit.RATE),
    _own(_BATCHES, "items:by_batches", (), Unit.RATE),
    _own("batched call, 64 callers", "items:batched", (64,)),
)
_SMALL_ITEMS = "stream of 10,000 small items, items per second"
_LARGE_ITEMS = "stream of 100 items of 1 MiB"
_STREAMS = (
    _with_ray(_SMALL_ITEMS, "items:small_items", (10_000,), Unit.RATE, _RATE, bound=200_000),
    _with_ray(_LARGE_ITEMS, "items:large_items", (100, _MIB), **_beside_copies(_MIB, 100, 100)),
)
_LARGE = 128 * _MIB
_GROUP, _SUBSCRIBERS = "128 MiB to 7 workers by a group", "128 MiB of weights to 7 subscribers"
_TO_ALL = (
    _with_ray(_GROUP, "tensors:to_group", (_LARGE,), **_beside_copies(_LARGE, 1, 7)),
    _with_ray(_SUBSCRIBERS, "tensors:to_subscribers", (_LARGE,), limit=_copies(_LARGE, 8)),
    _floor("128 MiB to 7 workers, over a memcpy and 7 calls", "group_call", 1.6, _LARGE),
)
_FLOORS = (
    _floor("actor call, over one of an RRef's method", "actor_call", 1.15),
    _floor("push of 128 MiB of weights, over a copy of the model", "push", 1.5, _LARGE),
    _floor("load of 128 MiB of weights, over a copy of the model", "load", 1.2, _LARGE),
)
_CALLS_IN_CONTEXT = "256 calls to 4 workers in one context, and backward"
_EXPERTS = Row(_CALLS_IN_CONTEXT, "autograd:experts", (256, 256))
_TRAINERS = "parameter server, updates of 3 trainers per second"
_OBSERVERS = "agent with 3 observers, steps per second"
_PROGRAMS = (
    Row(_TRAINERS, "programs:parameter_server", unit=Unit.RATE),
    Row("RNN with remote tables, training step", "programs:rnn"),
    Row("pipeline of 3 stages, training step", "programs:pipeline"),
    Row(_OBSERVERS, "programs:reinforcement", unit=Unit.RATE),
)
GROUPS: tuple[Group, ...] = (
    Group("calls", _CALLS),
    Group("calls at once", _CALLS_AT_ONCE),
    Group("tensors", tuple(_tensor_rows())),
    Group("fan-out", (_FAN_OUT,), workers=8),
    Group("first messages", (Row(_FIRST, "tensors:first_large", (10**8,)),), workers=6, turns=1),
    Group("references", _REFERENCES),
    Group("compiled graphs", _GRAPHS),
    Group("queues and batches", _COLLECTED),
    Group("streams", _STREAMS, turns=2),
    Group("to all", _TO_ALL, workers=8, turns=2),
    Group("floors", _FLOORS),
    Group("autograd", tuple(_autograd_rows())),
    Group("many calls in one context", (_EXPERTS,), workers=5, turns=2),
    Group("programs", _PROGRAMS, workers=4),
    Group("costs", tuple(_cost_rows())),
    Group("memory", tuple(_memory_rows()), fresh=True, turns=1),
    Group("skeleton", tuple(_skeleton_rows())),
    Group("steps", tuple(_step_rows()), turns=1),
    Group("start", tuple(_start_rows()), workers=1, forms_mesh=False, turns=1),
)


def all_rows() -> list[Row]:
    """Returns all rows, in the order of the table."""
    return [row for group in GROUPS for row in group.rows]


WORKLOAD_MODULES = {
    f"zrpc.bench.{each.workload.partition(':')[0]}"
    for row in all_rows()
    for each in (row, row.limit)
    if each is not None
}


def select(
    patterns: Collection[str] = (), against: str | None = None, device: str = ""
) -> list[Group]:
    """Returns the groups that contain selected rows, with only those rows.

    Args:
        patterns: regular expressions. A row is selected if one of them is found in its name,
            ignoring case. Without any, the default rows are selected.
        against: the library to compare with; the default rows are those that it can measure.
        device: the device that tensors are on; other rows than those of tensors are left out.

    Raises:
        ValueError: an expression is not valid, or matches no row.
    """
    chosen = {name for pattern in patterns for name in _matching(pattern)}
    if not patterns:
        rows = [row for row in all_rows() if row.default]
        measured = against if against in ACTOR_LIBRARIES else "zrpc"
        chosen = {row.name for row in rows if row.measured_by(measured)}
    if device:
        chosen &= {row.name for row in all_rows() if row.device_limit is not None}
        if not chosen:
            raise ValueError(f"no row that matches {', '.join(patterns)} has tensors on a device")
    groups = [
        replace(group, rows=tuple(row for row in group.rows if row.name in chosen))
        for group in GROUPS
    ]
    return [group for group in groups if group.rows]


def _matching(pattern: str) -> list[str]:
    """Returns the names of the rows that a pattern matches, at least one."""
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    names = [row.name for row in all_rows()]
    matching = [name for name in names if wanted.search(name)]
    if not matching:
        raise ValueError(f"no row matches {pattern!r}; the rows are:\n  " + "\n  ".join(names))
    return matching
