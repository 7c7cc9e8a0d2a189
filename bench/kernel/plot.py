"""The pictures of kernel benchmarks: time and floor by prefix, tokens or rows, with a panel per shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.picture import (
    COLOURS,
    GREY,
    Report,
    Row,
    grid_of,
    grouped,
    label_lines,
    legend_below,
    without_frame,
)
from bench.common.report import measured_on

INCHES = 3.4
NOTE = (
    "whichever takes longer. Both axes are logarithmic. The report holds medians only, so there are no "
    "whiskers."
)


def draw_kernels(report: Report) -> Figure:
    """Microseconds of a layer by committed tokens."""
    rows = report["rows"]
    panels = grouped(rows, lambda row: row["shape"])
    counts = sorted({row["rows"] for row in rows})
    shades = matplotlib.colormaps["viridis"]
    # The lightest yellow is hard to see on white.
    colours = {count: shades(0.85 * i / max(1, len(counts) - 1)) for i, count in enumerate(counts)}
    figure, axes = grid_of(
        panels,
        "Tree attention of one layer, by rows of a tree",
        f"{report['implementation']}, {measured_on(report)}, batch {report['arguments']['batch']}; "
        "random weights",
        f"Dashed: the floor, reading all inputs once or computing, {NOTE}",
        columns=2,
        width=4.6,
        height=INCHES,
    )
    for axis, panel in zip(axes, panels.values(), strict=True):
        _panel(axis, panel, colours)
    return figure


def _panel(axis: Axes, rows: Sequence[Row], colours: Mapping[int, Any]) -> None:
    ends = []
    for count, colour in colours.items():
        curve = sorted((row for row in rows if row["rows"] == count), key=lambda row: row["prefix"])
        if not curve:
            continue
        prefixes = [row["prefix"] for row in curve]
        axis.plot(prefixes, [row["us"] for row in curve], color=colour, marker="o", markersize=4)
        axis.plot(prefixes, [row["floor_us"] for row in curve], color=colour, linestyle="dashed", linewidth=1)
        ends.append((prefixes[-1], curve[-1]["us"], f"{count} row{'s' * (count != 1)}", colour))
    _scales(axis, {row["prefix"] for row in rows}, "committed tokens", "layer")
    label_lines(axis, ends, INCHES)


def draw_experts(report: Report) -> Figure:
    """Microseconds of a call of the experts by tokens."""
    rows = [row for row in report["rows"] if row["operation"] == "expert_mlp"]
    others = {name: lambda row, name=name: row["others"][name]["micros"] for name in rows[0]["others"]}
    panels = grouped(rows, lambda row: row["shape"])
    return _draw_calls(report, panels, others, "tokens", "The experts of one layer", "the chosen experts")


def draw_products(report: Report) -> Figure:
    """Microseconds of a product by rows."""
    panels = grouped(report["rows"], lambda row: f"{row['shape']}, {row['stored']}")
    others = {"xla": lambda row: row["xla_us"]}
    return _draw_calls(report, panels, others, "rows", "Products of few rows", "the stored weights")


def _draw_calls(
    report: Report,
    panels: Mapping[str, Sequence[Row]],
    others: Mapping[str, Callable[[Row], float]],
    counted: str,
    title: str,
    read: str,
) -> Figure:
    """Microseconds of a call by the row's key ``counted``, of the measured implementation and of others."""
    figure, axes = grid_of(
        panels,
        f"{title}: {report['implementation']}, others, and the floor",
        f"{measured_on(report)}; random weights and {counted}",
        f"Floor: reading {read} once or computing, {NOTE}",
        columns=3,
        width=3.6,
        height=INCHES,
    )
    curves = {report["implementation"]: lambda row: row["us"], **others}
    for axis, panel in zip(axes, panels.values(), strict=True):
        rows = sorted(panel, key=lambda row: row[counted])
        counts = [row[counted] for row in rows]
        for (name, value), colour, marker in zip(curves.items(), COLOURS, "os^vDP", strict=False):
            values = [value(row) for row in rows]
            axis.plot(counts, values, color=colour, marker=marker, markersize=4, label=name)
        floors = [row["floor_us"] for row in rows]
        axis.plot(counts, floors, color=GREY, linestyle="dashed", marker=".", label="floor")
        _scales(axis, counts, counted, "call")
    legend_below(figure, axes[0])
    return figure


def _scales(axis: Axes, counts: set[int] | Sequence[int], counted: str, part: str) -> None:
    """Logarithmic axes, with a tick at each count."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted(counts), [f"{count:,}" for count in sorted(counts)])
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_xlabel(counted)
    axis.set_ylabel(f"microseconds per {part}")
    without_frame(axis)
