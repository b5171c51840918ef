"""Actions: RRefs that are made, used, passed on, kept and dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zrpc
from zrpc.soak import targets
from zrpc.soak.lane import Action, Lane

__all__ = ["ACTIONS"]

# More RRefs than this a lane does not keep from one action to the next.
_MOST_KEPT = 8


@dataclass
class _Kept:
    """An account that somebody owns, and what has to be in it."""

    rref: Any
    total: int


def make(lane: Lane) -> None:
    """A new account on some worker, to be kept."""
    total = lane.whole()
    owner = lane.peer()
    rref = zrpc.remote(owner, targets.Account, (total,))
    kept = _Kept(rref, total)
    if lane.rng.random() < 0.5:  # else whether it is there shows when it is used
        lane.expect("what is in it", total, rref.to_here().total)
    lane.expect("the owner", (owner, False), (rref.owner_name(), rref.is_owner()))
    _put(lane, kept)


def own(lane: Lane) -> None:
    """A new account here, which others add to."""
    kept = _Kept(zrpc.RRef(targets.Account(lane.whole(0, 9))), 0)
    kept.total = kept.rref.local_value().total
    _pass_on(lane, kept, lane.way(3))
    lane.expect("what is in it here", kept.total, kept.rref.local_value().total)
    _put(lane, kept)


def use(lane: Lane) -> None:
    """Adds to an account in one of the ways that there are, and looks at it."""
    kept = _take(lane)
    if kept is None:
        return
    way, amount = lane.rng.randrange(3), lane.whole()
    if way == 0:
        kept.total += amount
        lane.expect("rpc_sync", kept.total, kept.rref.rpc_sync().add(amount))
    elif way == 1:
        kept.total += amount
        lane.expect("rpc_async", kept.total, kept.rref.rpc_async().add(amount).wait())
    else:
        opened = kept.rref.remote().opened(amount)
        lane.expect("remote", kept.total + amount, opened.to_here().total)
    lane.expect("to_here", kept.total, kept.rref.to_here().total)
    _put(lane, kept)


def pass_on(lane: Lane) -> None:
    """Has other workers add to an account, one after the other, and takes it back."""
    kept = _take(lane)
    if kept is not None:
        _pass_on(lane, kept, lane.way(4))
        _put(lane, kept)


def leave_there(lane: Lane) -> None:
    """Has another worker keep the only RRef for a while."""
    kept = _take(lane)
    if kept is None:
        return
    keeper, key = lane.peer(), lane.key()
    zrpc.rpc_sync(keeper, targets.keep, (key, kept.rref))
    del kept.rref
    for _ in range(lane.whole(1, 3)):
        amount = lane.whole()
        kept.total += amount
        lane.expect("kept", kept.total, zrpc.rpc_sync(keeper, targets.add_kept, (key, amount)))
    kept.rref = zrpc.rpc_sync(keeper, targets.leave, (key,))
    lane.expect("taken back", kept.total, kept.rref.to_here().total)
    _put(lane, kept)


def share(lane: Lane) -> None:
    """Gives an account to several workers at once, before its owner has made it."""
    total, amounts = lane.whole(), [lane.whole() for _ in range(lane.whole(1, 4))]
    rref = zrpc.remote(lane.peer(), targets.later, (total, lane.rng.random() / 50))
    futures = [zrpc.rpc_async(lane.peer(), targets.add_at, (rref, a)) for a in amounts]
    errors = []
    for future in futures:
        try:
            future.wait()
        except zrpc.WorkerDied as error:  # noqa: PERF203 - each is waited for
            errors.append(error)
    if errors:
        raise errors[0]
    lane.expect("together", total + sum(amounts), rref.to_here().total)


def fail(lane: Lane) -> None:
    """An RRef to what can't be made."""
    number, text = lane.whole(), lane.key()
    rref = zrpc.remote(lane.peer(), targets.complain, (number, text))
    for _ in range(2):
        try:
            value: Any = rref.to_here()
        except targets.ComplaintError as error:  # noqa: PERF203 - the same each time
            lane.expect("arguments", (number, text), error.args)
        else:
            lane.expect("an error", targets.ComplaintError, value)


def drop(lane: Lane) -> None:
    """Makes accounts and drops them at once, or one that was kept."""
    if lane.rng.random() < 0.5:
        _take(lane)
        return
    to = lane.peer()
    for _ in range(lane.whole(1, 20)):
        zrpc.remote(to, targets.Account, (0,))


def _pass_on(lane: Lane, kept: _Kept, way: list[str]) -> None:
    amount = lane.whole()
    back = zrpc.rpc_sync(way[0], targets.pass_on, (way[1:], kept.rref, amount))
    kept.total += amount * len(way)
    lane.expect("the same", (kept.rref, hash(kept.rref)), (back, hash(back)))
    lane.expect("passed on", kept.total, back.to_here().total)


def _put(lane: Lane, kept: _Kept) -> None:
    lane.shelf.append(kept)
    if len(lane.shelf) > _MOST_KEPT:
        lane.shelf.pop(lane.rng.randrange(len(lane.shelf)))


def _take(lane: Lane) -> _Kept | None:
    """One of those that are kept; what it fails with, it is not kept any more."""
    if not lane.shelf:
        return None
    kept: _Kept = lane.shelf.pop(lane.rng.randrange(len(lane.shelf)))
    return kept


ACTIONS: list[tuple[Action, int]] = [
    (make, 6),
    (own, 4),
    (use, 8),
    (pass_on, 6),
    (leave_there, 3),
    (share, 3),
    (fail, 2),
    (drop, 3),
]
