"""``zrpc doctor``: checks whether workers could start here, and reach each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import click

from .versions import Finding, Verdict, check_versions

_COLOURS: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "failure": "red"}


@click.command(short_help="Check whether workers can start here, and reach each other.")
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="The number of workers on this host. Default: the world size of the mesh, if it is known.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def command(world_size: int | None, as_json: bool) -> None:
    """Check whether workers can start here, and reach each other.

    Shows versions, the network interface, the secret and limits, each with a verdict and with what
    to do next. Run it as the engine runs your script, such as srun zrpc doctor: then it finds what
    a worker would find. It joins no mesh.

    The exit code is 1 if there is a failure, otherwise 0.
    """
    findings = list(check_versions())
    if not _failures(findings):
        from .checks import check_worker  # only now, as it needs torch and pyzmq

        findings += check_worker(world_size)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        _print(findings)
    sys.exit(1 if _failures(findings) else 0)


def _failures(findings: Sequence[Finding]) -> int:
    return sum(finding.verdict == "failure" for finding in findings)


def _print(findings: Sequence[Finding]) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        verdict = click.style(f"{finding.verdict:<8}", fg=_COLOURS[finding.verdict])
        click.echo(f"{verdict} {finding.check:<{width}}  {finding.found}")
        if finding.next_step:
            click.echo(f"{'':<9}{'':<{width}}  → {finding.next_step}")
    warnings = sum(finding.verdict == "warning" for finding in findings)
    click.echo(f"{_failures(findings)} failure(s), {warnings} warning(s)")
