"""The report of a soak test."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from zrpc.bench.soak.client import Tally


@dataclass
class Report:
    """The report of a whole run.

    Attributes:
        seed: determines the run, as far as the scheduling of threads permits.
        workers: the number of workers.
        tally: what all workers did together.
        counts: what was done to them.
        notice_seconds: the seconds between each death and the notification of each survivor.
        growth: by how many bytes in use, and by how many resident bytes, each survivor grew from
            its first idle moment to its last.
        outputs: the outputs of workers, if something went wrong.
        began: the start of the run, on the clock of ``time.monotonic``.
    """

    seed: int
    workers: int
    tally: Tally = field(default_factory=Tally)
    counts: Counter[str] = field(default_factory=Counter)
    notice_seconds: list[float] = field(default_factory=list)
    growth: list[tuple[int, int]] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def actions(self) -> int:
        """The number of successful actions."""
        return self.tally.done.total()

    def as_data(self) -> dict[str, Any]:
        """Returns the report as data for JSON."""
        return {
            "seed": self.seed,
            "workers": self.workers,
            "seconds": round(time.monotonic() - self.began, 1),
            "actions": dict(sorted(self.tally.done.items())),
            "cut_off_by_a_death": dict(sorted(self.tally.cut_off.items())),
            "meshes": dict(sorted(self.counts.items())),
            "told_of_a_death_in_s": [round(each, 3) for each in self.notice_seconds],
            "growth_in_bytes": self.growth,
            "violations": self.tally.violations,
            "outputs": self.outputs,
        }

    def as_text(self) -> str:
        """Returns a table of the counts, and each violation."""
        done, cut = self.tally.done, self.tally.cut_off
        rows = [f"{'':24}{'done':>10}{'cut off by a death':>20}"]
        rows += [f"{name:24}{done[name]:>10,}{cut[name]:>20,}" for name in sorted({*done, *cut})]
        rows += [f"{name:24}{count:>10,}" for name, count in sorted(self.counts.items())]
        rows.append(f"{self.actions:,} actions in {time.monotonic() - self.began:.0f} s")
        if self.notice_seconds:
            rows.append(
                f"survivors were notified of a death within {max(self.notice_seconds):.2f} s"
            )
        if self.growth:
            used, resident = (max(each) / 2**20 for each in zip(*self.growth, strict=True))
            rows.append(
                f"a survivor grew by at most {used:.1f} MiB in use, {resident:.0f} MiB resident"
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
