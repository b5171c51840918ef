"""What workers write to a store, signed with the cluster secret.

The store itself authenticates nobody. So each entry carries a signature over its key and its value,
and an entry with a wrong signature is refused. An entry of an earlier run has a valid signature:
``zrpc.membership.rendezvous`` makes sure that it is not taken for one of this run.

An entry is ``signature SPACE value``; without a secret the signature is ``-``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from zrpc.errors import AuthenticationError
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.store_request import ask
from zrpc.wire.member_id import RANKS

T = TypeVar("T")

_PREFIX = "zrpc"
_UNSIGNED = b"-"
_SIGNATURE = re.compile(rb"-|[0-9a-f]{64}")
# A peer record has some hundred bytes; a longer entry is refused.
_MAX_BYTES = 64 * 1024
# A value that no entry has.
_NOTHING = "?"


class SignedStore:
    """The entries of zrpc in a store.

    Args:
        store: any kind of store. `delete` and `peek` need one that can delete and whose
            ``compare_set`` does not wait for an entry: all of torch can.
        secret: signs them; without one, only entries without a signature are accepted.
        deadline: until when to wait for the store's answers, on the clock of ``time.monotonic``;
            None for no limit, in a thread for which nobody waits. It may be changed at any time.

    Raises:
        RendezvousError: the store does not answer in time. Any method may raise it.
    """

    def __init__(
        self, store: Store, secret: ClusterSecret | None, deadline: float | None = None
    ) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._secret = secret
        self.deadline = deadline

    def set(self, key: str, value: str) -> None:
        """Writes an entry."""
        self._ask(self._store.set, key, self._signed(key, value))

    def claim(self, key: str, value: str) -> bool:
        """Writes an entry unless there is one under this key; returns whether it was written."""
        entry = self._signed(key, value)
        return self._compare_set(key, "", entry) == entry.encode()

    def get_or_set(self, key: str, value: str, max_bytes: int = _MAX_BYTES) -> str:
        """Writes an entry unless there is one; returns the value of the one that is there.

        Raises:
            AuthenticationError: its signature is wrong, or it has more than ``max_bytes`` bytes.
        """
        entry = self._compare_set(key, "", self._signed(key, value))
        return self.verified(key, entry, max_bytes)

    def replace(self, key: str, before: bytes, value: str) -> None:
        """Replaces an entry that was found before; b"" stands for no entry.

        Does nothing if it has changed since.
        """
        self._compare_set(key, before.decode(), self._signed(key, value))

    def delete(self, key: str) -> None:
        """Removes an entry, if there is one."""
        self._ask(self._store.delete_key, key)

    def increment(self, key: str, amount: int) -> int:
        """Adds to a number, which begins at 0 and is not signed; returns the sum."""
        return int(self._ask(self._store.add, key, amount))

    def get(self, key: str) -> str:
        """Returns the value of an entry that exists.

        Raises:
            AuthenticationError: its signature is wrong.
        """
        return self.verified(key, self.get_raw(key))

    def get_raw(self, key: str) -> bytes:
        """Returns an entry that exists, unverified."""
        return bytes(self._ask(self._store.get, key))

    def peek(self, key: str) -> bytes | None:
        """Returns an entry, unverified; None if there is none. It may be deleted at any time."""
        # A get would wait for it. This compares it with a value that no entry has: nothing is
        # written.
        entry = self._compare_set(key, _NOTHING, _NOTHING)
        return None if entry == _NOTHING.encode() else entry

    def verified(self, key: str, entry: bytes, max_bytes: int = _MAX_BYTES) -> str:
        """Returns the value of an entry that was found under a key; errors as `get_or_set`."""
        signature, _, value = entry[:max_bytes].partition(b" ")
        if not _SIGNATURE.fullmatch(signature) or len(entry) > max_bytes:
            raise AuthenticationError(
                f"expected a signature and a value under {key}, found neither: all workers must "
                "run the same version of zrpc, and nobody else may write to their store"
            )
        if self._secret is None:
            if signature != _UNSIGNED:
                raise AuthenticationError(
                    f"the entry {key} is signed with a cluster secret, but this worker has none: "
                    "give it the same ZRPC_SECRET or ZRPC_SECRET_FILE"
                )
        elif signature == _UNSIGNED:
            raise AuthenticationError(
                f"the entry {key} is not signed: give the worker that wrote it the same "
                "ZRPC_SECRET or ZRPC_SECRET_FILE as this one"
            )
        elif not self._secret.signed(key, value, signature):
            raise AuthenticationError(
                f"the entry {key} is signed with another cluster secret, or forged: give all "
                "workers the same ZRPC_SECRET or ZRPC_SECRET_FILE"
            )
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise AuthenticationError(f"the entry {key} is damaged: {error}") from error

    def _signed(self, key: str, value: str) -> str:
        signature = _UNSIGNED
        if self._secret is not None:
            signature = self._secret.signature(key, value.encode())
        return f"{signature.decode()} {value}"

    def get_all_raw(self, keys: Sequence[str]) -> list[bytes]:
        """Returns entries that exist, unverified: with one request if the store can do that."""
        return [bytes(entry) for entry in self._ask(self._store.multi_get, list(keys))]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there are entries under all these keys, signed or not."""
        return bool(self._ask(self._store.check, list(keys)))

    def _compare_set(self, key: str, expected: str, entry: str) -> bytes:
        return bytes(self._ask(self._store.compare_set, key, expected, entry))

    def _ask(self, method: Callable[..., T], *arguments: Any) -> T:
        return ask(partial(method, *arguments), self.deadline)


def take_ranks(entries: SignedStore, count: int) -> int:
    """Takes ``count`` consecutive ranks; returns the first of them.

    No other worker is given them until all `RANKS` have been given.
    """
    first = (entries.increment("ranks", count) - count) % RANKS
    return first if first + count <= RANKS else take_ranks(entries, count)
