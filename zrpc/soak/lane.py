"""A lane: one thread of a worker that does one random thing after the other, and checks each."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zrpc.errors import RpcError, WorkerDied

__all__ = ["Action", "Failed", "Lane", "Tally"]

# After these many seconds an action is too slow: longer than any pause, shorter than the
# timeout of a call.
_MOST_SECONDS = 40.0


class Failed(Exception):
    """What came of an action is not what had to come."""


@dataclass
class Tally:
    """What lanes have done.

    Attributes:
        done: how often each action was done, and its results were right.
        cut: how often each action ended with the death of the worker that was killed.
        violations: what went wrong, a text for each.
        met: when lanes met a death, on the clock of ``time.monotonic``, which all processes
            of a machine share.
        told: when workers were told of it.
    """

    done: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    met: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Adds another's."""
        self.done += other.done
        self.cut += other.cut
        self.violations += other.violations
        self.met += other.met
        self.told += other.told


Action = Callable[["Lane"], None]


class Lane(threading.Thread):
    """Does what `actions` has to offer, at random, until its time is over.

    Args:
        name: unique in the mesh's life; its seed too.
        seed: of its random numbers.
        me: the worker's name.
        peers: the other workers' names, also of one that is to be killed, or dead.
        doomed: the worker that may die meanwhile.
        until: when to stop, on the clock of ``time.monotonic``.
        actions: what there is to do, each with its weight.
        all_once: whether to do each of them once, first of all.

    Attributes:
        rng: random numbers, from the seed.
        tally: what it has done.
        sent: to whom it has sent how many marks.
        shelf: what lasts from one action to the next.
    """

    def __init__(
        self,
        name: str,
        seed: str,
        me: str,
        peers: Sequence[str],
        doomed: str | None,
        until: float,
        actions: Sequence[tuple[Action, int]],
        all_once: bool,
    ) -> None:
        super().__init__(name=f"zrpc-soak-{name}", daemon=True)
        self.caller = name
        self.rng = random.Random(seed)
        self.me = me
        self.peers = list(peers)
        self.doomed = doomed
        self.tally = Tally()
        self.sent: Counter[str] = Counter()
        self.shelf: list[Any] = []
        self._until = until
        self._actions = [action for action, _ in actions]
        self._weights = [weight for _, weight in actions]
        self._all_once = all_once
        self._count = 0

    def run(self) -> None:
        """The life of the thread."""
        if self._all_once:
            for action in self.rng.sample(self._actions, len(self._actions)):
                self.do(action)
        while time.monotonic() < self._until and not self.tally.violations:
            (action,) = self.rng.choices(self._actions, self._weights)
            self.do(action)
        self.shelf.clear()

    def do(self, action: Action) -> None:
        """Does one thing, and notes what came of it."""
        name = action.__name__
        self._count += 1
        began = time.monotonic()
        try:
            action(self)
        except Exception as error:
            if self._by_death(error):
                self.tally.cut[name] += 1
                self.tally.met.append(time.monotonic())
            else:
                self._violation(name, traceback.format_exc())
            # A traceback refers to its frames, and by them to all that they hold.
            traceback.clear_frames(error.__traceback__)
        else:
            self.tally.done[name] += 1
        if (taken := time.monotonic() - began) > _MOST_SECONDS:
            self._violation(name, f"it took {taken:.1f} s")

    def peer(self) -> str:
        """Another worker."""
        return self.rng.choice(self.peers)

    def way(self, most: int) -> list[str]:
        """Some workers to go to one after the other, this one not among them."""
        return [self.peer() for _ in range(self.rng.randint(1, most))]

    def whole(self, low: int = -1000, high: int = 1000) -> int:
        """A whole number."""
        return self.rng.randint(low, high)

    def key(self) -> str:
        """A name that no other action uses."""
        return f"{self.caller}.{self._count}.{self.rng.getrandbits(32):x}"

    def expect(self, what: str, expected: Any, found: Any) -> None:
        """Raises where a value is not the expected one."""
        if expected != found:
            raise Failed(f"{what}: expected {expected!r}, found {found!r}")

    def _by_death(self, error: BaseException) -> bool:
        """Whether that is how the death of the doomed worker may show.

        It is a WorkerDied; one that another worker met is told with a traceback, or by the
        error of a backward pass. All of them name who is gone.
        """
        if self.doomed is None or not isinstance(error, RpcError):
            return False
        return self.doomed in str(error) and (
            isinstance(error, WorkerDied) or "WorkerDied" in str(error)
        )

    def _violation(self, action: str, text: str) -> None:
        self.tally.violations.append(
            f"{self.me}, {self.caller}, action {self._count} ({action}): {text.rstrip()}"
        )
