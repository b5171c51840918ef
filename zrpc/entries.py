"""What workers tell each other through a store, signed with the cluster secret.

The store itself asks nobody who they are. So each entry carries a signature over its key and
its value, and what is not signed as it must be is not read. An entry of an earlier run is signed
just as well: ``zrpc.rendezvous`` sees to it that it is not taken for one of this run.

An entry is ``signature SPACE value``; without a secret the signature is ``-``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed import PrefixStore, Store

from zrpc.errors import AuthenticationError
from zrpc.secret import ClusterSecret

__all__ = ["Entries"]

_PREFIX = "zrpc"
_UNSIGNED = b"-"
_SIGNATURE = re.compile(rb"-|[0-9a-f]{64}")
# A card has some hundred bytes; what is longer is not read.
_LONGEST = 64 * 1024
# What no entry is, and how one is named that is never there.
_NOTHING = "?"


class Entries:
    """The entries of zrpc in a store.

    Args:
        store: any.
        secret: signs them; without one, only entries without a signature are read.
    """

    def __init__(self, store: Store, secret: ClusterSecret | None) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._secret = secret
        self._can_forget: bool | None = None  # nobody has asked

    def set(self, key: str, value: str) -> None:
        """Writes an entry."""
        self._store.set(key, self._signed(key, value))

    def claim(self, key: str, value: str) -> bool:
        """Writes an entry unless there is one under this key; returns whether that was done."""
        entry = self._signed(key, value)
        return bytes(self._store.compare_set(key, "", entry)) == entry.encode()

    def first(self, key: str, value: str, longest: int = _LONGEST) -> str:
        """The entry under a key that was written first, now or before.

        Raises:
            AuthenticationError: it is not signed as it must be, or has more bytes than ``longest``.
        """
        entry = self._store.compare_set(key, "", self._signed(key, value))
        return self.opened(key, bytes(entry), longest)

    def replace(self, key: str, before: bytes, value: str) -> None:
        """Writes an entry in place of one that was found there; b"" stands for none.

        Does nothing where something else is there by now.
        """
        self._store.compare_set(key, before.decode(), self._signed(key, value))

    def delete(self, key: str) -> None:
        """Removes an entry, where there is one."""
        self._store.delete_key(key)

    @property
    def can_forget(self) -> bool:
        """Whether `delete` works, and `peek` sees at once that there is nothing.

        All stores that come with torch can; of others, torch does not ask for it.
        """
        if self._can_forget is None:
            try:
                self._store.delete_key(_NOTHING)
                self._can_forget = self._peek(_NOTHING) is None
            except RuntimeError:  # also where the store is gone, which shows soon enough
                self._can_forget = False
        return self._can_forget

    def count(self, key: str, more: int) -> int:
        """Adds to a number, which begins at 0 and is not signed; returns the sum."""
        return int(self._store.add(key, more))

    def get(self, key: str) -> str:
        """Reads an entry that is there.

        Raises:
            AuthenticationError: it is not signed as it must be.
        """
        return self.opened(key, self.raw(key))

    def raw(self, key: str) -> bytes:
        """An entry that is there, unread."""
        return bytes(self._store.get(key))

    def peek(self, key: str) -> bytes | None:
        """An entry, unread; None where there is none. It may be deleted at any time."""
        if self.can_forget:
            return self._peek(key)
        return self.raw(key) if self.check([key]) else None

    def _peek(self, key: str) -> bytes | None:
        # A get would wait for it. This compares it with what it can't be, and so writes nothing.
        entry = bytes(self._store.compare_set(key, _NOTHING, _NOTHING))
        return None if entry == _NOTHING.encode() else entry

    def opened(self, key: str, entry: bytes, longest: int = _LONGEST) -> str:
        """The value of an entry that was found under a key; see `first`."""
        signature, _, value = entry[:longest].partition(b" ")
        if not _SIGNATURE.fullmatch(signature) or len(entry) > longest:
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

    def all_raw(self, keys: Sequence[str]) -> list[bytes]:
        """Entries that are there, unread: with one request, where the store can do that."""
        return [bytes(entry) for entry in self._store.multi_get(list(keys))]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there are entries under all these keys, signed or not."""
        return bool(self._store.check(list(keys)))
