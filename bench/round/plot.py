"""The picture of a round benchmark: each case's phases side by side, its round and its floor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.report import write_png
from bench.round.phases import PHASES

COLUMNS = 4
# Okabe and Ito's colours, which most kinds of colour vision tell apart.
COLOURS = dict(zip(PHASES, ("#e69f00", "#cc79a7", "#56b4e9", "#f0e442", "#009e73"), strict=True))


def plot_rounds(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG with a panel for every batch and context, and in each a bar for every tree.

    Args:
        rows: Of the report: batch, context, budget, algorithm, milliseconds of the round, of its floor and
            of its phases. Every panel has the same trees.
        title: Above all panels.
        path: Where to.
    """
    panels: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["batch"], row["context"]), []).append(row)
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    bars = len(rows) // len(panels)
    # Without pyplot there is no global state, and no window system is asked for.
    figure = Figure(figsize=(3.2 + 3.8 * columns, 0.9 + (1.0 + 0.32 * bars) * lines), layout="constrained")
    # Bars lie, so that the names of many algorithms can be read; they are the same in all panels.
    axes = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for axis, ((batch, context), own) in zip(axes, panels.items(), strict=False):
        _panel(axis, own)
        axis.set_title(f"batch {batch}, context {context:,}", fontsize=10)
    for axis in axes[len(panels) :]:
        axis.remove()
    axes[0].set_ylim(bars - 0.4, -0.6)
    figure.suptitle(title, fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    write_png(path, figure)


def _panel(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    places = list(range(len(rows)))
    ends = [0.0] * len(rows)
    for phase, colour in COLOURS.items():
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
    # Room for the words behind the longest bar.
    axis.set_xlim(0, 1.5 * max(*ends, *(row["round_ms"] for row in rows)))
    axis.spines[["top", "right"]].set_visible(False)


def _label(row: Mapping[str, Any]) -> str:
    return "plain step" if row["budget"] == 1 else f"{row['algorithm']} {row['budget']}"
