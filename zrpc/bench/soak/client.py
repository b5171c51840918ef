"""A client: a thread of a worker that performs random actions and checks their results."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from zrpc.errors import RpcError, WorkerDied

# An action that takes longer is too slow. Longer than any pause, shorter than the timeout of a
# call.
_MAX_ACTION_SECONDS = 40.0


class CheckFailed(Exception):
    """An action had a wrong result."""


@dataclass
class Tally:
    """What clients have done.

    Times are on the clock of ``time.monotonic``, which all processes of a machine share.

    Attributes:
        done: by action, how often it succeeded.
        cut_off: by action, how often the death of the killed worker made it fail.
        violations: the errors found, one text each.
        deaths_seen_at: the times at which actions failed because of a death.
        notified_at: the times at which workers were notified of a death.
    """

    done: Counter[str] = field(default_factory=Counter)
    cut_off: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    deaths_seen_at: list[float] = field(default_factory=list)
    notified_at: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Adds another tally to this one."""
        self.done += other.done
        self.cut_off += other.cut_off
        self.violations += other.violations
        self.deaths_seen_at += other.deaths_seen_at
        self.notified_at += other.notified_at


Action = Callable[["Client"], None]


class Client(threading.Thread):
    """A thread that performs random actions until its time is over.

    Args:
        name: unique in the episode; the seed of its random numbers.
        worker: the name of its worker.
        peers: the names of the other workers, including one that will be killed or is dead.
        doomed: the worker that may die meanwhile, or is dead.
        until: when to stop, on the clock of ``time.monotonic``.
        actions: the actions with their weights.
        warm_up: whether to perform each action once first.

    Attributes:
        rng: random numbers from the name.
        tally: what it has done.
        marks_sent: by worker, how many marks it has sent.
        kept: objects that last from one action to the next.
        until: when it begins no more action, on the clock of ``time.monotonic``.
    """

    def __init__(
        self,
        name: str,
        worker: str,
        peers: Sequence[str],
        doomed: str | None,
        until: float,
        actions: Sequence[tuple[Action, int]],
        warm_up: bool = False,
    ) -> None:
        super().__init__(name=f"zrpc-soak-{name}", daemon=True)
        self.client_name = name
        self.rng = random.Random(name)
        self.worker = worker
        self.peers = list(peers)
        self.doomed = doomed
        self.tally = Tally()
        self.marks_sent: Counter[str] = Counter()
        self.kept: list[Any] = []
        self.until = until
        self._actions = [action for action, _ in actions]
        self._weights = [weight for _, weight in actions]
        self._warm_up = warm_up
        self._count = 0

    @override
    def run(self) -> None:  # until the time is over or a check fails
        if self._warm_up:
            for action in self.rng.sample(self._actions, len(self._actions)):
                self.perform(action)
        while time.monotonic() < self.until and not self.tally.violations:
            (action,) = self.rng.choices(self._actions, self._weights)
            self.perform(action)
        self.kept.clear()

    def perform(self, action: Action) -> None:
        """Performs one action and records its outcome."""
        name = action.__name__
        self._count += 1
        began = time.monotonic()
        try:
            action(self)
        except Exception as error:
            if self.caused_by_death(error):
                self.tally.cut_off[name] += 1
                self.tally.deaths_seen_at.append(time.monotonic())
            else:
                self._violation(name, traceback.format_exc())
            # A traceback keeps its frames alive, and so all of their variables.
            traceback.clear_frames(error.__traceback__)
        else:
            self.tally.done[name] += 1
        if (taken := time.monotonic() - began) > _MAX_ACTION_SECONDS:
            self._violation(name, f"it took {taken:.1f} s")

    def random_peer(self) -> str:
        """Returns the name of another worker."""
        return self.rng.choice(self.peers)

    def random_route(self, max_hops: int) -> list[str]:
        """Returns the names of other workers, to be visited in this order."""
        return [self.random_peer() for _ in range(self.rng.randint(1, max_hops))]

    def random_int(self, low: int = -1000, high: int = 1000) -> int:
        """Returns a random integer."""
        return self.rng.randint(low, high)

    def unique_key(self) -> str:
        """Returns a name that no other action uses."""
        return f"{self.client_name}.{self._count}.{self.rng.getrandbits(32):x}"

    def expect(self, what: str, expected: Any, found: Any) -> None:
        """Raises if a value is not the expected one."""
        if expected != found:
            raise CheckFailed(f"{what}: expected {expected!r}, found {found!r}")

    def caused_by_death(self, error: BaseException) -> bool:
        """Returns whether the death of the doomed worker explains an error.

        It does if this is a `WorkerDied`, or an error that contains one from another worker: as a
        traceback, or as the error of a backward pass. All of them name the lost worker.
        """
        if self.doomed is None or not isinstance(error, RpcError):
            return False
        return self.doomed in str(error) and (
            isinstance(error, WorkerDied) or "WorkerDied" in str(error)
        )

    def _violation(self, action: str, text: str) -> None:
        self.tally.violations.append(
            f"{self.worker}, {self.client_name}, action {self._count} ({action}): {text.rstrip()}"
        )
