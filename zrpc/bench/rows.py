"""The rows of the benchmark."""

from __future__ import annotations

import re
from dataclasses import replace

from zrpc.bench.row import Group, Limit, Row, Unit

__all__ = ["GROUPS", "all_rows", "select"]

_KIB = 1024
_MIB = 1024 * 1024
_SIZES = {
    "4 KiB": 4 * _KIB,
    "64 KiB": 64 * _KIB,
    "1 MiB": _MIB,
    "16 MiB": 16 * _MIB,
    "128 MiB": 128 * _MIB,
}
# From this size on a worker of the same host need not send the bytes through a socket.
_COPIED = _MIB
# What a launcher with 32 processes that import torch on two cores takes, and some more.
_START_DEADLINE = 300.0


def _zmq(size: int = 16, times: int = 1) -> Limit:
    return Limit("ZeroMQ", "limits:echo", (size, times))


def _copies(size: int, times: int) -> Limit:
    return Limit("memcpy", "limits:memcpy", (size, times))


_RATE = Limit("ZeroMQ", "limits:pipelined")


def _tensor_rows() -> tuple[Row, ...]:
    rows = []
    for name, size in _SIZES.items():
        by_copy = size >= _COPIED
        there = Limit("ZeroMQ", "limits:one_way", (size,))
        both = _zmq(size)
        rows += [
            Row(
                f"one way, {name}",
                "tensors:one_way",
                (size,),
                limit=_copies(size, 1) if by_copy else there,
                tcp_limit=there,
            ),
            Row(
                f"echo, {name}",
                "tensors:echo",
                (size,),
                limit=_copies(size, 2) if by_copy else both,
                tcp_limit=both,
            ),
        ]
    rows.append(
        Row("echo, 100 tensors of 1 KiB", "tensors:echo_many", (100, _KIB), limit=_zmq(100 * _KIB))
    )
    return tuple(rows)


def _start_rows() -> tuple[Row, ...]:
    joined = [
        Row(
            f"start and stop of {count} workers",
            "start:start_and_stop",
            (count,),
            default=False,
            deadline=_START_DEADLINE,
        )
        for count in (2, 8, 32)
    ]
    bare = Row(
        "launch of 32 processes that import torch",
        "start:launch_bare",
        (32,),
        default=False,
        deadline=_START_DEADLINE,
    )
    return (*joined, bare)


GROUPS: tuple[Group, ...] = (
    Group(
        "calls",
        (
            Row("empty call", "calls:empty", limit=_zmq()),
            Row("call with a small tensor", "calls:small_tensor", limit=_zmq()),
            Row("torch operator", "calls:torch_operator", limit=_zmq()),
            Row("nested calls, 8 hops", "calls:nested", (8,), limit=_zmq(times=8)),
        ),
    ),
    Group(
        "calls at once",
        (
            Row("pipelined calls per second", "calls:pipelined", unit=Unit.RATE, limit=_RATE),
            Row("calls of 8 threads per second", "calls:threads", (8,), Unit.RATE, limit=_RATE),
            Row("call while the peer is busy", "calls:peer_busy", limit=_zmq()),
        ),
    ),
    Group("tensors", _tensor_rows()),
    Group(
        "fan-out",
        (
            Row(
                "fan-out, 1 MiB to 7 workers",
                "tensors:fan_out",
                (_MIB,),
                limit=_copies(_MIB, 7),
                tcp_limit=_zmq(_MIB, 7),
            ),
        ),
        workers=8,
    ),
    Group(
        "references",
        (
            Row("remote and to_here", "references:remote_to_here", limit=_zmq()),
            Row("RRef method", "references:method", limit=_zmq()),
            Row(
                "RRefs made and dropped per second",
                "references:made_and_dropped",
                unit=Unit.RATE,
                limit=_RATE,
            ),
        ),
    ),
    Group(
        "autograd",
        tuple(
            Row(
                f"autograd step, width {width}",
                "autograd:step",
                (width,),
                limit=Limit("local+ZeroMQ", "limits:local_step", (width,)),
            )
            for width in (16, 512)
        ),
    ),
    Group(
        "memory",
        (
            Row(
                "memory after start",
                "memory:after_start",
                unit=Unit.BYTES,
                limit=Limit("import torch", "limits:memory"),
                above_limit=True,
            ),
            Row(
                "memory after 10,000 calls",
                "memory:after_calls",
                (10_000,),
                unit=Unit.BYTES,
                limit=Limit("import torch", "limits:memory"),
                above_limit=True,
            ),
        ),
        fresh=True,
        turns=1,
    ),
    Group("start", _start_rows(), workers=1, joined=False, turns=1),
)


def all_rows() -> list[Row]:
    """All rows, in the order of the table."""
    return [row for group in GROUPS for row in group.rows]


def select(pattern: str | None) -> list[Group]:
    """The groups with those of their rows that were asked for; no empty groups.

    Args:
        pattern: a regular expression that is searched in the rows' names, without regard to
            case; None for the default rows.

    Raises:
        ValueError: the expression is none, or no row matches.
    """
    if pattern is None:
        chosen = {row.name for row in all_rows() if row.default}
    else:
        try:
            wanted = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        chosen = {row.name for row in all_rows() if wanted.search(row.name)}
        if not chosen:
            names = "\n  ".join(row.name for row in all_rows())
            raise ValueError(f"no row matches {pattern!r}; the rows are:\n  {names}")
    groups = [
        replace(group, rows=tuple(row for row in group.rows if row.name in chosen))
        for group in GROUPS
    ]
    return [group for group in groups if group.rows]
