"""`zrpc.stats` as metrics of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily as _Counter
from prometheus_client.core import GaugeMetricFamily as _Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.stats import Stats, take_stats

_Kind = type[_Counter] | type[_Gauge]
# The label of the rows of a table, and the attribute of the stats that is the table.
_CALLS, _HANDLERS = ("function", "calls"), ("function", "handlers")
_TRAFFIC, _PEERS = ("way", "traffic"), ("peer", "peers")
_ACTORS = "actor", "actors"

# The kind of a metric, its name (without "zrpc_", and without the "_total" of counters), what it
# says, its table (None for a single number), and the attribute.
_METRICS: tuple[tuple[_Kind, str, str, tuple[str, str] | None, str], ...] = (
    (_Counter, "call_errors", "Own calls that failed.", _CALLS, "errors"),
    (_Counter, "handler_runs", "Executions for callers.", _HANDLERS, "number"),
    (_Counter, "handler_errors", "Executions that failed.", _HANDLERS, "errors"),
    (_Counter, "handler_queue_seconds", "They waited for threads.", _HANDLERS, "queue_seconds"),
    (_Counter, "handler_run_seconds", "How long they ran.", _HANDLERS, "run_seconds"),
    (_Counter, "sent_bytes", "Bytes sent, by way.", _TRAFFIC, "bytes_sent"),
    (_Counter, "received_bytes", "Bytes received, by way.", _TRAFFIC, "bytes_received"),
    (_Counter, "peer_sent_bytes", "Without shared memory.", _PEERS, "bytes_sent"),
    (_Counter, "peer_received_bytes", "Without shared memory.", _PEERS, "bytes_received"),
    (_Gauge, "peer_calls_in_flight", "Calls to it without outcome.", _PEERS, "calls_in_flight"),
    (_Gauge, "peer_requests_in_progress", "Its calls.", _PEERS, "requests_in_progress"),
    (_Gauge, "peer_calls_without_room", "Calls held back.", _PEERS, "calls_without_room"),
    (_Gauge, "calls_in_flight", "Own calls without an outcome.", None, "calls_in_flight"),
    (_Gauge, "requests_in_progress", "Calls of others.", None, "requests_in_progress"),
    (_Gauge, "rrefs_owned", "Values owned that are referred to.", None, "rrefs_owned"),
    (_Gauge, "rrefs_held", "References held to values of others.", None, "rrefs_held"),
    (_Gauge, "autograd_contexts", "Distributed autograd contexts.", None, "autograd_contexts"),
    (_Gauge, "actors", "Actors, by class and name.", _ACTORS, "number"),
    (_Gauge, "actor_calls_running", "Calls that they run.", _ACTORS, "running"),
    (_Gauge, "actor_calls_waiting", "Calls that wait for their turn.", _ACTORS, "waiting"),
    (_Counter, "reconnects", "Connections that were made again.", None, "reconnects"),
    (_Counter, "lost_messages", "Messages known to be lost.", None, "messages_lost"),
    (_Counter, "missed_heartbeats", "A peer missed its heartbeats.", None, "heartbeats_missed"),
)
_THREADS = ("running", "waiting", "idle", "queued")


def make_registry(agent: Agent) -> CollectorRegistry:
    """Returns what the page of a worker shows: its stats, its process and its Python."""
    registry = CollectorRegistry()
    registry.register(_StatsCollector(agent))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class _StatsCollector(Collector):
    """Takes a worker's stats whenever the page is read, in the server's thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def describe(self) -> list[Metric]:
        return []  # or the registry would read the stats to know the names

    @override
    def collect(self) -> Iterator[Metric]:
        stats = take_stats(self._agent)
        info = _Gauge("zrpc_worker", "The worker.", labels=["worker", "rank"])
        info.add_metric([stats.name, str(stats.rank)], 1)
        yield info
        yield _call_seconds(stats)
        text = "Threads that run handlers, by state; queued: calls that wait for one."
        threads = _Gauge("zrpc_threads", text, labels=["worker", "state"])
        for state in _THREADS:
            threads.add_metric([stats.name, state], getattr(stats.threads, state))
        yield threads
        for kind, name, text, rows, attribute in _METRICS:
            metric = kind(f"zrpc_{name}", text, labels=["worker", *([rows[0]] if rows else [])])
            if rows is None:
                metric.add_metric([stats.name], getattr(stats, attribute))
            else:
                for row, numbers in getattr(stats, rows[1]).items():
                    metric.add_metric([stats.name, row], getattr(numbers, attribute))
            yield metric


def _call_seconds(stats: Stats) -> Metric:
    text = "How long own calls took until they had an outcome."
    metric = HistogramMetricFamily("zrpc_call_seconds", text, labels=["worker", "function"])
    bounds = [*map(repr, stats.bucket_seconds), "+Inf"]
    for function, calls in stats.calls.items():
        buckets = list(zip(bounds, map(float, accumulate(calls.histogram)), strict=True))
        metric.add_metric([stats.name, function], buckets, sum_value=calls.seconds)
    return metric
