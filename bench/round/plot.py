"""The picture of a round benchmark: each case's phases side by side, its round and its floor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.common.picture import GREEN, ORANGE, SKY, grid_of, grouped, without_frame, write_png
from bench.round.phases import PHASES

PHASE_COLOURS = dict(zip(PHASES, (ORANGE, SKY, GREEN), strict=True))


def plot_rounds(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG with a panel for every batch and context, and in each a bar for every tree.

    Args:
        rows: Of the report: batch, context, budget, algorithm, milliseconds of the round, of its floor and
            of its phases. Every panel has the same trees.
        title: Above all panels.
        path: Where to.
    """
    panels = grouped(rows, lambda row: f"batch {row['batch']}, context {row['context']:,}")
    bars = len(rows) // len(panels)
    # Bars lie, so that the names of many algorithms can be read; they are the same in all panels.
    height = 1.0 + 0.32 * bars
    figure, axes = grid_of(panels, title, columns=4, width=3.8, height=height, sharey=True)
    for axis, own in zip(axes, panels.values(), strict=True):
        _panel(axis, own)
    axes[0].set_ylim(bars - 0.4, -0.6)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    write_png(path, figure)


def _panel(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    places = list(range(len(rows)))
    ends = [0.0] * len(rows)
    for phase, colour in PHASE_COLOURS.items():
        lengths = [row["phases_ms"].get(phase, 0.0) for row in rows]
        if any(lengths):
            axis.barh(places, lengths, left=ends, height=0.6, color=colour, label=phase)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    low, high = [y - 0.4 for y in places], [y + 0.4 for y in places]
    axis.vlines([row["round_ms"] for row in rows], low, high, colors="black", label="whole round")
    floors = [row["floor_ms"] for row in rows]
    axis.vlines(floors, low, high, colors="#b2182b", linestyles="dashed", linewidths=2, label="floor")
    for y, row in zip(places, rows, strict=True):
        axis.annotate(
            f"{row['round_ms']:.3g} ({row['times_floor']:.2g}x floor)",
            (max(ends[y], row["round_ms"]), y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(places, [_label(row) for row in rows], fontsize=9)
    axis.set_xlabel("milliseconds a round")
    # Room for the words after the longest bar.
    axis.set_xlim(0, 1.5 * max(*ends, *(row["round_ms"] for row in rows)))
    without_frame(axis)


def _label(row: Mapping[str, Any]) -> str:
    return "plain step" if row["budget"] == 1 else f"{row['algorithm']} {row['budget']}"
