"""Which workers of a mesh have not come: the text of an error. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from zrpc.membership.peer_record import PeerRecord

_HOSTS_NAMED = 8


def rank_ranges(ranks: Iterable[int]) -> str:
    """Returns ranks as ranges.

    Example:
        >>> rank_ranges([3, 4, 5, 12])
        '3-5, 12'
    """
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in ranges)


def describe_missing(ranks: Iterable[int]) -> str:
    """Returns which ranks are missing, and what to do."""
    missing = list(ranks)
    are = "ranks {} are" if len(missing) > 1 else "rank {} is"
    return (
        f"{are.format(rank_ranges(missing))} missing: start them, or check RANK and WORLD_SIZE. If "
        "they only need longer, set ZRPC_INIT_TIMEOUT or init_timeout to more seconds"
    )


def describe_places(records: Iterable[PeerRecord]) -> str:
    """Returns which processes these workers are."""
    return " and ".join(f"{each.name} (pid {each.pid} on {each.host})" for each in records)


def describe_hosts(records: Iterable[PeerRecord]) -> str:
    """Returns which workers have come, by host, and which hosts are complete.

    A host is complete if the engine says how many workers it starts there, and all have come.
    """
    by_host: dict[str, list[PeerRecord]] = {}
    for record in records:
        by_host.setdefault(record.host_key, []).append(record)
    complete, others = [], []
    for found in sorted(by_host.values(), key=lambda found: min(r.rank for r in found)):
        host, expected = found[0].host, found[0].local_world_size
        ranks = rank_ranges(record.rank for record in found)
        if expected and len(found) >= expected:
            complete.append(f"{host} ({ranks})")
        else:
            others.append(f"{host} ({ranks}{f'; {len(found)} of {expected}' if expected else ''})")
    parts = [f"hosts that are complete: {_some(complete)}"] if complete else []
    if others:
        parts.append(
            f"{'other ' if complete else ''}hosts with ranks that have come: {_some(others)}"
        )
    return "; ".join(parts)


def _some(hosts: list[str]) -> str:
    more = len(hosts) - _HOSTS_NAMED
    return ", ".join(hosts[:_HOSTS_NAMED]) + (f" and {more} more" if more > 0 else "")
