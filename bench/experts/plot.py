"""The picture of a benchmark of experts: time and floor by tokens, a panel per shape."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.picture import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILION,
    Report,
    Row,
    grid_of,
    grouped,
    legend_below,
    without_frame,
)
from bench.common.report import measured_on

# Colours and markers of the curves; the first is the measured implementation's.
_STYLES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (VERMILION, "v"))


def draw_experts(report: Report) -> Figure:
    """Microseconds of a call of the experts by tokens."""
    rows = [row for row in report["rows"] if row["operation"] == "expert_mlp"]
    panels = grouped(rows, lambda row: row["shape"])
    figure, axes = grid_of(
        panels,
        f"The experts of one layer: {report['implementation']}, others, and the floor",
        f"{measured_on(report)}; random weights and tokens",
        "Floor: reading the chosen experts once or computing, whichever takes longer. Both axes are "
        "logarithmic. The report holds medians only, so there are no whiskers.",
        columns=3,
        width=3.6,
        height=3.4,
    )
    for axis, panel in zip(axes, panels.values(), strict=True):
        _panel(axis, panel)
    legend_below(figure, axes[0])
    return figure


def _panel(axis: Axes, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=lambda row: row["tokens"])
    tokens = [row["tokens"] for row in rows]
    curves = {rows[0]["implementation"]: [row["us"] for row in rows]}
    curves |= {name: [row["others"][name]["micros"] for row in rows] for name in rows[0]["others"]}
    for (name, values), (colour, marker) in zip(curves.items(), _STYLES, strict=False):
        axis.plot(tokens, values, color=colour, marker=marker, markersize=4, label=name)
    floors = [row["floor_us"] for row in rows]
    axis.plot(tokens, floors, color=GREY, linestyle="dashed", marker=".", label="floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [str(count) for count in tokens])
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_xlabel("tokens")
    axis.set_ylabel("microseconds per call")
    without_frame(axis)
