"""What all pictures share: colours, panels, and a PNG that is written whole. Only pictures import this."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jetspec_jax.checkpoint.files import replacing

Row = Mapping[str, Any]
# Okabe and Ito's colours, which most kinds of colour vision tell apart.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, YELLOW = COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#f0e442",
)


def empty_figure(width: float, height: float, title: str) -> Figure:
    """A figure of so many inches, with a title above all panels."""
    # Without pyplot there is no global state, and no window system is asked for.
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=10)
    return figure


def grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """The rows of each panel, by its name, in the order of the rows."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(key(row), []).append(row)
    return panels


def grid_of(
    names: Mapping[str, Any], title: str, *, columns: int, width: float, height: float, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with a named panel for each key, in rows of at most so many.

    Args:
        names: The panels.
        title: Above all of them.
        columns: The most in a row.
        width: Of a panel, in inches.
        height: Likewise.
        shared: What `Figure.subplots` is told of the axes.
    """
    columns = min(columns, len(names))
    lines = -(-len(names) // columns)
    figure = empty_figure(2.4 + width * columns, 0.8 + height * lines, title)
    axes = list(figure.subplots(lines, columns, squeeze=False, **shared).flat)
    for axis, name in zip(axes, names, strict=False):
        axis.set_title(name, fontsize=10)
    for axis in axes[len(names) :]:
        axis.remove()
    return figure, axes[: len(names)]


def without_frame(*axes: Axes) -> None:
    """Leaves out the lines above and to the right of panels."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


def write_png(path: Path, figure: Figure) -> None:
    """Writes a picture, whole or not at all."""
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=150)
    print(f"wrote {path}")
