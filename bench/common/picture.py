"""Parts that all pictures share: titles, colours, panels, labels of curves, and writing the files.

A picture is drawn from its report alone, so that a kept report can be drawn again.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jetspec_jax.checkpoint.files import replacing

Row = Mapping[str, Any]
Report = Mapping[str, Any]
# The colours of Okabe and Ito, which remain distinct for colour-blind readers, without yellow: it is too pale
# on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#666666"
# Font sizes in points: a figure's title, its subtitle, and its note.
TITLE, ABOUT, NOTE = 12, 9, 8
_POINTS = 72  # per inch
_EDGE = 6  # points above and below a text, together


def empty_figure(width: float, height: float, title: str, about: str, note: str = "") -> Figure:
    """A figure with its texts, and room for panels between them.

    Args:
        width: In inches, like ``height``.
        about: What was measured, and on which device; a subtitle in smaller type.
        note: What the reader must know to interpret the figure; below all panels.
    """
    # Not made by pyplot, which keeps global state and may open a window system.
    figure = Figure(figsize=(width, height))
    top = _write(figure, 1.0, title, TITLE, weight="bold")
    top = _write(figure, top, about, ABOUT)
    bottom = _height(figure, note, NOTE)
    _write(figure, bottom, note, NOTE, color=GREY)
    figure.set_layout_engine("constrained", rect=(0, bottom, 1, top - bottom))
    return figure


def _write(figure: Figure, top: float, text: str, points: float, **style: Any) -> float:
    """Writes a text whose upper edge is ``top``, a share of the figure's height; returns its lower edge."""
    figure.text(
        0.1 / figure.get_figwidth(),
        top - _EDGE / 2 / (_POINTS * figure.get_figheight()),
        "\n".join(_lines(figure, text, points)),
        fontsize=points,
        va="top",
        linespacing=1.2,
        **style,
    )
    return top - _height(figure, text, points)


def _height(figure: Figure, text: str, points: float) -> float:
    """A text's height as a share of the figure's."""
    lines = len(_lines(figure, text, points))
    return (1.25 * points * lines + _EDGE * (lines > 0)) / (_POINTS * figure.get_figheight())


def _lines(figure: Figure, text: str, points: float) -> list[str]:
    # On average a character is 0.55 times as wide as high.
    return textwrap.wrap(text, int((figure.get_figwidth() - 0.2) * _POINTS / (0.55 * points)))


def shape_name(report: Report) -> str:
    """A report's models: the name of a published shape, or the names of target and head."""
    return report.get("shape") or " + ".join(
        report[key] for key in ("target", "draft_head") if report.get(key)
    )


def grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """The rows by their panel's name, in the order of the rows."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(key(row), []).append(row)
    return panels


def grid_of(
    names: Mapping[str, Any],
    title: str,
    about: str,
    note: str = "",
    *,
    columns: int,
    width: float,
    height: float,
    **shared: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of panels titled by ``names``; for its texts see `empty_figure`.

    Args:
        columns: The most panels in a row.
        width: A panel's width in inches, like ``height``.
        shared: Passed to `Figure.subplots`.
    """
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    figure = empty_figure(max(6.4, 1.2 + width * columns), 1.6 + height * rows, title, about, note)
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis, name in zip(axes, names, strict=False):
        axis.set_title(name, fontsize=10)
    for axis in axes[len(names) :]:
        axis.remove()
    return figure, axes[: len(names)]


def legend_below(figure: Figure, axis: Axes, columns: int = 6) -> None:
    """Adds one legend for all panels, below them."""
    handles, labels = axis.get_legend_handles_labels()
    columns = min(columns, len(labels))
    engine = figure.get_layout_engine()
    assert engine is not None, "empty_figure sets one"
    left, bottom, width, height = engine.get()["rect"]
    used = 1.7 * ABOUT * -(-len(labels) // columns) / (_POINTS * figure.get_figheight())
    figure.set_layout_engine("constrained", rect=(left, bottom + used, width, height - used))
    figure.legend(
        handles,
        labels,
        loc="lower center",
        bbox_to_anchor=(0.5, bottom),
        ncols=columns,
        frameon=False,
        fontsize=ABOUT,
        borderpad=0.2,
        borderaxespad=0,
    )


def label_lines(axis: Axes, ends: Sequence[tuple[float, float, str, Any]], height: float) -> None:
    """Labels each curve at its end, right of the panel, in the curve's colour and without overlap.

    Args:
        axis: The panel; its limits do not change.
        ends: The x and y of each curve's last point, its name and its colour.
        height: The panel's approximate height in inches.
    """
    transform = axis.transData + axis.transAxes.inverted()
    axis.set_ylim(axis.get_ylim())
    ordered = sorted(
        (float(transform.transform((x, y))[1]), x, y, name, colour) for x, y, name, colour in ends
    )
    places = spread_out([place for place, *_ in ordered], 11 / (_POINTS * height))
    for place, (_, x, y, name, colour) in zip(places, ordered, strict=True):
        axis.annotate(
            name,
            (x, y),
            xytext=(1.05, place),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=colour,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


def spread_out(wanted: Sequence[float], least: float) -> list[float]:
    """Places near the wanted ones, which rise: at least ``least`` apart and at most at 1."""
    groups: list[list[float]] = []
    for place in wanted:
        groups.append([place])
        while len(groups) > 1 and (
            fmean(groups[-1]) - fmean(groups[-2]) < least * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    places = [
        fmean(group) + least * (i - (len(group) - 1) / 2) for group in groups for i in range(len(group))
    ]
    for i in reversed(range(len(places))):
        places[i] = min(places[i], places[i + 1] - least if i + 1 < len(places) else 1.0)
    return places


def without_frame(*axes: Axes) -> None:
    """Hides the upper and right edges of panels."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


def write_picture(path: Path, figure: Figure) -> None:
    """Writes an SVG atomically."""
    # Texts stay texts: they can be searched, and files are small. A fixed salt makes ids reproducible.
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jetspec-jax"}),
        replacing(path) as partial,
    ):
        figure.savefig(partial, format="svg", metadata={"Date": None})
    print(f"wrote {path}")
