"""The picture of the ledger: shares of outputs equal to plain decoding's, and gaps at differences."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.common.picture import COLOURS, Report, empty_figure, legend_below, without_frame
from bench.common.report import measured_on
from jetspec_jax.inspect.exactness import TIE_GAP

# Smaller gaps are drawn in the first bin: a logarithmic axis has no place for exact ties.
LEAST_GAP = 1e-7
BINS_PER_DECADE = 3
# The 95 % interval of the standard normal distribution, in standard deviations.
DEVIATIONS = 1.96


def draw_ledger(report: Report) -> Figure:
    """Shares of outputs equal to plain decoding's by position, and gaps at the first differences."""
    rows, entries, given = report["rows"], report["divergences"], report["arguments"]
    # All methods with one type and temperature share a curve: they hardly differ in this.
    cases = list(dict.fromkeys((row["dtype"], row["T"]) for row in rows))
    figure = empty_figure(
        11,
        5.2,
        "How long outputs of trees are equal to plain decoding's, token for token",
        f"{given['num_prompts']} prompts, {given['max_tokens']} tokens each, batch {given['batch']}, "
        f"attention by {given['implementation']}, {measured_on(report)}",
        "Shaded: 95 % intervals of the shares (Wilson). Curves that stay at 1 overlap.",
    )
    left, right = figure.subplots(1, 2)
    gaps = []
    for i, case in enumerate(cases):
        differences = [entry for entry in entries if (entry["dtype"], entry["T"]) == case]
        outputs = sum(row["prompts"] for row in rows if (row["dtype"], row["T"]) == case)
        label = f"{case[0]}, temperature {case[1]:g}: {len(differences)} of {outputs:,} differ"
        positions = [entry["position"] for entry in differences]
        _equal_so_far(left, positions, outputs, given["max_tokens"], i, label)
        gaps.append([min(max(entry["gap"], LEAST_GAP), 10.0) for entry in differences])
    left.set_xlabel("position among the generated tokens")
    left.set_ylabel("share of outputs equal so far")
    left.set_ylim(0, 1.04)
    _histogram(right, gaps)
    without_frame(left, right)
    legend_below(figure, left, columns=2)
    return figure


def _equal_so_far(
    axis: Axes, positions: Sequence[int], outputs: int, max_tokens: int, i: int, label: str
) -> None:
    steps = np.arange(max_tokens + 1)
    parted = np.searchsorted(np.sort(np.asarray(positions, np.int64)), steps, side="left")
    share, colour = 1 - parted / outputs, COLOURS[i % len(COLOURS)]
    low, high = wilson(share, outputs)
    axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0, step="pre")
    axis.plot(steps, share, color=colour, linewidth=1.5, label=label, drawstyle="steps-pre")


def wilson(share: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's 95 % interval for shares of ``count`` outputs."""
    square = DEVIATIONS**2 / count
    middle = (share + square / 2) / (1 + square)
    reach = np.sqrt(square * (share * (1 - share) + square / 4)) / (1 + square)
    return middle - reach, middle + reach


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
    axis.set_ylabel("outputs that differ from there on")
    if not any(gaps):
        axis.set_yticks([])
        axis.annotate("no output differs", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=10)
        return
    decades = round(math.log10(10 / LEAST_GAP))
    bins = np.logspace(math.log10(LEAST_GAP), 1, decades * BINS_PER_DECADE + 1)
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(gaps))]
    axis.hist([np.asarray(case, float) for case in gaps], bins=bins.tolist(), stacked=True, color=colours)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
