"""The picture of ``load``: tokens per second by concurrency."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from bench.common.picture import COLOURS, GREY, Report, empty_figure, without_frame
from bench.common.report import measured_on


def draw_load(report: Report) -> Figure:
    """A panel per measured traffic."""
    panels = []
    parts = report["parts"]
    for part in ("demo", "traffic"):
        if part in parts:
            rows = [row for row in parts[part]["result"] if row["rate"] is None]
            names = dict.fromkeys(row["method"] for row in rows)
            curves = {
                name: [
                    (row["concurrency"], row["tokens_per_second"]) for row in rows if row["method"] == name
                ]
                for name in names
            }
            panels.append((report.get("target", part) if part == "demo" else part, curves))
    figure = empty_figure(
        1.0 + 4.6 * max(len(panels), 1), 5.0, "Tokens per second by concurrent requests", _about(report)
    )
    axes = figure.subplots(1, max(len(panels), 1), squeeze=False)[0]
    for axis, (title, curves) in zip(axes, panels, strict=False):
        _panel(axis, title, curves)
    if not panels:
        axes[0].axis("off")
        axes[0].text(0.5, 0.5, "No part of this report is by concurrency.", ha="center")
    return figure


def _panel(axis: Axes, title: str, curves: dict[str, list[tuple[int, float]]]) -> None:
    for number, (name, points) in enumerate(curves.items()):
        strong = name in ("auto", "plain")
        colour = COLOURS[number % len(COLOURS)] if strong or number < len(COLOURS) else GREY
        axis.plot(
            *zip(*points, strict=True), label=name, color=colour, marker="o", linewidth=2.0 if strong else 1.0
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted({at for points in curves.values() for at, _ in points}))
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        scale.set_minor_formatter(StrMethodFormatter("{x:,.0f}") if scale is axis.yaxis else NullFormatter())
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("concurrent requests")
    axis.legend(loc="best", fontsize=7, frameon=False)
    without_frame(axis)


def _about(report: Report) -> str:
    # The part demo has another pair, which its panel names.
    shape = [] if set(report["parts"]) <= {"host", "demo"} else [report["shape"]]
    return ", ".join([*shape, measured_on(report)])
