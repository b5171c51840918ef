"""What the lanes of a soak test have run on other workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any, NoReturn

import torch

import zrpc

__all__ = [
    "Account",
    "ComplaintError",
    "ask_another",
    "complain",
    "complain_oddly",
    "draw",
    "forget",
    "hop",
    "keep",
    "later",
    "leave",
    "mark",
    "marked",
    "rest",
    "scale",
    "scale_slowly",
    "unpicklable",
    "until_cancelled",
    "until_cancelled_slowly",
]

# All that is kept here between calls; the lock guards both.
_lock = threading.Lock()
_marks: Counter[str] = Counter()
_shelf: dict[str, Any] = {}


class ComplaintError(Exception):
    """An exception of a program's own, with arguments of its own."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)


class Account:
    """A value that RRefs refer to: it adds up, and is counted as long as it lives."""

    alive = 0

    def __init__(self, total: int = 0) -> None:
        with _lock:
            Account.alive += 1
        self.total = total

    def add(self, amount: int) -> int:
        """Adds; returns the total."""
        self.total += amount
        return self.total

    def opened(self, amount: int) -> Account:
        """A new account with so much more in it."""
        return Account(self.total + amount)

    def __del__(self) -> None:
        with _lock:
            Account.alive -= 1

    def __reduce__(self) -> Any:
        return Account, (self.total,)


def mark(caller: str) -> None:
    """Counts how often a caller's calls have run here."""
    with _lock:
        _marks[caller] += 1


def marked(caller: str) -> int:
    """How often that was; forgets it."""
    with _lock:
        return _marks.pop(caller, 0)


def scale(tensor: torch.Tensor, factor: int) -> torch.Tensor:
    """The product, in a new tensor."""
    return tensor * factor


async def scale_slowly(tensor: torch.Tensor, factor: int, seconds: float) -> torch.Tensor:
    """The same, in the event loop."""
    await asyncio.sleep(seconds)
    return tensor * factor


def draw(seed: int, count: int) -> torch.Tensor:
    """Whole numbers that are the same for the same seed on each worker."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1000, 1000, (count,), generator=generator, dtype=torch.int32)


def hop(way: list[str], value: int) -> int:
    """Goes on to the next worker of the way; each adds one."""
    if not way:
        return value
    return zrpc.rpc_sync(way[0], hop, (way[1:], value + 1))


@zrpc.functions.async_execution
def ask_another(to: str, tensor: torch.Tensor, factor: int) -> Any:
    """`scale` by another worker, without a thread that waits here."""
    return zrpc.rpc_async(to, scale, (tensor, factor)).then(lambda future: future.wait() + 1)


def complain(number: int, text: str) -> NoReturn:
    """Fails with an exception that can travel."""
    raise ComplaintError(number, text)


def complain_oddly(text: str) -> NoReturn:
    """Fails with one that can't."""

    class HomemadeError(Exception):
        def __reduce__(self) -> NoReturn:
            raise TypeError("not to be pickled")

    raise HomemadeError(text)


def unpicklable() -> Any:
    """Returns what can't travel."""
    return threading.Lock()


def until_cancelled(seconds: float) -> bool:
    """Waits for its caller to cancel it."""
    return zrpc.current_call().wait_cancelled(seconds)


async def until_cancelled_slowly(seconds: float) -> None:
    """The same, in the event loop."""
    await asyncio.sleep(seconds)


def rest(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "rested"


def later(amount: int, seconds: float) -> Account:
    """An account that takes its time to be opened."""
    time.sleep(seconds)
    return Account(amount)


def keep(key: str, value: Any) -> None:
    """Keeps a value here, an RRef say, until `leave`."""
    with _lock:
        _shelf[key] = value


def leave(key: str) -> Any:
    """Gives back what is kept here."""
    with _lock:
        return _shelf.pop(key)


def forget() -> None:
    """Lets go of all that is kept here."""
    with _lock:
        kept = list(_shelf.values())
        _shelf.clear()
        _marks.clear()
    kept.clear()


def add_at(rref: Any, amount: int) -> int:
    """Adds to somebody's account, from here."""
    total: int = rref.rpc_sync().add(amount)
    return total


def add_kept(key: str, amount: int) -> int:
    """Adds to the account that is kept here."""
    with _lock:
        rref = _shelf[key]
    total: int = rref.rpc_sync().add(amount)
    return total


def pass_on(way: list[str], rref: Any, amount: int) -> Any:
    """Hands an RRef on along the way; each worker adds, and the last gives it back."""
    rref.rpc_sync().add(amount)
    if not way:
        return rref
    return zrpc.rpc_sync(way[0], pass_on, (way[1:], rref, amount))
