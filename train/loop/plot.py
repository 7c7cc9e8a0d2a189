"""Plots of a training run from its log, and helpers for other plots."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter

from jetspec_jax.checkpoint.files import replacing
from train.loop.log import TAU_BY_SOURCE, Record, read_log

DPI = 100
INCHES = (16.0, 8.0)
TRAIN, VALIDATION = "#0072b2", "#d55e00"
DEPTHS = (1, 2, 4, 8)
#: Minimum seconds between two drawings; a drawing takes a second or two.
LIVE_SECONDS = 60.0
SMOOTHED = 0.02  # share of a run's steps that a point of a smoothed curve averages
TRAIN_ACCURACY, VALIDATION_ACCURACY = "accuracy_by_depth", "validation_accuracy_by_depth"
ACCURACY = "drafts equal to the target's choice"
# With a fixed location, matplotlib does not warn about slow legends.
LEGEND: dict[str, Any] = {
    "loc": "best", "framealpha": 0.8, "edgecolor": "none", "fontsize": 9, "title_fontsize": 9,
}  # fmt: skip
# Line styles of temperatures; they repeat after the last one.
STYLES = ("-", "--", ":", "-.")
# Characters of a source's name in a legend.
LONGEST_NAME = 24
# A legend above the panel, for panels that curves may fill.
ABOVE: dict[str, Any] = {**LEGEND, "loc": "lower left", "bbox_to_anchor": (0, 1), "handlelength": 1.2}

Panel = Callable[[Axes, Sequence[Record]], None]


def plot_training(log: Path, picture: Path, title: str) -> None:
    """Writes a PNG of 1600 x 800: losses, accuracies, and lengths of a chain and of trees.

    Below are small panels for rates and speed.

    Args:
        log: A ``log.jsonl``. Panels without data are omitted.
        picture: The file, which is written atomically.
        title: The title above all panels.

    Raises:
        FileNotFoundError: There is no such log.
        ValueError: The log is damaged or has no step.
    """
    records = read_log(log)
    if not any("loss" in record for record in records):
        raise ValueError(f"{log} has no training step yet, so there is nothing to draw")
    keys = {key for record in records for key in record}
    columns = [[_losses]]
    if keys & {TRAIN_ACCURACY, VALIDATION_ACCURACY}:
        columns += [[_accuracies], [_last_accuracies]]
    chain = [_chain] if keys & {"accepted_length", "validation_accepted_length"} else []
    if lengths := chain + ([_trees] if "tau" in keys else []):
        columns.append(lengths)
    if _compared(records):
        columns.append([_sources])
    small = [[draw] for key, draw in SMALL.items() if key in keys]
    # Without pyplot there is no global state, and no window system is asked for.
    figure = Figure(figsize=INCHES, layout="constrained")
    rows = [columns, small] if small else [columns]
    parts = figure.subfigures(len(rows), 1, height_ratios=(2.4, 1)[: len(rows)], squeeze=False).flat
    for part, row in zip(parts, rows, strict=True):
        _draw_columns(part, row, records)
    figure.suptitle(title, fontsize=11)
    save(figure, picture)


class LivePicture:
    """The plot of an active run: a call redraws it, at most once per `LIVE_SECONDS`."""

    def __init__(self, log: Path, picture: Path, title: str):
        """Arguments as for `plot_training`; calls in the first `LIVE_SECONDS` draw nothing."""
        self._given, self._drawn_at = (log, picture, title), time.monotonic()

    def __call__(self) -> None:
        """Redraws the plot; raises the errors of `plot_training`."""
        if time.monotonic() >= self._drawn_at + LIVE_SECONDS:
            plot_training(*self._given)
            self._drawn_at = time.monotonic()


def _draw_columns(part: SubFigure, columns: Sequence[Sequence[Panel]], records: Sequence[Record]) -> None:
    """Draws one panel in each column, or two, one above the other."""
    # The only panel of a column has the column's whole height.
    axes = part.subplot_mosaic([[column[row] for column in columns] for row in (0, -1)])
    for draw, axis in axes.items():
        draw(axis, records)
        axis.spines[["top", "right"]].set_visible(False)


def smooth(values: Float[np.ndarray, "n *columns"], window: int) -> Float[np.ndarray, "n *columns"]:
    """Means of each row and ``window // 2`` rows to either side; NaN is skipped."""
    reach, count = window // 2, len(values)
    ends, starts = np.minimum(np.arange(count) + reach + 1, count), np.maximum(np.arange(count) - reach, 0)

    def windows(x: np.ndarray) -> np.ndarray:
        sums = np.concatenate([np.zeros((1, *x.shape[1:])), np.cumsum(x, axis=0)])
        return sums[ends] - sums[starts]

    known = np.isfinite(values)
    total, present = windows(np.where(known, values, 0.0)), windows(known.astype(float))
    return np.where(present > 0, total / np.maximum(present, 1), np.nan)


