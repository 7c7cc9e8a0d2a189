"""The picture of a round benchmark: each case's phases on top of each other, its round and its floor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.phases import PHASES

COLUMNS = 4
# Okabe and Ito's colours, which most kinds of colour vision tell apart.
COLOURS = dict(zip(PHASES, ("#e69f00", "#cc79a7", "#56b4e9", "#f0e442", "#009e73"), strict=True))


def plot_rounds(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG with a panel for every batch and context.

    Args:
        rows: Of the report: batch, context, budget, milliseconds of the round, of its floor and its phases.
        title: Above all panels.
        path: Where to.
    """
    panels: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["batch"], row["context"]), []).append(row)
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    # Without pyplot there is no global state, and no window system is asked for.
    figure = Figure(figsize=(2.4 + 3.6 * columns, 0.8 + 3.4 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, ((batch, context), own) in zip(axes, panels.items(), strict=False):
        _panel(axis, own)
        axis.set_title(f"batch {batch}, context {context:,}", fontsize=10)
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.suptitle(title, fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    places = list(range(len(rows)))
    bottom = [0.0] * len(rows)
    for phase, colour in COLOURS.items():
        heights = [row["phases_ms"].get(phase, 0.0) for row in rows]
        if any(heights):
            axis.bar(places, heights, bottom=bottom, width=0.6, color=colour, label=phase)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    left, right = [x - 0.4 for x in places], [x + 0.4 for x in places]
    axis.hlines([row["round_ms"] for row in rows], left, right, colors="black", label="whole round")
    floors = [row["floor_ms"] for row in rows]
    axis.hlines(floors, left, right, colors="#b2182b", linestyles="dashed", linewidths=2, label="floor")
    for x, row in zip(places, rows, strict=True):
        top = max(bottom[x], row["round_ms"])
        axis.annotate(
            f"{row['round_ms']:.3g}\n({row['times_floor']:.2g}x floor)",
            (x, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axis.set_xticks(places, ["plain" if row["budget"] == 1 else f"{row['budget']}" for row in rows])
    axis.set_xlabel("budget (nodes)")
    axis.set_ylabel("milliseconds a round")
    axis.set_ylim(0, 1.2 * max(*bottom, *(row["round_ms"] for row in rows)))
    axis.spines[["top", "right"]].set_visible(False)
