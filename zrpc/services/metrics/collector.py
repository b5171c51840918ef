"""`zrpc.stats` as metrics of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from zrpc.agent.agent import Agent
from zrpc.agent.stats import CallStats, Stats, take_stats

__all__ = ["make_registry"]

# The name of a metric, what it says, and the attribute that it is of.
_HANDLERS = (
    ("zrpc_handler_runs", "Executions for callers.", "number"),
    ("zrpc_handler_errors", "Executions that failed.", "errors"),
    ("zrpc_handler_queue_seconds", "How long they waited for a thread.", "queue_seconds"),
    ("zrpc_handler_run_seconds", "How long they ran.", "run_seconds"),
)
_WAYS = (
    ("zrpc_sent_bytes", "Bytes sent, by way.", "bytes_sent"),
    ("zrpc_received_bytes", "Bytes received, by way.", "bytes_received"),
)
_PEER_COUNTERS = (
    ("zrpc_peer_sent_bytes", "Bytes sent to a peer, without shared memory.", "bytes_sent"),
    ("zrpc_peer_received_bytes", "Bytes from a peer, without shared memory.", "bytes_received"),
)
_PEER_GAUGES = (
    ("zrpc_peer_calls_in_flight", "Calls to a peer without an outcome.", "calls_in_flight"),
    ("zrpc_peer_requests_in_progress", "Its calls without an answer.", "requests_in_progress"),
    ("zrpc_peer_calls_without_room", "Calls that wait for flow control.", "calls_without_room"),
)
_COUNTERS = (
    ("zrpc_reconnects", "Connections that were made again.", "reconnects"),
    ("zrpc_lost_messages", "Messages that are known to be lost.", "messages_lost"),
    ("zrpc_missed_heartbeats", "How often a peer missed its heartbeats.", "heartbeats_missed"),
)
_GAUGES = (
    ("zrpc_calls_in_flight", "Own calls without an outcome.", "calls_in_flight"),
    ("zrpc_requests_in_progress", "Calls of others without an answer.", "requests_in_progress"),
    ("zrpc_rrefs_owned", "Values owned that are referred to.", "rrefs_owned"),
    ("zrpc_rrefs_held", "References held to values of others.", "rrefs_held"),
    ("zrpc_autograd_contexts", "Distributed autograd contexts.", "autograd_contexts"),
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
        """Returns nothing: the registry need not read the stats to know the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics."""
        stats = take_stats(self._agent)
        info = GaugeMetricFamily("zrpc_worker", "The worker.", labels=["worker", "rank"])
        info.add_metric([stats.name, str(stats.rank)], 1)
        yield info
        yield _call_seconds(stats)
        errors = CounterMetricFamily(
            "zrpc_call_errors", "Own calls that failed.", labels=["worker", "function"]
        )
        for function, calls in stats.calls.items():
            errors.add_metric([stats.name, function], calls.errors)
        yield errors
        yield from _table(CounterMetricFamily, _HANDLERS, stats, "function", stats.handlers)
        yield from _table(CounterMetricFamily, _WAYS, stats, "way", stats.traffic)
        yield from _table(CounterMetricFamily, _PEER_COUNTERS, stats, "peer", stats.peers)
        yield from _table(GaugeMetricFamily, _PEER_GAUGES, stats, "peer", stats.peers)
        threads = GaugeMetricFamily(
            "zrpc_threads",
            "Threads that run handlers, by state; queued: calls that wait for one.",
            labels=["worker", "state"],
        )
        for state in _THREADS:
            threads.add_metric([stats.name, state], getattr(stats.threads, state))
        yield threads
        for kind, metrics in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, text, attribute in metrics:
                metric = kind(name, text, labels=["worker"])
                metric.add_metric([stats.name], getattr(stats, attribute))
                yield metric


def _call_seconds(stats: Stats) -> Metric:
    metric = HistogramMetricFamily(
        "zrpc_call_seconds",
        "How long own calls took until they had an outcome.",
        labels=["worker", "function"],
    )
    for function, calls in stats.calls.items():
        buckets = _buckets(stats, calls)
        metric.add_metric([stats.name, function], buckets, sum_value=calls.seconds)
    return metric


def _buckets(stats: Stats, calls: CallStats) -> list[tuple[str, float]]:
    bounds = [*map(repr, stats.bucket_seconds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(calls.histogram)), strict=True))


def _table(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    metrics: tuple[tuple[str, str, str], ...],
    stats: Stats,
    label: str,
    rows: Mapping[str, Any],
) -> Iterator[Metric]:
    """Yields a metric for each of some attributes of the rows, with the row's name as a label."""
    for name, text, attribute in metrics:
        metric = kind(name, text, labels=["worker", label])
        for row, values in rows.items():
            metric.add_metric([stats.name, row], getattr(values, attribute))
        yield metric
