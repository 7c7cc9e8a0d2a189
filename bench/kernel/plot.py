"""The picture of a kernel benchmark: time and floor by prefix, a panel for each shape."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.common.report import write_png

COLUMNS = 3


def plot_kernels(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG.

    Args:
        rows: Of the report: shape, rows, prefix, and microseconds of the kernel and of its floor.
        title: Above all panels.
        path: Where to.
    """
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(row["shape"], []).append(row)
    counts = sorted({row["rows"] for row in rows})
    shades = matplotlib.colormaps["viridis"]
    # The lightest yellow is hard to see on white.
    colours = {count: shades(0.9 * i / max(1, len(counts) - 1)) for i, count in enumerate(counts)}
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    # Without pyplot there is no global state, and no window system is asked for.
    figure = Figure(figsize=(2.4 + 3.6 * columns, 0.8 + 3.4 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis, (shape, own) in zip(axes, panels.items(), strict=False):
        _panel(axis, own, colours)
        axis.set_title(shape, fontsize=10)
    for axis in list(axes)[len(panels) :]:
        axis.remove()
    figure.suptitle(title, fontsize=10)
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
    axis.spines[["top", "right"]].set_visible(False)
