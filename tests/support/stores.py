"""Stores of each kind, and one that remembers what is asked of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

STORES = "hash", "file", "tcp"


def opener(kind: str, directory: Path) -> Callable[[], dist.Store]:
    """Returns a function that opens a store of one kind, like one more process each time."""
    if kind == "tcp":
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return lambda: dist.TCPStore("127.0.0.1", host.port, is_master=False)
    if kind == "file":
        return lambda: dist.FileStore(str(directory / "store"), -1)
    store = dist.HashStore()
    return lambda: store


class RecordingStore(dist.Store):
    """Counts the requests to a store, and remembers what was written.

    Args:
        store: default: a new one of this process.

    Attributes:
        entries: by key, as they were written last.
        requests: how many there were, without those that poll.
        keys_asked: how many keys those have named.
    """

    def __init__(self, store: dist.Store | None = None) -> None:
        super().__init__()
        self.entries: dict[str, bytes] = {}
        self.requests = self.keys_asked = 0
        self._store = store or dist.HashStore()
        self._lock = threading.Lock()  # guards the numbers

    def set(self, key: str, value: Any) -> None:
        self._count()
        self.entries[key] = value if isinstance(value, bytes) else value.encode()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._count()
        return self._store.get(key)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._count()
        self.entries[key] = found = self._store.compare_set(key, expected, value)
        return found

    def multi_get(self, keys: list[str]) -> Any:
        self._count_keys(keys)
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        self._count_keys(keys)
        return self._store.check(keys)

    def step(self) -> None:
        """Is called before each request."""

    def _count_keys(self, keys: list[str]) -> None:
        self.step()
        with self._lock:
            self.keys_asked += len(keys)

    def _count(self) -> None:
        self.step()
        with self._lock:
            self.requests += 1
