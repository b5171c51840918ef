"""How costs grow with the number of workers, as ``zrpc bench scale`` measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

from zrpc.bench.mesh import HungError, Mesh, MeshError
from zrpc.bench.plot import new_figure, save
from zrpc.bench.row import Unit
from zrpc.bench.run import warm_starter
from zrpc.bench.session import Sampling
from zrpc.bench.table import align_columns, quantity
from zrpc.launch import Starter

MEASURES = {
    "init": "init_rpc of all workers",
    "call": "empty call, to one peer again and again",
    "in turn": "empty call, to each peer in turn",
    "descriptors": "descriptors of worker 0, all peers called",
    "threads": "threads of worker 0, all peers called",
    "memory": "private memory of worker 0, all peers called",
    "push": "1 MiB from all others at once to worker 0, and back; for each of them",
    "all-to-all": "1 MiB from each worker to each other one; for each of these tensors",
}
_MIB = 2**20
# The workloads that measure all but the first.
_WORKLOADS: dict[str, tuple[str, tuple[int, ...]]] = {
    "call": ("calls:empty", ()),
    "in turn": ("calls:each_peer", ()),
    "descriptors": ("costs:descriptors", ()),
    "threads": ("costs:threads", ()),
    "memory": ("costs:private_memory", ()),
    "push": ("tensors:many_clients", (_MIB,)),
    "all-to-all": ("tensors:all_to_all", (_MIB,)),
}
# These depend on the number of processors.
_NOT_COMPUTED = ("call", "in turn", "push", "all-to-all")
# The units; those of the plots, and how large they are. Others are plain numbers.
_UNITS = {
    "init": (Unit.SECONDS, "s", 1.0),
    "memory": (Unit.BYTES, "MiB", 2.0**20),
    **dict.fromkeys(_NOT_COMPUTED, (Unit.SECONDS, "µs", 1e-6)),
}


@dataclass
class Point:
    """The results of a mesh of one size.

    Attributes:
        library: the name of its library.
        workers: the number of workers.
        values: the results by the names in `MEASURES`; after a failure, those measured before it.
        failed: the reason for the failure, if it failed.
        computed: whether it was not measured, but computed from meshes that were.
    """

    library: str
    workers: int
    values: dict[str, float] = field(default_factory=dict)
    failed: str | None = None
    computed: bool = False


def measure(
    libraries: Sequence[str],
    counts: Sequence[int],
    sampling: Sampling,
    deadline: float,
    on_start: Callable[[str, int], object],
    *,
    keys: bool = False,
) -> Iterator[Point]:
    """Measures meshes of growing size, of each library in turn.

    Args:
        libraries: the names of the libraries.
        counts: the numbers of workers, in ascending order, at least 2.
        sampling: how long and how often to repeat the call.
        deadline: seconds for each start and each measurement. A library that hangs is not
            measured with more workers.
        keys: measure over loopback TCP, which zrpc then encrypts, as between hosts.
        on_start: called with the library and the number of workers before each mesh starts.
    """
    with warm_starter() as starter:
        hung: dict[str, int] = {}
        for workers in counts:
            for library in libraries:
                if library in hung:
                    reason = f"left out, as it hung with {hung[library]} workers"
                    yield Point(library, workers, failed=reason)
                    continue
                on_start(library, workers)
                point = Point(library, workers)
                try:
                    _measure(point, starter, sampling, deadline, keys)
                except MeshError as error:
                    point.failed = str(error)
                    if isinstance(error, HungError):
                        hung[library] = workers
                yield point


def _measure(
    point: Point, starter: Starter, sampling: Sampling, deadline: float, keys: bool
) -> None:
    mesh = Mesh(starter, point.library, point.workers, tcp=keys, keys=keys, timeout=deadline)
    with mesh:
        point.values["init"] = mesh.join_seconds
        for name, (workload, arguments) in _WORKLOADS.items():
            point.values[name] = mesh.measure(workload, arguments, sampling, deadline).value
    if mesh.shutdown_errors:
        point.failed = "; ".join(mesh.shutdown_errors)


def compute(points: Sequence[Point], counts: Sequence[int]) -> list[Point]:
    """Returns points for larger meshes, computed from those measured.

    What worker 0 uses grows by the same amount with each peer, so a straight line is drawn through
    the two largest meshes of a library. At the start each worker reads the records of all, so its
    time is taken to grow with the square of their number. Calls and tensors are left out, as they
    depend on the number of processors. A library with less than two meshes has no points.
    """
    found = []
    for library in dict.fromkeys(point.library for point in points):
        good = [p for p in points if p.library == library and p.failed is None]
        if len(good) < 2:
            continue
        small, large = sorted(good, key=lambda point: point.workers)[-2:]
        names = [name for name in small.values if name not in _NOT_COMPUTED]
        for workers in counts:
            values = {name: _extended(name, small, large, workers) for name in names}
            found.append(Point(library, workers, values, computed=True))
    return found


def _extended(name: str, small: Point, large: Point, workers: int) -> float:
    first, last = small.values[name], large.values[name]
    if name == "init":
        return last * (workers / large.workers) ** 2
    slope = (last - first) / (large.workers - small.workers)
    return last + slope * (workers - large.workers)


def as_text(points: Sequence[Point]) -> str:
    """Returns a table, and below it the failures."""
    lines = [["", "workers", "", *MEASURES]]
    for point in points:
        origin = "computed" if point.computed else "measured"
        lines.append([point.library, str(point.workers), origin, *_cells(point)])
    failures = [
        f"* {point.library}, {point.workers} workers: {point.failed}"
        for point in points
        if point.failed
    ]
    legend = [f"{name}: {meaning}" for name, meaning in MEASURES.items()]
    return "\n".join([align_columns(lines), "", *legend, *failures])


def _cells(point: Point) -> list[str]:
    cells = []
    for name in MEASURES:
        value = point.values.get(name)
        if value is None:
            cells.append("failed" if point.failed else "-")
        else:
            cells.append(quantity(value, _UNITS[name][0]) if name in _UNITS else f"{value:.0f}")
    return cells


def plot(points: Sequence[Point], caption: str, path: Path) -> None:
    """Draws each measure against the number of workers.

    Raises:
        OSError: the file can't be written.
    """
    figure = new_figure(9.0)
    grid = figure.subplots(3, 3)
    for axes in grid.flat[len(MEASURES) :]:
        axes.set_visible(False)
    for axes, (name, meaning) in zip(grid.flat, MEASURES.items(), strict=False):
        _, unit, factor = _UNITS.get(name, (None, "", 1.0))
        for library in dict.fromkeys(point.library for point in points):
            found = [p for p in points if p.library == library and name in p.values]
            x = [point.workers for point in found]
            axes.plot(x, [p.values[name] / factor for p in found], marker="o", label=library)
        axes.set_title(fill(meaning, 34), loc="left", fontsize=9)
        axes.set_xlabel("workers", fontsize=8)
        axes.set_ylabel(unit, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    grid.flat[0].legend(frameon=False)
    save(figure, caption, path)
