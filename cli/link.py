"""``zrpc bench link``: large tensors between two network namespaces."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from . import bench_options


@click.command(short_help="Measure large tensors between two network namespaces.")
@bench_options.rounds(3, "fresh processes")
@bench_options.seconds(1.0, "size")
@bench_options.deadline("after which a size, or the start of processes, counts as failed")
@bench_options.JSON
def link(rounds: int, seconds: float, deadline: float, data_file: Path | None) -> None:
    """Measure tensors of 1, 16 and 128 MiB between two network namespaces.

    They stand for two hosts. Each tensor is sent to the other worker, over TCP: by torch, by zrpc
    without encryption, and by zrpc with keys. The raw link, measured by iperf3, is the limit. It
    needs root and iproute2.

    The exit code is 0 if zrpc sent all tensors, 1 if not, and 130 after Ctrl-C.
    """
    from zrpc.bench import link as bench
    from zrpc.bench.machine import Machine
    from zrpc.bench.namespaces import NamespaceError
    from zrpc.bench.session import Sampling

    machine, before = str(Machine.this()), os.getloadavg()[0]
    click.echo(machine)
    try:
        speeds = bench.measure(
            rounds, Sampling(seconds=seconds), deadline, lambda name: click.echo(name, err=True)
        )
    except NamespaceError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        bench_options.exit_interrupted()
    after = os.getloadavg()[0]
    click.echo(f"load average {before:.1f} before, {after:.1f} after\n\n{bench.as_text(speeds)}")
    tensors = [
        {"way": way, "bytes": size, "bytes_per_second": rounds_}
        for (way, size), rounds_ in speeds.tensors.items()
    ]
    content = {"machine": machine, "load": [before, after], "raw": speeds.raw, "tensors": tensors}
    bench_options.write_data(data_file, {**content, "failures": speeds.failures})
    sys.exit(int(any(failure.startswith("zrpc") for failure in speeds.failures)))
