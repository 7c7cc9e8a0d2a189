"""The picture of ``load``: tokens per second by concurrency, projected and measured."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from bench.common.picture import COLOURS, GREY, Report, empty_figure, without_frame
from bench.common.report import measured_on

# Keys of a projection's row that are no method.
_OTHER = ("task", "concurrency", "auto_over_best", "sglang_chain_b200")


def draw_load(report: Report) -> Figure:
    """A panel per projected prompt set, and a panel per measured traffic."""
    panels = []
    parts = report["parts"]
    if "projected" in parts:
        rows = parts["projected"]["result"]
        for task in dict.fromkeys(row["task"] for row in rows):
            of_task = [row for row in rows if row["task"] == task]
            names = [key for key in dict.fromkeys(key for row in of_task for key in row) if key not in _OTHER]
            curves = {
                name: [(row["concurrency"], row[name]) for row in of_task if row.get(name) is not None]
                for name in names
            }
            panels.append((f"projected, {task}", curves))
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
            panels.append((f"measured, {part}", curves))
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
