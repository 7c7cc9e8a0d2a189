"""The picture of a benchmark of experts: time and floor by tokens, a panel for each shape."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.common.picture import grid_of, grouped, without_frame, write_png

# How lines are drawn, by what they show; what is measured comes first.
_STYLES = (("black", "o"), ("tab:orange", "s"), ("tab:green", "^"), ("tab:red", "v"))


def plot_experts(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG: microseconds of a call by tokens, a panel for each shape.

    Args:
        rows: Of the report, of `expert_mlp`.
        title: Above all panels.
        path: Where to.
    """
    panels = grouped(rows, lambda row: row["shape"])
    figure, axes = grid_of(panels, title, columns=3, width=3.6, height=3.4)
    for axis, own in zip(axes, panels.values(), strict=True):
        _panel(axis, own)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    write_png(path, figure)


def _panel(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    own = sorted(rows, key=lambda row: row["tokens"])
    tokens = [row["tokens"] for row in own]
    lines = {own[0]["implementation"]: [row["us"] for row in own]}
    lines |= {name: [row["others"][name]["micros"] for row in own] for name in own[0]["others"]}
    for (name, values), (colour, marker) in zip(lines.items(), _STYLES, strict=False):
        axis.plot(tokens, values, color=colour, marker=marker, markersize=4, label=name)
    floors = [row["floor_us"] for row in own]
    axis.plot(tokens, floors, color="grey", linestyle="dashed", marker=".", label="floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [str(count) for count in tokens])
    axis.set_xlabel("tokens")
    axis.set_ylabel("microseconds a call")
    without_frame(axis)
