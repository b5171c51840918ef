"""The functions and classes that the clients of a soak test call on other workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any, NoReturn

import torch

import zrpc

# The lock guards both: all that is kept here between calls.
_lock = threading.Lock()
_marks: Counter[str] = Counter()
_shelf: dict[str, Any] = {}


class ComplaintError(Exception):
    """A user-defined exception with its own arguments."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)


class Account:
    """A value that RRefs refer to: a total to add to. It is counted while it is alive."""

    alive = 0

    def __init__(self, total: int = 0) -> None:
        with _lock:
            Account.alive += 1
        self.total = total

    def add(self, amount: int) -> int:
        """Adds an amount and returns the total."""
        self.total += amount
        return self.total

    def opened(self, amount: int) -> Account:
        """Returns a new account with a total that is ``amount`` larger."""
        return Account(self.total + amount)

    def __del__(self) -> None:
        with _lock:
            Account.alive -= 1

    def __reduce__(self) -> Any:
        return Account, (self.total,)


def mark(caller: str) -> None:
    """Counts a call of a client that has run here."""
    with _lock:
        _marks[caller] += 1


def marked(caller: str) -> int:
    """Returns the count of a client's calls and resets it."""
    with _lock:
        return _marks.pop(caller, 0)


def scale(tensor: torch.Tensor, factor: int) -> torch.Tensor:
    """Returns the product in a new tensor."""
    return tensor * factor


async def scale_slowly(tensor: torch.Tensor, factor: int, seconds: float) -> torch.Tensor:
    """Does what `scale` does, in the event loop and after a delay."""
    await asyncio.sleep(seconds)
    return tensor * factor


def draw(seed: int, count: int) -> torch.Tensor:
    """Returns random integers, the same on each worker for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1000, 1000, (count,), generator=generator, dtype=torch.int32)


def hop(route: list[str], value: int) -> int:
    """Passes the call on along the route; each worker adds one."""
    if not route:
        return value
    return zrpc.rpc_sync(route[0], hop, (route[1:], value + 1))


@zrpc.functions.async_execution
def ask_another(to: str, tensor: torch.Tensor, factor: int) -> Any:
    """Calls `scale` on another worker, without a thread that waits here."""
    return zrpc.rpc_async(to, scale, (tensor, factor)).then(lambda future: future.wait() + 1)


def complain(number: int, text: str) -> NoReturn:
    """Raises an exception that can be pickled."""
    raise ComplaintError(number, text)


def complain_oddly(text: str) -> NoReturn:
    """Raises an exception that can't be pickled."""

    class HomemadeError(Exception):
        def __reduce__(self) -> NoReturn:
            raise TypeError("not to be pickled")

    raise HomemadeError(text)


def unpicklable() -> Any:
    """Returns an object that can't be pickled."""
    return threading.Lock()


def until_cancelled(seconds: float) -> bool:
    """Waits until its caller cancels it."""
    return zrpc.current_call().wait_cancelled(seconds)


async def until_cancelled_slowly(seconds: float) -> None:
    """Waits in the event loop until its caller cancels it."""
    await asyncio.sleep(seconds)


def rest(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "rested"


def later(amount: int, seconds: float) -> Account:
    """Returns a new account after a delay."""
    time.sleep(seconds)
    return Account(amount)


def keep(key: str, value: Any) -> None:
    """Keeps a value here, for example an RRef, until `leave`."""
    with _lock:
        _shelf[key] = value


def leave(key: str) -> Any:
    """Removes and returns a value that is kept here."""
    with _lock:
        return _shelf.pop(key)


def forget() -> None:
    """Drops everything that is kept here."""
    with _lock:
        kept = list(_shelf.values())
        _shelf.clear()
        _marks.clear()
    kept.clear()


def add_at(rref: Any, amount: int) -> int:
    """Adds to an account of any owner, from this worker."""
    return int(rref.rpc_sync().add(amount))


def add_kept(key: str, amount: int) -> int:
    """Adds to an account whose RRef is kept here."""
    with _lock:
        rref = _shelf[key]
    return add_at(rref, amount)


def pass_on(route: list[str], rref: Any, amount: int) -> Any:
    """Passes an RRef on along the route. Each worker adds, and the last returns the RRef."""
    rref.rpc_sync().add(amount)
    if not route:
        return rref
    return zrpc.rpc_sync(route[0], pass_on, (route[1:], rref, amount))
