"""Runs torch's own tests of its RPC on zrpc, and compares the results with the documented table.

python -m tests.compatibility            # fails if docs/compatibility.md doesn't hold
python -m tests.compatibility --update   # also runs them on torch, and writes the page
python -m tests.compatibility --cuda     # those of CUDA that torch itself passes on this machine
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.compatibility import table

ROOT = Path(__file__).parents[2]
_ON_ZRPC = ["-m", "zrpc.cli", "run"]
_SUITES = ["-m", "tests.compatibility.suites"]


def results(names: Sequence[str], jobs: int, *, on_zrpc: bool) -> dict[str, dict[str, Any]]:
    """Runs the tests of these names, or all, in several processes at once."""
    command = [sys.executable, *(_ON_ZRPC if on_zrpc else []), *_SUITES]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "results")
        log = Path(directory, "log")
        shares = [names[i::jobs] for i in range(jobs)] if names else [[]]
        with log.open("wb") as output:
            running = [
                subprocess.Popen(
                    [*command, str(path), *share], cwd=ROOT, stdout=output, stderr=output
                )
                for share in shares
                if share or not names
            ]
            codes = [process.wait() for process in running]
        if any(codes):
            raise SystemExit(log.read_text(errors="replace")[-5000:])
        found = [json.loads(line) for line in path.read_text().splitlines()]
    return {result["name"]: result for result in found}


def unexpected(names: Sequence[str], jobs: int) -> list[str]:
    """Runs these tests on zrpc; returns how they differ from the rows of the page."""
    rows = table.read(table.PAGE.read_text())
    found = results(names, jobs, on_zrpc=True)
    again = [name for name in names if rows[name].passes != _passes(found[name])]
    if again:  # on a busy machine, some of torch's own limits are short
        found.update(results(again, 1, on_zrpc=True))
    return [
        f"{name}: expected {rows[name].result!r}, but it {found[name]['outcome']}\n"
        f"{found[name]['reason']}"
        for name in again
        if rows[name].passes != _passes(found[name])
    ]


def update(jobs: int) -> None:
    """Runs all tests on torch and on zrpc, and writes the page."""
    page = table.PAGE.read_text()
    before = table.read(page)
    on_torch = results([], 1, on_zrpc=False)
    names = [name for name, result in on_torch.items() if _passes(result)]
    found = results(names, jobs, on_zrpc=True)
    rows = {}
    for name in names:
        old = before.get(name)
        why = table.UNEXPLAINED if old is None or old.passes else old.result
        text = table.PASSES if _passes(found[name]) else why
        rows[name] = table.Row(tuple(on_torch[name]["private"]), text)
    table.PAGE.write_text(table.write(page, rows))


def cuda(jobs: int) -> list[str]:
    """Runs torch's tests of CUDA; returns how zrpc differs in those that torch passes here."""
    from tests.compatibility import suites  # torch's tests take seconds to load

    on_torch = results(suites.names(suites.CUDA_SUITES), jobs, on_zrpc=False)
    names = [name for name, result in on_torch.items() if _passes(result)]
    print(f"torch passes {len(names)} of its {len(on_torch)} tests of CUDA here", flush=True)
    found = results(names, jobs, on_zrpc=True) if names else {}
    return [
        f"{name}: {result['outcome']}\n{result['reason']}"
        for name, result in found.items()
        if not _passes(result)
    ]


def _passes(result: dict[str, Any]) -> bool:
    return bool(result["outcome"] == "passes")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write docs/compatibility.md")
    parser.add_argument("--cuda", action="store_true", help="run those of CUDA, and write nothing")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.cuda:
        problems = cuda(options.jobs)
        sys.exit("\n".join(problems) or None)
    if options.update:
        update(options.jobs)
    problems = unexpected(list(table.read(table.PAGE.read_text())), options.jobs)
    print("\n".join(problems) or "docs/compatibility.md holds")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
