"""The picture of a decoding benchmark: budget against tau and speed-up, and acceptance by depth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from bench.common.picture import COLOURS, empty_figure, without_frame, write_png
from bench.decode.report import at_budget, temperatures_of

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
LABELS = "tau (tokens a round)", "speed-up over plain decoding", "share of rounds"
BASELINE = {"color": "#666666", "linestyle": "dashed", "linewidth": 1.2}


def plot_decode(rows: Sequence[Mapping[str, Any]], title: str, budget: int, path: Path) -> None:
    """Writes a PNG with a column for every temperature.

    Args:
        rows: Of the report.
        title: Above all panels.
        budget: Whose acceptance by depth is drawn.
        path: Where to.
    """
    temperatures = temperatures_of(rows)
    names = list(dict.fromkeys(row["algorithm"] for row in rows if row["algorithm"]))
    styles = {name: _style(i) for i, name in enumerate(names)}
    figure = empty_figure(2.2 + 4.6 * len(temperatures), 10.2, title)
    axes = figure.subplots(3, len(temperatures), squeeze=False, sharey="row")
    for axis, label in zip(axes[:, 0], LABELS, strict=True):
        axis.set_ylabel(label)
    for column, temperature in zip(axes.T, temperatures, strict=True):
        own = [row for row in rows if row["temperature"] == temperature]
        for axis, key in zip(column[:2], ("tau", "speed-up"), strict=True):
            _by_budget(axis, own, key, styles)
        column[0].set_title(f"T = {temperature:g}", fontsize=11)
        _by_depth(column[2], at_budget(own, budget), styles)
        column[2].set_title(f"budget {budget}", fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    write_png(path, figure)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.4,
        "linestyle": "solid" if number < len(COLOURS) else "dashdot",
    }


def _by_budget(
    axis: Axes, rows: Sequence[Mapping[str, Any]], key: str, styles: Mapping[str, Mapping[str, Any]]
) -> None:
    for name, style in styles.items():
        points = sorted((row["budget"], row[key]) for row in rows if row["algorithm"] == name)
        axis.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
    for method, label, style in (
        ("chain", "linear chain", BASELINE),
        ("plain", "plain decoding", {**BASELINE, "linestyle": "dotted"}),
    ):
        [level] = [row[key] for row in rows if row["method"] == method]
        axis.axhline(level, label=label, **style)
    budgets = sorted({row["budget"] for row in rows if row["algorithm"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [str(budget) for budget in budgets])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("budget (nodes)")
    axis.grid(alpha=0.3)
    without_frame(axis)


def _by_depth(axis: Axes, rows: Sequence[Mapping[str, Any]], styles: Mapping[str, Mapping[str, Any]]) -> None:
    for row in rows:
        style = styles[row["algorithm"]] if row["algorithm"] else BASELINE
        depths = range(1, len(row["acceptance"]) + 1)
        axis.plot(depths, row["acceptance"], **style)
    axis.set_xlabel("drafted tokens accepted, at least")
    axis.set_ylim(-0.02, 1.02)
    axis.grid(alpha=0.3)
    without_frame(axis)
