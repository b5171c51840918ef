"""A client that works with random calls while a fault happens, and checks each result."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import override

import zrpc
from zrpc.bench.soak import calls, gradients, references, targets
from zrpc.bench.soak.client import Action, Client
from zrpc.errors import RpcError

__all__ = ["FaultClient"]

_LEAST_BYTES = 1024


class FaultClient(Client):
    """Performs actions; an error must name a worker that the fault may separate from another one.

    Args:
        name: unique in the run; the seed of its random numbers.
        worker: the name of its worker.
        names: the names of all workers.
        suspects: those whose loss explains an error.
        until: when to stop, on the clock of ``time.monotonic``.
        most_bytes: the size of the largest tensors.
        limit: how long an action may take, in seconds.
        interrupted: whether its thread may be interrupted: an action that cancels calls would then
            leave them, and they run without limit.

    Attributes:
        suspects: may be replaced while it works.
        leaves: whether its worker leaves the mesh meanwhile.
    """

    def __init__(
        self,
        name: str,
        worker: str,
        names: Sequence[str],
        suspects: Collection[str],
        until: float,
        most_bytes: int,
        limit: float = math.inf,
        interrupted: bool = False,
    ) -> None:
        peers = [each for each in names if each != worker]
        actions = [each for each in ACTIONS if not interrupted or each[0] is not calls.cancels]
        super().__init__(name, worker, peers, None, until, actions)
        self.suspects = suspects
        self.leaves = False
        self._most_bytes = most_bytes
        self._limit = limit

    @override
    def perform(self, action: Action) -> None:
        began = time.monotonic()
        super().perform(action)
        taken = time.monotonic() - began
        if taken > self._limit:
            self.tally.violations.append(f"{action.__name__} took {taken:.1f} s")

    @override
    def caused_by_death(self, error: BaseException) -> bool:
        if self.leaves and isinstance(error, zrpc.NotInitializedError):
            return True
        if not isinstance(error, RpcError) or not self.suspects:
            return False
        text = str(error)
        # The owner has lost the worker that had the reference.
        if "is no longer here" in text:
            return True
        lost = isinstance(error, zrpc.WorkerDied) or "WorkerDied" in text or "OwnerDied" in text
        return lost and any(name in text for name in self.suspects)

    def random_tensor(self) -> torch.Tensor:
        """Returns a tensor of 1 KiB to the largest size; one of three has that."""
        most = self._most_bytes
        if self.rng.random() < 2 / 3:
            most = int(_LEAST_BYTES * (most / _LEAST_BYTES) ** self.rng.random())
        return torch.arange(most // torch.int32.itemsize, dtype=torch.int32) + self.random_int()


def transfer(client: Any) -> None:
    """Sends a tensor there and back."""
    tensor = client.random_tensor()
    found = zrpc.rpc_sync(client.random_peer(), targets.scale, (tensor, 2))
    calls.same("transfer", tensor * 2, found)


def to_all(client: Any) -> None:
    """Sends a tensor to all others, once to each host, and looks at each answer."""
    whole = client.random_tensor()
    tensor = whole[: len(whole) // 8]
    factors = range(len(client.peers))
    arguments = (tensor, zrpc.each(factors))
    answers: dict[int, Any] = {}
    try:
        results = zrpc.rpc_sync(zrpc.group(client.peers), targets.scale, arguments)
        answers = dict(enumerate(results))
    except zrpc.GroupError as error:
        answers = error.results
        unexplained = [e for e in error.errors.values() if not client.caused_by_death(e)]
        raise (unexplained or [*error.errors.values()])[0] from None
    finally:
        for place, answer in answers.items():
            calls.same("to all", tensor * factors[place], answer)


def stream(client: Client) -> None:
    """Reads a stream of tensors to its end, or closes it before."""
    seed, to = client.random_int(0, 1 << 20), client.random_peer()
    read, made = sorted(client.rng.choices(range(40), k=2))
    prefetch = client.random_int(1, 20)
    with zrpc.rpc_stream(to, _tensors, (seed, made), prefetch=prefetch) as items:
        found = list(itertools.islice(items, read))
    client.expect("items", read, len(found))
    for place, item in enumerate(found):
        calls.same("item", targets.draw(seed + place, 500), item)


def _tensors(seed: int, count: int) -> Iterator[torch.Tensor]:
    for place in range(count):
        yield targets.draw(seed + place, 500)


@zrpc.actor
class Sum:
    """A sum to which the calls of a caller add in their order."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, number: int) -> int:
        """Returns the new total."""
        self._total += number
        return self._total


def actor(client: Client) -> None:
    """Makes many calls to an actor at once, which run in their order."""
    made = zrpc.remote(client.random_peer(), Sum)
    numbers = [client.random_int() for _ in range(client.random_int(1, 20))]
    futures = [made.rpc_async().add(number) for number in numbers]
    found = [future.wait() for future in futures]
    client.expect("the sums", list(itertools.accumulate(numbers)), found)


ACTIONS: list[tuple[Action, int]] = [
    *calls.ACTIONS,
    *references.ACTIONS,
    *gradients.ACTIONS,
    (transfer, 3),
    (to_all, 2),
    (stream, 4),
    (actor, 4),
]
