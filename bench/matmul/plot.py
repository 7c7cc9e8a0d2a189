"""The picture of a benchmark of matrix products: time and floor by rows, a panel per shape and format."""

from matplotlib.figure import Figure

from bench.common.picture import BLUE, GREY, ORANGE, Report, grid_of, grouped, legend_below, without_frame
from bench.common.report import measured_on


def draw_products(report: Report) -> Figure:
    """Microseconds of a product by rows."""
    panels = grouped(report["rows"], lambda row: f"{row['shape']}, {row['stored']}")
    figure, axes = grid_of(
        panels,
        f"Products of few rows: {report['implementation']}, XLA, and the floor",
        f"{measured_on(report)}; random weights and rows",
        "Floor: reading the stored weights once or computing, whichever takes longer. Both axes are "
        "logarithmic. The report holds medians only, so there are no whiskers.",
        columns=3,
        width=3.6,
        height=3.4,
    )
    lines = (
        ("us", report["implementation"], BLUE, "o-"),
        ("xla_us", "xla", ORANGE, "s-"),
        ("floor_us", "floor", GREY, ".--"),
    )
    for axis, panel in zip(axes, panels.values(), strict=True):
        rows = sorted(panel, key=lambda row: row["rows"])
        counts = [row["rows"] for row in rows]
        for key, label, colour, style in lines:
            axis.plot(counts, [row[key] for row in rows], style, color=colour, label=label, markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel("rows")
        axis.set_ylabel("microseconds per call")
        without_frame(axis)
    legend_below(figure, axes[0])
    return figure
