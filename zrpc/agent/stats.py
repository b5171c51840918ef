"""What a worker has done so far, in numbers: `zrpc.stats`.

Most numbers are counted anyway, where things happen; here they are put together. Nothing waits for
that, except for the locks under which some of them change.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from zrpc.agent.agent import Agent
from zrpc.agent.service import ActorStats
from zrpc.calls.call_counters import BUCKET_SECONDS, quantile
from zrpc.calls.function_names import kind_name, readable
from zrpc.wire.member_id import MemberId


@dataclass(frozen=True)
class CallStats:
    """The calls of one function that this worker has made and that have an outcome.

    Attributes:
        number: how many there were.
        errors: how many of them failed, for whatever reason.
        seconds: how long all of them took together, until their answers arrived.
        histogram: how many of them took how long: one number for each of
            ``Stats.bucket_seconds``, and a last one for those that took longer.
    """

    number: int
    errors: int
    seconds: float
    histogram: list[int]

    def quantile(self, q: float) -> float:
        """Returns the time, in seconds, within which this share of the calls had their answers.

        It is estimated from the histogram, and right to a factor of two. It is 0 if there were no
        calls.

        Args:
            q: the share, from 0 to 1: 0.5 for the median.

        Example:
            >>> CallStats(4, 0, 0.012, [0] * 12 + [4] + [0] * 16).quantile(0.5)
            0.0029296875
        """
        return quantile(self.histogram, q)


@dataclass(frozen=True)
class HandlerStats:
    """The executions of one function on this worker, for all callers.

    Attributes:
        number: how many there were.
        errors: how many of them failed.
        queue_seconds: how long they waited in all, from their arrival, for a thread of the pool (or
            for the value of an RRef).
        run_seconds: how long they ran in all, from unpickling the arguments to packing the answer.
    """

    number: int
    errors: int
    queue_seconds: float
    run_seconds: float


@dataclass(frozen=True)
class TrafficStats:
    """The bytes that went one way, for example by TCP."""

    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class GroupStats:
    """The arguments of this worker's calls of groups that several members get.

    Attributes:
        bytes_packed: of these arguments, each once.
        bytes_sent: of what left this worker for them: once for all members on this host that read
            it in shared memory, once for each other host whose members hand it on, and once for
            each other member. What this worker hands on counts as well.
    """

    bytes_packed: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True)
class PeerStats:
    """The traffic with another worker.

    Attributes:
        rank: its rank.
        state: ``"member"``, or ``"lost"`` if it is gone.
        bytes_sent: to it; without what goes by shared memory.
        bytes_received: from it; without what comes by shared memory.
        calls_in_flight: calls to it without an outcome.
        requests_in_progress: its calls that this worker has not answered.
        bytes_in_flight: of the calls to it.
        calls_without_room: how many calls to it wait until flow control has room for them.
        room: how many bytes flow control would let in now, to this peer from callers that are no
            handlers; None if there is no limit.
    """

    rank: int
    state: str
    bytes_sent: int
    bytes_received: int
    calls_in_flight: int
    requests_in_progress: int
    bytes_in_flight: int
    calls_without_room: int
    room: int | None


@dataclass(frozen=True)
class ThreadStats:
    """The threads that run handlers.

    Attributes:
        size: how many handlers may run at once (``num_worker_threads``).
        running: how many do.
        waiting: how many handlers wait for another worker.
        idle: how many threads have nothing to do.
        queued: how many calls wait for a thread.
    """

    size: int
    running: int
    waiting: int
    idle: int
    queued: int


@dataclass(frozen=True)
class Stats:
    """What a worker has done since it joined the mesh; `zrpc.stats` returns one.

    Counts never decrease as long as the worker is in the mesh: those of two moments tell what
    happened between them.

    Attributes:
        name, rank, host, pid: which worker this is.
        seconds: how long it has been in the mesh.
        calls: the calls that it has made, by function (or kind of request, such as ``FETCH``).
        handlers: what it has run for others, and for itself, by function.
        bucket_seconds: the upper bounds of the histograms in ``calls``, in seconds.
        traffic: bytes, by way: ``direct`` (small messages on one host), ``ipc`` (large ones there,
            without shared memory), ``shared_memory``, ``tcp`` and ``inproc`` (to itself).
        peers: the other workers that it has communicated with, by name and as long as they are
            known.
        calls_in_flight: calls that it has made and that have no outcome yet.
        requests_in_progress: calls of others that it has not answered yet.
        threads: those that run handlers.
        max_bytes_in_flight: the option; 0 if there is no limit.
        rrefs_owned: values that it owns and that are referred to.
        rrefs_held: references that it holds to values of others.
        autograd_contexts: distributed autograd contexts that it takes part in.
        actors: the actors that it owns, by the name of their class, and their own if they have one.
        reconnects: connections that were made again.
        messages_lost: messages to it that are known to be lost, and calls for which it is not known
            whether they were.
        heartbeats_missed: how often a peer did not answer heartbeats in time, or its connection
            broke.
        groups: of calls of groups.
    """

    name: str
    rank: int
    host: str
    pid: int
    seconds: float
    calls: dict[str, CallStats]
    handlers: dict[str, HandlerStats]
    traffic: dict[str, TrafficStats]
    peers: dict[str, PeerStats]
    calls_in_flight: int
    requests_in_progress: int
    threads: ThreadStats
    max_bytes_in_flight: int
    reconnects: int
    messages_lost: int
    heartbeats_missed: int
    rrefs_owned: int
    rrefs_held: int
    autograd_contexts: int
    actors: dict[str, ActorStats] = field(default_factory=dict)
    bucket_seconds: list[float] = field(default_factory=partial(list, BUCKET_SECONDS))
    groups: GroupStats = GroupStats()


def take_stats(agent: Agent) -> Stats:
    """Returns the numbers of a worker. May be called from any thread; it takes about 0.1 ms."""
    more = Counter({name: n for each in agent.services for name, n in each.stats().items()})
    sent = agent.network.sent_bytes()
    load = agent.pool.load(0)
    return Stats(
        name=agent.worker_info.name,
        rank=agent.worker_info.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        seconds=time.monotonic() - agent.joined_at,
        calls=_calls(agent),
        handlers={
            _name(key): HandlerStats(each.number, each.errors, each.queue_seconds, each.run_seconds)
            for key, each in agent.callee.counts.copy().items()
        },
        traffic=_traffic(agent, sent, more["shm_bytes_sent"], more["shm_bytes_received"]),
        peers=_peers(agent, sent),
        calls_in_flight=len(agent.caller.calls),
        requests_in_progress=len(agent.callee.requests),
        threads=ThreadStats(load.size, load.running, load.waiting, load.idle, load.queued),
        max_bytes_in_flight=agent.caller.calls.limit,
        reconnects=agent.network.reconnects + agent.liveness.reconnects,
        messages_lost=agent.dispatcher.lost,
        heartbeats_missed=agent.liveness.missed,
        rrefs_owned=more["rrefs_owned"],
        rrefs_held=more["rrefs_held"],
        autograd_contexts=more["autograd_contexts"],
        actors={name: each for s in agent.services for name, each in s.actors().items()},
        groups=GroupStats(more["group_bytes_packed"], more["group_bytes_sent"]),
    )


def _name(key: str | int) -> str:
    return readable(key) if isinstance(key, str) else kind_name(key)  # a kind of request


def _calls(agent: Agent) -> dict[str, CallStats]:
    found = {}
    for key, counts in agent.caller.calls.counts.copy().items():
        histogram = counts.histogram()
        found[_name(key)] = CallStats(sum(histogram), counts.errors, counts.seconds, histogram)
    return found


def _traffic(
    agent: Agent, sent: Counter[tuple[int, str]], *by_shared_memory: int
) -> dict[str, TrafficStats]:
    """Returns the bytes by way."""
    out, came = Counter[str](), Counter[str]()
    for (_, way), size in sent.items():
        out[way] += size
    for member, size in agent.dispatcher.received_bytes.copy().items():
        came[agent.network.endpoint(member).partition("://")[0]] += size
    # What comes by ZeroMQ is counted in all: the rest of what comes from this host is direct.
    by_zeromq = agent.network.received_bytes - came["tcp"] - came["inproc"]
    came["direct"], came["ipc"] = max(0, came["ipc"] - by_zeromq), max(0, by_zeromq)
    ways = ("direct", "ipc", "tcp", "inproc")
    traffic = {way: TrafficStats(out[way], came[way]) for way in ways}
    traffic["shared_memory"] = TrafficStats(*by_shared_memory)
    return traffic


def _peers(agent: Agent, sent: Counter[tuple[int, str]]) -> dict[str, PeerStats]:
    to = Counter[int]()
    for (peer, _), size in sent.items():
        to[peer] += size
    came = agent.dispatcher.received_bytes.copy()
    calls = Counter(call.peer for call in agent.caller.calls.in_flight())
    requests = Counter(request.sender for request in agent.callee.requests.all())
    windows = agent.caller.calls.loads()
    limit = agent.caller.calls.limit
    lost = agent.membership.lost
    found = {}
    # The lost ones first: a worker that was restarted has the name of the one before it.
    for member in sorted({*to, *came, *calls}, key=lambda member: member not in lost):
        info = agent.membership.infos[MemberId(member)]
        open_windows = windows.get(info.member_id, [])
        used = sum(window.used for window in open_windows if not window.of_handler)
        found[info.name] = PeerStats(
            rank=info.rank,
            state="lost" if member in lost else "member",
            bytes_sent=to[member],
            bytes_received=came[info.member_id],
            calls_in_flight=calls[info.member_id],
            requests_in_progress=requests[info.member_id],
            bytes_in_flight=sum(window.used for window in open_windows),
            calls_without_room=sum(window.waiting for window in open_windows),
            room=max(0, limit - used) if limit else None,
        )
    return found
