"""A second round of workers that have met: each gives a value, and gets those of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch.distributed import Store

from zrpc.errors import RendezvousError, RpcError
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.rendezvous import TIMING, await_readers, digest_of, store_errors, wait_for
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.signed_store import SignedStore
from zrpc.wire.member_id import MemberId

__all__ = ["exchange"]

# What the value of a worker begins with.
_GIVEN = "="
_FAILED = "!"


def exchange(
    store: Store,
    records: Sequence[PeerRecord],
    own_id: MemberId,
    value: str,
    timeout: float,
    secret: ClusterSecret | None = None,
    failed: bool = False,
    check: Callable[[list[str]], None] = lambda _: None,
) -> list[str]:
    """Gives a value to the others, and returns those of all, by rank.

    Args:
        store: shared by all.
        records: those of all workers.
        own_id: this worker's.
        value: what it gives; if it has ``failed``, the reason, so that the others don't wait.
        timeout: seconds.
        secret: signs the values.
        failed: see ``value``.
        check: raises an RpcError if these values don't do, and all workers find that.

    Raises:
        AuthenticationError: a value is not from the worker that it claims to be from.
        RendezvousError: some gave none within ``timeout`` seconds, or have failed; the store fails.
    """
    deadline = time.monotonic() + timeout
    with SignedStore(store, secret, deadline) as entries, store_errors(records):
        keys = [f"{digest_of(records)}/value/{record.rank}" for record in records]
        entries.set(keys[own_id], (_FAILED if failed else _GIVEN) + value)
        if not wait_for(lambda: entries.check(keys), deadline):
            by_key = zip(keys, records, strict=True)
            missing = [record.info for key, record in by_key if not entries.check([key])]
            raise RendezvousError(
                f"expected all workers to publish within {timeout:g} s where they listen, but "
                f"{missing} did not: find out what became of them"
            )
        found = entries.get_all(keys)
        try:
            _check_given(records, found)
            values = [text.removeprefix(_GIVEN) for text in found]
            check(values)
        except RpcError:
            until = min(deadline, time.monotonic() + TIMING.failure_read_seconds)
            await_readers(entries, records, own_id, until)
            raise
        return values


def _check_given(records: Sequence[PeerRecord], found: Sequence[str]) -> None:
    for record, text in zip(records, found, strict=True):
        if text.startswith(_FAILED):
            raise RendezvousError(
                f"expected all workers to publish where they listen, but {record.info} on "
                f"{record.host} failed: {text.removeprefix(_FAILED)}"
            )
