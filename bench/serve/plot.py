"""The picture of ``serve``: throughput and latency by load."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.picture import COLOURS, Report, Row, empty_figure, grouped, without_frame


def draw_serve(report: Report) -> Figure:
    """A column per set: tokens per second, time to first token, and time end to end."""
    sets = grouped(report["rows"], lambda row: row["set"])
    figure = empty_figure(
        1.0 + 4.6 * max(len(sets), 1.4),
        9.0,
        "A server under load, measured by its clients",
        _about(report),
        " ".join(report["notes"]),
    )
    grid = figure.subplots(3, len(sets), squeeze=False)
    for column, (name, rows) in enumerate(sets.items()):
        top, middle, bottom = (grid[row][column] for row in range(3))
        labels = list(dict.fromkeys(map(_scene, rows)))
        _panel(top, rows, labels, lambda row: row["goodput_tokens_per_second"])
        top.set_title(name, fontsize=10)
        _panel(middle, rows, labels, lambda row: row["ttft"]["p50_ms"], lambda row: row["ttft"]["p99_ms"])
        _panel(bottom, rows, labels, lambda row: row["e2e"]["p50_ms"], lambda row: row["e2e"]["p99_ms"])
        if column == 0:
            top.set_ylabel("good tokens per second")
            middle.set_ylabel("ms to first token, p50 to p99")
            bottom.set_ylabel("ms end to end, p50 to p99")
            top.legend(loc="best", fontsize=7, frameon=False)
        middle.set_yscale("log")
        bottom.set_yscale("log")
    return figure


def _scene(row: Row) -> str:
    if row["concurrency"] is not None:
        return f"{row['concurrency']} at\na time"
    return f"{row['load']:g} x\npeak" if row["load"] is not None else f"{row['rate']:g}\nper second"


def _panel(
    axis: Axes,
    rows: Sequence[Row],
    labels: list[str],
    value: Callable[[Row], float],
    late: Callable[[Row], float] | None = None,
) -> None:
    """A curve per method, with whiskers up to ``late`` if it is given."""
    methods = grouped(rows, lambda row: row["method"])
    for number, (method, of_method) in enumerate(methods.items()):
        # Whiskers of different methods are drawn side by side.
        aside = 0.08 * (number - (len(methods) - 1) / 2) if late else 0.0
        places: list[float] = [labels.index(_scene(row)) + aside for row in of_method]
        heights = [value(row) for row in of_method]
        above = [late(row) - value(row) if late else 0.0 for row in of_method]
        # A gap in the curve separates fixed concurrency from random arrivals.
        cut = sum(row["concurrency"] is not None for row in of_method)
        for values in (places, heights, above):
            values.insert(cut, np.nan)
        axis.errorbar(
            places,
            heights,
            yerr=np.array([np.zeros(len(above)), above]) if late else None,
            marker="o",
            markersize=4,
            elinewidth=1.0,
            color=COLOURS[number % len(COLOURS)],
            label=method,
        )
    axis.set_xticks(range(len(labels)), labels, fontsize=8)
    without_frame(axis)


def _about(report: Report) -> str:
    given = report["arguments"]
    what = given["url"] or report["device"]
    limits = f"{given['max_num_seqs']} slots, a waiting queue of {given['max_waiting']}"
    return f"{what}; {limits}; client and server share {report['processors']} processors"
