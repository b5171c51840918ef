"""What large tensors get of a link between two hosts, as ``zrpc bench link`` measures it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from zrpc.bench.mesh import Mesh, MeshError
from zrpc.bench.namespaces import ADDRESSES, two_namespaces
from zrpc.bench.result import Spread
from zrpc.bench.run import warm_starter
from zrpc.bench.session import Sampling
from zrpc.bench.table import align_columns
from zrpc.launch import Starter

SIZES = (1 << 20, 1 << 24, 1 << 27)
# How a tensor is sent: the library, and whether it encrypts.
WAYS = {"torch": ("torch", False), "zrpc": ("zrpc", False), "zrpc with keys": ("zrpc", True)}
RAW = "iperf3"

_RAW_SECONDS = 2
_RAW_LIMIT_SECONDS = 30.0


@dataclass
class Speeds:
    """The results of all rounds.

    Attributes:
        raw: bytes per second through one plain TCP connection, for each round.
        tensors: bytes per second, for each round, by way and size.
        failures: the reasons for failures.
    """

    raw: list[float] = field(default_factory=list)
    tensors: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def measure(
    rounds: int, sampling: Sampling, deadline: float, on_start: Callable[[str], object]
) -> Speeds:
    """Measures one-way sends between two network namespaces, and the raw link.

    Args:
        rounds: how often; each round has fresh processes.
        sampling: how long and how often to repeat each send.
        deadline: seconds for each start and each measurement.
        on_start: called with a name before each measurement.

    Raises:
        NamespaceError: this user or this system can't make network namespaces.
    """
    speeds = Speeds()
    with two_namespaces() as names, warm_starter() as starter:
        for _ in range(rounds):
            on_start(RAW)
            speeds.raw += _raw_speed(names, speeds.failures)
            for way in WAYS:
                on_start(way)
                try:
                    for size, speed in _tensor_speeds(way, starter, names, sampling, deadline):
                        speeds.tensors.setdefault((way, size), []).append(speed)
                except MeshError as error:
                    speeds.failures.append(f"{way}: {error}")
    return speeds


def _tensor_speeds(
    way: str, starter: Starter, names: Sequence[str], sampling: Sampling, deadline: float
) -> Iterator[tuple[int, float]]:
    library, keys = WAYS[way]
    mesh = Mesh(starter, library, 2, tcp=True, keys=keys, namespaces=names, timeout=deadline)
    with mesh:
        for size in SIZES:
            yield size, size / mesh.measure("tensors:one_way", (size,), sampling, deadline).value


def _raw_speed(names: Sequence[str], failures: list[str]) -> list[float]:
    """Returns the bytes per second of iperf3; nothing, with the reason noted, if it fails."""
    if shutil.which("iperf3") is None:
        failures.append("the raw link needs iperf3: apt-get install iperf3")
        return []
    here, there = (["ip", "netns", "exec", name, "iperf3"] for name in names)
    server = subprocess.Popen(
        [*there, "--server", "--one-off", "--bind", ADDRESSES[1], "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    )
    client = ["--client", ADDRESSES[1], "--time", str(_RAW_SECONDS), "--json"]
    with server:
        try:
            for line in server.stdout or ():
                if "listening" in line:
                    break
            done = subprocess.run(
                [*here, *client], capture_output=True, timeout=_RAW_LIMIT_SECONDS, check=True
            )
            return [json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8]
        except (subprocess.SubprocessError, ValueError, KeyError) as error:
            failures.append(f"{RAW}: {error}")
            return []
        finally:
            server.kill()


def as_text(speeds: Speeds) -> str:
    """Returns a table of the medians in MB/s with the slowest and the fastest round."""
    lines = [["MB/s", *WAYS, "cost of keys"]]
    for size in SIZES:
        found = [Spread.of(speeds.tensors.get((way, size), ())) for way in WAYS]
        _, plain, encrypted = found
        cost = f"{plain.median / encrypted.median:.2f} times" if plain and encrypted else "-"
        lines.append([f"{size >> 20} MiB", *map(_cell, found), cost])
    raw = f"raw TCP ({RAW}): {_cell(Spread.of(speeds.raw))} MB/s"
    failures = [f"* {failure}" for failure in dict.fromkeys(speeds.failures)]
    return "\n".join([align_columns(lines), "", raw, *failures])


def _cell(found: Spread | None) -> str:
    if found is None:
        return "failed"
    return f"{found.median / 1e6:.0f} ({found.low / 1e6:.0f} to {found.high / 1e6:.0f})"
