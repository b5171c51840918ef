"""The text of the error that names the ranks that have not come."""

from __future__ import annotations

from tests.support.records import peer_record
from zrpc.membership.missing_ranks import describe_hosts, describe_missing, rank_ranges


def test_missing_ranks_are_named_as_ranges() -> None:
    for ranks, text in (
        ([], ""),
        ([5], "5"),
        ([12, 3, 4, 5, 6, 7], "3-7, 12"),
        ([0, 2, 4], "0, 2, 4"),
    ):
        assert rank_ranges(ranks) == text
    assert describe_missing([2]).startswith("rank 2 is missing: start them, or check RANK")
    assert describe_missing([2, 3]).startswith("ranks 2-3 are missing: start them, or check RANK")
    assert "ZRPC_INIT_TIMEOUT or init_timeout" in describe_missing([2])


def test_complete_hosts_are_told_from_others() -> None:
    records = [
        peer_record(rank, 12, host=f"node{host}", host_key=f"key{host}", local_world_size=4)
        for host, ranks in enumerate([range(4), (4, 6), range(8, 12)])
        for rank in ranks
    ]
    assert describe_hosts(records) == (
        "hosts that are complete: node0 (0-3), node2 (8-11); other hosts with ranks that have "
        "come: node1 (4, 6; 2 of 4)"
    )
    # Their sizes may not be known, and two hosts may have the same name.
    of_unknown = [peer_record(rank, host_key=f"key{rank // 2}") for rank in range(4)]
    text = "hosts with ranks that have come: node0 (0-1), node0 (2-3)"
    assert describe_hosts(of_unknown) == text


def test_many_hosts_are_not_all_listed() -> None:
    records = [
        peer_record(rank, 64, host=f"node{rank}", host_key=str(rank), local_world_size=1)
        for rank in range(30)
    ]
    assert describe_hosts(records).endswith(", node7 (7) and 22 more")
