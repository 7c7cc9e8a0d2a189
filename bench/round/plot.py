"""The picture of a round benchmark: the phases, the whole round and the floor of each case."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.picture import (
    COLOURS,
    Report,
    Row,
    grid_of,
    grouped,
    legend_below,
    shape_name,
    without_frame,
)
from bench.common.report import measured_on

UNDIVIDED = "#bbbbbb"


def draw_rounds(report: Report) -> Figure:
    """A panel per batch and context, with a bar per tree; all panels have the same trees."""
    rows = report["rows"]
    panels = grouped(rows, lambda row: f"batch {row['batch']}, context {row['context']:,}")
    bars = len(rows) // len(panels)
    given = report["arguments"]
    about = (
        f"{measured_on(report)}, temperature {given['temperature']:g}, "
        f"attention by {report['implementation']}. "
        f"Medians of {given['repeats']} dispatches of {report['rounds_per_dispatch']} rounds; "
        "whiskers: the fastest and the slowest."
    )
    figure, axes = grid_of(
        panels,
        f"One round of {shape_name(report)} against its floor",
        about,
        _note(rows),
        columns=3,
        width=3.9,
        height=1.2 + 0.36 * bars,  # bars are horizontal, so that algorithms' names are readable
        sharey=True,
    )
    phases = list(dict.fromkeys(phase for row in rows for phase in row["phases_ms"]))
    for axis, panel in zip(axes, panels.values(), strict=True):
        _panel(axis, panel, phases, report["rounds_per_dispatch"])
    axes[0].set_ylim(bars - 0.4, -0.6)
    legend_below(figure, axes[0], columns=4)
    return figure


def _note(rows: Sequence[Row]) -> str:
    floor = "Floor: reading the used weights and the context once, or computing, whichever takes longer. "
    timed = [row for row in rows if row["phases_ms"]]
    if not timed:
        return floor + "The phases were not timed."
    shares = [100 * (row["phases_sum_ms"] / row["round_ms"] - 1) for row in timed]
    return floor + (
        "Each phase was timed alone, in its own program, so the bars need not end at the whole round: "
        f"their sums are {min(shares):+.0f} to {max(shares):+.0f} % off it."
    )


def _panel(axis: Axes, rows: Sequence[Row], phases: Sequence[str], rounds: int) -> None:
    places = list(range(len(rows)))
    whole = [row["round_ms"] for row in rows]
    ends = [0.0] * len(rows)
    for phase, colour in zip(phases, COLOURS, strict=False):
        lengths = [row["phases_ms"].get(phase, 0.0) for row in rows]
        axis.barh(places, lengths, left=ends, height=0.6, color=colour, label=phase)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    if not phases:
        axis.barh(places, whole, height=0.6, color=UNDIVIDED, label="the round, not divided")
        ends = whole
    low, high = [y - 0.4 for y in places], [y + 0.4 for y in places]
    axis.vlines(whole, low, high, colors="black", label="whole round")
    times = [[1e3 * seconds / rounds for seconds in row["dispatch_seconds"]] for row in rows]
    axis.hlines(places, [*map(min, times)], [*map(max, times)], colors="black", linewidth=1.2)
    ends = [max(end, *dispatches) for end, dispatches in zip(ends, times, strict=True)]
    floors = [row["floor_ms"] for row in rows]
    axis.vlines(floors, low, high, colors="#b2182b", linestyles="dashed", linewidths=2, label="floor")
    for y, row in zip(places, rows, strict=True):
        axis.annotate(
            f"{row['round_ms']:.3g} ms, {row['times_floor']:.3g} times its floor",
            (ends[y], y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(places, [_label(row) for row in rows], fontsize=9)
    axis.set_xlabel("milliseconds per round")
    # Leaves room for the text after the longest bar.
    axis.set_xlim(0, 1.8 * max(ends))
    without_frame(axis)


def _label(row: Row) -> str:
    if row["budget"] == 1:
        return "plain step"
    # Older reports have one algorithm, without its name.
    return f"{row['algorithm']}, {row['budget']} nodes" if "algorithm" in row else f"tree of {row['budget']}"
