"""A chart of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from zrpc.bench.result import RowResult, Spread
from zrpc.bench.run import Run

__all__ = ["can_plot", "new_figure", "plot", "save"]

_FASTER = "#2a7f62"
_SLOWER = "#b5483a"


def can_plot() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(height: float) -> Any:
    """Returns an empty figure of the common width; heights are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, caption: str, path: Path) -> None:
    """Writes a figure to a file, with a caption; the suffix decides the format.

    Raises:
        ValueError: matplotlib can't write such a file.
        OSError: the file can't be written.
    """
    figure.supxlabel(caption, fontsize=7, color="0.4", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def plot(run: Run, caption: str, path: Path) -> None:
    """Draws how many times faster zrpc is in each row.

    Args:
        run: the run; it must compare with another library.
        caption: the text below the chart.
        path: the file; its suffix decides the format.

    Raises:
        ValueError: matplotlib can't write such a file.
        OSError: the file can't be written.
    """
    against = run.settings.against
    assert against is not None
    rows = [(result, result.times_faster(against)) for result in run.results]
    figure = new_figure(2.4 + 0.3 * len(rows))
    axes = figure.add_subplot()
    for place, (result, spread) in enumerate(rows):
        _draw(axes, place, result, spread, against)
    axes.set_yticks(range(len(rows)), [result.row.name for result, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.axvline(1, color="black", linewidth=1)
    axes.margins(x=0.15)
    axes.grid(axis="x", color="0.85", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"zrpc, times faster than {against} (median, min to max)", loc="left")
    save(figure, caption, path)


def _draw(axes: Any, place: int, result: RowResult, spread: Spread | None, against: str) -> None:
    if spread is None:
        failed = [name for name in (against, "zrpc") if result.failures(name)]
        text = f"{' and '.join(failed)} failed" if failed else "not compared"
        axes.text(1.05, place, text, va="center", fontsize=8, color="0.4")
        return
    axes.barh(
        place,
        spread.median - 1,
        left=1,
        height=0.6,
        color=_FASTER if spread.median >= 1 else _SLOWER,
        xerr=[[spread.median - spread.low], [spread.high - spread.median]],
        error_kw={"ecolor": "0.35", "elinewidth": 1, "capsize": 2},
    )
    axes.annotate(
        f"{spread.median:.1f}",
        (max(spread.high, 1), place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )
