"""The picture of the ledger: how many outputs still are plain decoding's, and how firm the choices were."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bench.common.picture import COLOURS, empty_figure, without_frame, write_png
from jetspec_jax.inspect.exactness import TIE_GAP

# Gaps below this are drawn in the first bin: a logarithmic axis has no place for exact ties.
LEAST_GAP = 1e-7
BINS_PER_DECADE = 3

Row = Mapping[str, Any]


def plot_ledger(rows: Sequence[Row], entries: Sequence[Row], max_tokens: int, title: str, path: Path) -> None:
    """Writes a PNG.

    Args:
        rows: Totals by dtype, T and method.
        entries: The differences.
        max_tokens: Positions of an output.
        title: Above both panels.
        path: Where to.
    """
    # All trees of one type and temperature are one line: methods hardly differ in this.
    cases = list(dict.fromkeys((row["dtype"], row["T"]) for row in rows))
    figure = empty_figure(11, 4.2, title)
    left, right = figure.subplots(1, 2)
    gaps, labels = [], []
    for i, case in enumerate(cases):
        own = [entry for entry in entries if (entry["dtype"], entry["T"]) == case]
        outputs = sum(row["prompts"] for row in rows if (row["dtype"], row["T"]) == case)
        label = f"{case[0]}, T = {case[1]:g}: {len(own)} of {outputs:,} part"
        _equal_so_far(left, [entry["position"] for entry in own], outputs, max_tokens, i, label)
        gaps.append([min(max(entry["gap"], LEAST_GAP), 10.0) for entry in own])
        labels.append(label)
    left.set_xlabel("position among the generated tokens")
    left.set_ylabel("share of outputs equal to plain decoding's so far")
    left.set_ylim(-0.02, 1.04)
    left.legend(frameon=False, fontsize=8, loc="lower left")
    _histogram(right, gaps)
    without_frame(left, right)
    write_png(path, figure)


def _equal_so_far(
    axis: Axes, positions: Sequence[int], outputs: int, max_tokens: int, i: int, label: str
) -> None:
    steps = np.arange(max_tokens + 1)
    parted = np.searchsorted(np.sort(np.asarray(positions, np.int64)), steps, side="left")
    # Lines that stay at 1 lie on each other: the earlier is the wider.
    width = 1.5 if positions else max(9.0 - 2.0 * i, 1.5)
    axis.plot(
        steps,
        1 - parted / outputs,
        color=COLOURS[i % len(COLOURS)],
        linewidth=width,
        label=label,
        drawstyle="steps-pre",
    )


def _histogram(axis: Axes, gaps: Sequence[Sequence[float]]) -> None:
    axis.axvline(TIE_GAP, color="black", linestyle="dashed", linewidth=1)
    axis.annotate(
        f"float32: a tie below {TIE_GAP:.0e}",
        (TIE_GAP, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -10),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axis.set_xscale("log")
    axis.set_xlim(LEAST_GAP, 10)
    axis.set_xlabel(f"gap between the two likeliest choices (at most {LEAST_GAP:.0e}: leftmost)")
    axis.set_ylabel("outputs that part there")
    if not any(gaps):
        axis.set_yticks([])
        axis.annotate("no output parts", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=10)
        return
    decades = round(math.log10(10 / LEAST_GAP))
    bins = np.logspace(math.log10(LEAST_GAP), 1, decades * BINS_PER_DECADE + 1)
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(gaps))]
    axis.hist([np.asarray(own, float) for own in gaps], bins=bins.tolist(), stacked=True, color=colours)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
