"""A chart of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from zrpc.bench.result import Spread
from zrpc.bench.run import Run

_FASTER = "#2a7f62"
_SLOWER = "#b5483a"
# Can be read on white and on black: a chart has no background of its own.
_INK = "#6e7781"


def can_plot() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(height: float, width: float = 9) -> Any:
    """Returns an empty figure; its height and width are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, caption: str, path: Path) -> None:
    """Writes a figure to a file, with a caption; the suffix decides the format.

    Raises:
        ValueError: matplotlib can't write such a file.
        OSError: the file can't be written.
    """
    figure.supxlabel(caption, fontsize=7, color=_INK, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def plot(run: Run, caption: str, path: Path) -> None:
    """Draws how many times faster zrpc is in each row that the other library has, too.

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
    compared = [each for each in run.results if against in each.outcomes]
    rows = [(result, result.times_faster(against)) for result in compared]
    figure = new_figure(1.4 + 0.34 * len(rows), width=5)  # as wide as a phone
    axes = figure.add_subplot()
    for place, (result, spread) in enumerate(rows):
        axes.text(1, place - 0.27, result.row.name, va="bottom", fontsize=8.5, color=_INK)
        if spread is None:
            failed = [name for name in (against, "zrpc") if result.failures(name)]
            text = f"{' and '.join(failed)} failed" if failed else "not compared"
            axes.text(1.05, place, text, va="center", fontsize=8, color=_INK)
    _draw_bars(axes, {place: spread for place, (_, spread) in enumerate(rows) if spread})
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.5, -1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.axvline(1, color=_INK, linewidth=1)
    axes.margins(x=0.15)
    axes.tick_params(colors=_INK)
    for part in (figure.patch, axes.patch, *axes.spines.values()):
        part.set_visible(False)
    axes.set_title(f"times faster than {against} (median, min to max)", fontsize=9, color=_INK)
    save(figure, caption, path)


def _draw_bars(axes: Any, spreads: dict[int, Spread]) -> None:
    medians = [each.median for each in spreads.values()]
    errors = [(each.median - each.low, each.high - each.median) for each in spreads.values()]
    bars = axes.barh(
        list(spreads),
        [median - 1 for median in medians],
        left=1,
        height=0.4,
        color=[_FASTER if median >= 1 else _SLOWER for median in medians],
        xerr=list(zip(*errors, strict=True)) or None,
        error_kw={"ecolor": _INK, "elinewidth": 1, "capsize": 2},
    )
    labels = [f"{median:.1f}" for median in medians]
    axes.bar_label(bars, labels, padding=4, fontsize=8, color=_INK)
