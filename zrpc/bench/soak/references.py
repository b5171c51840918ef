"""Actions: RRefs that are created, used, passed on, kept and dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zrpc
from zrpc.bench.soak import targets
from zrpc.bench.soak.calls import wait_for_all
from zrpc.bench.soak.client import Action, Client

# The most RRefs that a client keeps from one action to the next.
_MAX_KEPT = 8


@dataclass
class _Kept:
    """An RRef to an account, and the expected total of the account."""

    rref: Any
    total: int


def make(client: Client) -> None:
    """Creates an account on another worker and keeps it."""
    total, owner = client.random_int(), client.random_peer()
    rref = zrpc.remote(owner, targets.Account, (total,))
    if client.rng.random() < 0.5:  # otherwise a later use shows whether it exists
        client.expect("the total", total, rref.to_here().total)
    client.expect("the owner", (owner, False), (rref.owner_name(), rref.is_owner()))
    _put(client, _Kept(rref, total))


def own(client: Client) -> None:
    """Creates an account here, has others add to it, and keeps it."""
    kept = _Kept(zrpc.RRef(targets.Account(client.random_int(0, 9))), 0)
    kept.total = kept.rref.local_value().total
    _pass_on(client, kept, client.random_route(3))
    client.expect("the total here", kept.total, kept.rref.local_value().total)
    _put(client, kept)


def use(client: Client) -> None:
    """Adds to an account by a random kind of call, and checks the total."""
    kept = _take(client)
    if kept is None:
        return
    kind, amount = client.rng.randrange(3), client.random_int()
    if kind == 0:
        kept.total += amount
        client.expect("rpc_sync", kept.total, kept.rref.rpc_sync().add(amount))
    elif kind == 1:
        kept.total += amount
        client.expect("rpc_async", kept.total, kept.rref.rpc_async().add(amount).wait())
    else:
        opened = kept.rref.remote().opened(amount)
        client.expect("remote", kept.total + amount, opened.to_here().total)
    client.expect("to_here", kept.total, kept.rref.to_here().total)
    _put(client, kept)


def pass_on(client: Client) -> None:
    """Passes an account along several workers, which add to it, and takes it back."""
    kept = _take(client)
    if kept is not None:
        _pass_on(client, kept, client.random_route(4))
        _put(client, kept)


def leave_there(client: Client) -> None:
    """Lets another worker keep the only RRef for a while."""
    kept = _take(client)
    if kept is None:
        return
    keeper, key = client.random_peer(), client.unique_key()
    zrpc.rpc_sync(keeper, targets.keep, (key, kept.rref))
    del kept.rref
    for _ in range(client.random_int(1, 3)):
        amount = client.random_int()
        kept.total += amount
        client.expect("kept", kept.total, zrpc.rpc_sync(keeper, targets.add_kept, (key, amount)))
    kept.rref = zrpc.rpc_sync(keeper, targets.leave, (key,))
    client.expect("taken back", kept.total, kept.rref.to_here().total)
    _put(client, kept)


def share(client: Client) -> None:
    """Gives an account to several workers at once, before its owner has created it."""
    total = client.random_int()
    amounts = [client.random_int() for _ in range(client.random_int(1, 4))]
    rref = zrpc.remote(client.random_peer(), targets.later, (total, client.rng.random() / 50))
    futures = [zrpc.rpc_async(client.random_peer(), targets.add_at, (rref, a)) for a in amounts]
    wait_for_all([future.wait for future in futures])
    client.expect("the sum of all", total + sum(amounts), rref.to_here().total)


def fail(client: Client) -> None:
    """Creates an RRef whose value can't be created."""
    number, text = client.random_int(), client.unique_key()
    rref: zrpc.RRef[Any] = zrpc.remote(client.random_peer(), targets.complain, (number, text))
    for _ in range(2):
        try:
            value: Any = rref.to_here()
        except targets.ComplaintError as error:  # the same each time
            client.expect("arguments", (number, text), error.args)
        else:
            client.expect("an error", targets.ComplaintError, value)


def drop(client: Client) -> None:
    """Creates accounts and drops them at once, or drops one that was kept."""
    if client.rng.random() < 0.5:
        _take(client)
        return
    to = client.random_peer()
    for _ in range(client.random_int(1, 20)):
        zrpc.remote(to, targets.Account, (0,))


def _pass_on(client: Client, kept: _Kept, route: list[str]) -> None:
    amount = client.random_int()
    back = zrpc.rpc_sync(route[0], targets.pass_on, (route[1:], kept.rref, amount))
    kept.total += amount * len(route)
    client.expect("the same RRef", (kept.rref, hash(kept.rref)), (back, hash(back)))
    client.expect("passed on", kept.total, back.to_here().total)


def _put(client: Client, kept: _Kept) -> None:
    client.kept.append(kept)
    if len(client.kept) > _MAX_KEPT:
        client.kept.pop(client.rng.randrange(len(client.kept)))


def _take(client: Client) -> _Kept | None:
    """Removes and returns a random kept account. After an error it is not put back."""
    return client.kept.pop(client.rng.randrange(len(client.kept))) if client.kept else None


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
