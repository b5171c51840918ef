"""What a soak test has done and found."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from zrpc.soak.lane import Tally

__all__ = ["Record"]


@dataclass
class Record:
    """Of a whole run.

    Attributes:
        seed: from which all of it follows, as far as the scheduling of threads permits.
        workers: how many.
        tally: what the workers did, all together.
        counts: what was done to them.
        told_in: after how many seconds each survivor was told of a death.
        growth: by how many bytes in use, and resident ones, each survivor grew, from its first
            quiet moment to its last.
        outputs: of workers, where something went wrong.
        began: on the clock of ``time.monotonic``.
    """

    seed: int
    workers: int
    tally: Tally = field(default_factory=Tally)
    counts: Counter[str] = field(default_factory=Counter)
    told_in: list[float] = field(default_factory=list)
    growth: list[tuple[int, int]] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def actions(self) -> int:
        """How many were done."""
        return self.tally.done.total()

    def as_data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "seed": self.seed,
            "workers": self.workers,
            "seconds": round(time.monotonic() - self.began, 1),
            "actions": dict(sorted(self.tally.done.items())),
            "cut_off_by_a_death": dict(sorted(self.tally.cut.items())),
            "meshes": dict(sorted(self.counts.items())),
            "told_of_a_death_in_s": [round(each, 3) for each in self.told_in],
            "growth_in_bytes": self.growth,
            "violations": self.tally.violations,
            "outputs": self.outputs,
        }

    def as_text(self) -> str:
        """A table of the counts, and each violation."""
        done, cut = self.tally.done, self.tally.cut
        rows = [f"{'':24}{'done':>10}{'cut off by a death':>20}"]
        rows += [f"{name:24}{done[name]:>10,}{cut[name]:>20,}" for name in sorted({*done, *cut})]
        rows += [f"{name:24}{count:>10,}" for name, count in sorted(self.counts.items())]
        rows.append(f"{self.actions:,} actions in {time.monotonic() - self.began:.0f} s")
        if self.told_in:
            rows.append(f"survivors were told of a death after {max(self.told_in):.2f} s at most")
        if self.growth:
            used, resident = (max(each) / 2**20 for each in zip(*self.growth, strict=True))
            rows.append(
                f"a survivor grew by {used:.1f} MiB in use at most, {resident:.0f} MiB resident"
            )
        for text in self.tally.violations:
            rows += ["", f"violation: {text}"]
        for name, output in self.outputs.items():
            rows += ["", f"the end of the output of {name}:", output]
        if self.tally.violations:
            rows.append(f"\n{len(self.tally.violations)} violations; the seed is {self.seed}")
        else:
            rows.append("no violations, nothing left behind")
        return "\n".join(rows)
