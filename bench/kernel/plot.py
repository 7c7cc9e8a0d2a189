"""The picture of a kernel benchmark: time and floor by prefix, a panel per shape."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.picture import Report, Row, grid_of, grouped, label_lines, without_frame
from bench.common.report import measured_on

INCHES = 3.4


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
        "Dashed: the floor, reading all inputs once or computing, whichever takes longer. Both axes are "
        "logarithmic. The report holds medians only, so there are no whiskers.",
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
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    prefixes = sorted({row["prefix"] for row in rows})
    axis.set_xticks(prefixes, [f"{prefix:,}" for prefix in prefixes])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("committed tokens")
    axis.set_ylabel("microseconds per layer")
    without_frame(axis)
    label_lines(axis, ends, INCHES)
