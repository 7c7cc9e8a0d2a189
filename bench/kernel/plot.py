"""The picture of a kernel benchmark: time and floor by prefix, a panel for each shape."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.common.picture import grid_of, grouped, without_frame, write_png


def plot_kernels(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG.

    Args:
        rows: Of the report: shape, rows, prefix, and microseconds of the kernel and of its floor.
        title: Above all panels.
        path: Where to.
    """
    panels = grouped(rows, lambda row: row["shape"])
    counts = sorted({row["rows"] for row in rows})
    shades = matplotlib.colormaps["viridis"]
    # The lightest yellow is hard to see on white.
    colours = {count: shades(0.9 * i / max(1, len(counts) - 1)) for i, count in enumerate(counts)}
    figure, axes = grid_of(panels, title, columns=3, width=3.6, height=3.4)
    for axis, own in zip(axes, panels.values(), strict=True):
        _panel(axis, own, colours)
    handles = [
        *(Line2D([], [], color=colours[count], marker="o", label=f"{count} rows") for count in counts),
        Line2D([], [], color="black", linestyle="dashed", label="floor"),
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    write_png(path, figure)


def _panel(axis: Axes, rows: Sequence[Mapping[str, Any]], colours: Mapping[int, Any]) -> None:
    for count, colour in colours.items():
        own = sorted((row for row in rows if row["rows"] == count), key=lambda row: row["prefix"])
        prefixes = [row["prefix"] for row in own]
        axis.plot(prefixes, [row["us"] for row in own], color=colour, marker="o", markersize=4)
        axis.plot(prefixes, [row["floor_us"] for row in own], color=colour, linestyle="dashed", marker=".")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    prefixes = sorted({row["prefix"] for row in rows})
    axis.set_xticks(prefixes, [f"{prefix:,}" for prefix in prefixes])
    axis.set_xlabel("committed tokens")
    axis.set_ylabel("microseconds a layer")
    without_frame(axis)