def _series(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have the key; null becomes NaN."""
    found = [record for record in records if key in record]
    return np.array([record["step"] for record in found], float), np.array([x[key] for x in found], float)


def _smoothed(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    steps, values = _series(records, key)
    return steps, smooth(values, round(SMOOTHED * len(values)))


def _losses(axis: Axes, records: Sequence[Record]) -> None:
    steps, losses = _series(records, "loss")
    means = _smoothed(records, "loss")[1]
    axis.plot(steps, losses, color=TRAIN, alpha=0.3, linewidth=0.6)
    axis.plot(steps, means, color=TRAIN, linewidth=1.6, label="train, smoothed")
    _points(axis, records, "validation_loss")
    if np.nanmin(losses) > 0 and np.nanmax(means) > 4 * np.nanmin(means):
        _log_axis(axis)
    axis.set_ylabel("loss (nats)")
    _step_axis(axis)
    axis.legend(**LEGEND)


def _points(axis: Axes, records: Sequence[Record], key: str) -> None:
    steps, values = _series(records, key)
    if len(steps):
        axis.plot(steps, values, "o-", color=VALIDATION, markersize=4, linewidth=1.2, label="validation")


def _accuracies(axis: Axes, records: Sequence[Record]) -> None:
    train, validation = _smoothed(records, TRAIN_ACCURACY), _series(records, VALIDATION_ACCURACY)
    last = max(values.shape[1] for _, values in (train, validation) if len(values))
    depths = [*(depth for depth in DEPTHS if depth < last), last]
    for depth, colour in zip(depths, shades("viridis", 0, 0.85, len(depths)), strict=True):
        label = f"{depth}"
        for (steps, values), style in ((train, "-"), (validation, "o:")):
            if len(values):
                axis.plot(steps, values[:, depth - 1], style, color=colour, markersize=4, label=label)
                label = None
    axis.set_ylabel(ACCURACY)
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    _step_axis(axis)
    axis.legend(title="a chain at depth: train (lines), validation (dots)", ncols=len(depths), **ABOVE)


def _last_accuracies(axis: Axes, records: Sequence[Record]) -> None:
    """Accuracies of the newest validation as bars, and of the newest training steps as dots."""
    _, validation = _series(records, VALIDATION_ACCURACY)
    if len(validation):
        axis.bar(range(1, validation.shape[1] + 1), validation[-1], color="#f2b48c", label="validation")
    _, train = _smoothed(records, TRAIN_ACCURACY)
    if len(train):
        axis.plot(
            range(1, train.shape[1] + 1), train[-1], "o", color=TRAIN, markersize=4, label="train, smoothed"
        )
    axis.set_xlabel("draft depth")
    axis.set_ylabel(ACCURACY)
    axis.set_ylim(bottom=0)
    axis.set_xlim(0.4, axis.get_xlim()[1])
    axis.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.legend(title="a chain at the end", ncols=2, **ABOVE)


def _chain(axis: Axes, records: Sequence[Record]) -> None:
    """Accepted length of a chain: drafts before the first that differs from the target's choice."""
    steps, lengths = _smoothed(records, "accepted_length")
    if len(steps):
        axis.plot(steps, lengths, color=TRAIN, linewidth=1.6, label="train, smoothed")
    _points(axis, records, "validation_accepted_length")
    axis.set_title("a chain of the likeliest drafts", fontsize=10)
    axis.set_ylabel("accepted drafts")
    axis.set_ylim(bottom=0)
    _step_axis(axis)
    axis.legend(**LEGEND)


def _trees(axis: Axes, records: Sequence[Record]) -> None:
    """τ of trees on held-out prompts: tokens committed per round, including the bonus token."""
    measured = [record for record in records if "tau" in record]
    budgets = sorted({int(budget) for record in measured for budget in record["tau"]})
    for budget, colour in zip(budgets, shades("Greens", 0.45, 0.95, len(budgets)), strict=True):
        points = [(x["step"], x["tau"][str(budget)]) for x in measured if str(budget) in x["tau"]]
        axis.plot(*np.array(points, float).T, "s--", color=colour, markersize=4, label=f"tree of {budget}")
    axis.set_title("trees, decoding held-out prompts", fontsize=10)
    axis.set_ylabel("τ, tokens a round")
    axis.set_ylim(bottom=0)
    _step_axis(axis)
    axis.legend(**LEGEND)


def _compared(records: Sequence[Record]) -> list[tuple[str, str]]:
    """The (source, temperature) pairs with a τ, in the order of the log; empty if there is only one pair."""
    pairs = {
        (source, temperature): None
        for record in records
        for source, temperatures in record.get(TAU_BY_SOURCE, {}).items()
        for temperature in temperatures
    }
    return list(pairs) if len(pairs) > 1 else []


def _sources(axis: Axes, records: Sequence[Record]) -> None:
    """τ of trees of the largest budget: a colour for each source, a line style for each temperature."""
    measured, pairs = [record for record in records if TAU_BY_SOURCE in record], _compared(records)
    sources = list(dict.fromkeys(source for source, _ in pairs))
    temperatures = list(dict.fromkeys(temperature for _, temperature in pairs))
    colours = dict(zip(sources, shades("turbo", 0.05, 0.95, len(sources)), strict=True))
    largest = max((budget for record in measured for budget in record["tau"]), key=int)
    for source, temperature in pairs:
        points = [
            (record["step"], record[TAU_BY_SOURCE].get(source, {}).get(temperature, {}).get(largest))
            for record in measured
        ]
        name = source if len(source) <= LONGEST_NAME else f"{source[: LONGEST_NAME - 1]}…"
        # Matplotlib reads "$" as the beginning of a formula, and leaves out labels that begin with "_".
        label = f"T = {temperature}, {name}".replace("$", r"\$")
        style = {"ls": STYLES[temperatures.index(temperature) % len(STYLES)], "color": colours[source]}
        axis.plot(*np.array(points, float).T, marker="o", markersize=3, linewidth=1, label=label, **style)
    axis.set_title(f"trees of {largest} by T and source", fontsize=10)
    axis.set_ylabel("τ, tokens a round")
    axis.set_ylim(bottom=0)
    _step_axis(axis)
    axis.legend(**{**LEGEND, "fontsize": 7})


def _small(key: str, label: str, tick: str = "{x:g}", *, log: bool = False) -> Panel:
    def draw(axis: Axes, records: Sequence[Record]) -> None:
        steps, values = _series(records, key)
        axis.plot(steps, values, color="#404040", linewidth=0.6)
        axis.set_ylabel(label, fontsize=9)
        axis.tick_params(labelsize=8)
        if log and (values[np.isfinite(values)] > 0).all():
            _log_axis(axis)
        else:
            axis.set_ylim(bottom=0)
            axis.yaxis.set_major_formatter(StrMethodFormatter(tick))
        _step_axis(axis)

    return draw


# The small panels, by the record key that each draws.
SMALL = {
    "learning_rate": _small("learning_rate", "learning rate"),
    "gradient_norm": _small("gradient_norm", "norm of the gradient", log=True),
    "tokens_per_second": _small("tokens_per_second", "tokens/s", "{x:,.0f}"),
    "memory_gib": _small("memory_gib", "peak memory (GiB)"),
}


def _log_axis(axis: Axes) -> None:
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _step_axis(axis: Axes) -> None:
    axis.set_xlabel("optimiser step", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def shades(name: str, low: float, high: float, count: int) -> Float[np.ndarray, "n 4"]:
    """Colours of a colour map, evenly spaced between two positions in 0..1."""
    return matplotlib.colormaps[name](np.linspace(low, high, count))


def save(figure: Figure, picture: Path) -> None:
    """Writes a PNG or an SVG, by the file's suffix, atomically and reproducibly."""
    kind = picture.suffix.removeprefix(".")
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jetspec-jax"}),
        replacing(picture) as partial,
    ):
        figure.savefig(partial, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
