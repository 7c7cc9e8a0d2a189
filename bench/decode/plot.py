"""The pictures of ``decode``: tokens per round and speed by budget, and acceptance by depth."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bench.common.picture import COLOURS, GREY, Report, Row, empty_figure, label_lines, without_frame
from bench.common.report import measured_on
from bench.common.timing import median
from bench.decode.report import at_largest_budget, temperatures_of

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
LABELS = {"tau": "acceptance length τ (tokens per round)", "speed-up": "speed relative to plain decoding"}
PLAIN = "plain decoding"
BASELINES = {"chain": ("linear chain", "dashed"), "plain": (PLAIN, "dotted")}
# The most curves of a panel whose names are in a legend.
FEW = 6
INCHES = 3.0
NOTE = (
    "Whiskers: the slowest and the fastest of {repeats} timed runs. τ is the mean over all rounds, without "
    "an interval."
)


def draw_decode(report: Report) -> Figure:
    """A column per temperature: tokens per round and speed by budget, and acceptance by depth."""
    rows = report["rows"]
    temperatures = temperatures_of(rows)
    names = list(dict.fromkeys(row["algorithm"] for row in rows if row["algorithm"]))
    styles = {name: _style(i) for i, name in enumerate(names)}
    figure = empty_figure(
        1.4 + 5.6 * len(temperatures),
        1.2 + 3 * INCHES,
        "Tokens per round and speed of trees, by budget",
        *_about(report),
    )
    axes = figure.subplots(3, len(temperatures), squeeze=False, sharey="row")
    for column, temperature in zip(axes.T, temperatures, strict=True):
        at_temperature = [row for row in rows if row["temperature"] == temperature]
        for axis, key in zip(column[:2], LABELS, strict=True):
            _by_budget(axis, at_temperature, key, styles)
        column[0].set_title(_temperature(temperature), fontsize=10)
        _by_depth(column[2], at_temperature, styles)
    for axis, label in zip(axes[:, 0], (*LABELS.values(), "share of rounds"), strict=True):
        axis.set_ylabel(label)
    # Labels are placed after all panels of a row are drawn: only then are the shared limits known.
    for column, temperature in zip(axes.T, temperatures, strict=True):
        at_temperature = [row for row in rows if row["temperature"] == temperature]
        for axis, key in zip(column[:2], LABELS, strict=True):
            label_lines(axis, _ends(at_temperature, key, styles), INCHES)
    return figure


def draw_budgets(report: Report, algorithms: Sequence[str]) -> Figure:
    """Two panels, tokens per round and speed by budget, of some algorithms at all temperatures."""
    rows = report["rows"]
    figure = empty_figure(9.6, 4.4, "Tokens per round and speed, by budget", *_about(report))
    axes = figure.subplots(1, 2)
    for axis, (key, label) in zip(axes, LABELS.items(), strict=True):
        ends = []
        for i, temperature in enumerate(temperatures_of(rows)):
            at_temperature = [row for row in rows if row["temperature"] == temperature]
            styles = {name: _style(2 * i + j) for j, name in enumerate(algorithms)}
            _by_budget(axis, at_temperature, key, styles, baselines=("plain",))
            ends += [
                (x, y, name if name == PLAIN else f"{name}, {_temperature(temperature)}", colour)
                for x, y, name, colour in _ends(at_temperature, key, styles, baselines=("plain",))
            ]
        axis.set_ylabel(label)
        label_lines(axis, list(dict.fromkeys(ends)), INCHES)
    return figure


def _about(report: Report) -> tuple[str, str]:
    given = report["arguments"]
    about = (
        f"Pair {given['target']}: {given['num_prompts']} prompts of {given['prompts']}, "
        f"{given['max_tokens']} tokens each, batch {given['batch']}, {measured_on(report)}"
    )
    return about, NOTE.format(repeats=given["repeats"])


def _temperature(value: float) -> str:
    return f"temperature {value:g}"


def _style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.4,
        "linestyle": "solid" if number < len(COLOURS) else "dashdot",
    }


def _by_budget(
    axis: Axes,
    rows: Sequence[Row],
    key: str,
    styles: Mapping[str, Mapping[str, Any]],
    *,
    baselines: Sequence[str] = tuple(BASELINES),
) -> None:
    for name, style in styles.items():
        curve = sorted((row for row in rows if row["algorithm"] == name), key=lambda row: row["budget"])
        budgets = [row["budget"] for row in curve]
        axis.plot(budgets, [row[key] for row in curve], **style)
        if key == "speed-up":
            lows, highs = zip(*map(_range, curve), strict=True)
            axis.vlines(budgets, lows, highs, colors=style["color"], linewidth=1, alpha=0.6)
    for method in baselines:
        [level] = [row[key] for row in rows if row["method"] == method]
        axis.axhline(level, color=GREY, linestyle=BASELINES[method][1], linewidth=1.2)
    budgets = sorted({row["budget"] for row in rows if row["algorithm"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [str(budget) for budget in budgets])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("budget (most nodes of a tree)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    without_frame(axis)


def _range(row: Row) -> tuple[float, float]:
    """The speeds of the slowest and the fastest timed run, relative to plain decoding's median."""
    # Older reports lack the tokens of each run, which were then the same in all runs.
    tokens = row.get("tokens") or [row["tokens/s"] * median(row["seconds"])] * len(row["seconds"])
    speeds = [count / seconds for count, seconds in zip(tokens, row["seconds"], strict=True)]
    return min(speeds) / row["plain tokens/s"], max(speeds) / row["plain tokens/s"]


def _ends(
    rows: Sequence[Row],
    key: str,
    styles: Mapping[str, Mapping[str, Any]],
    *,
    baselines: Sequence[str] = tuple(BASELINES),
) -> list[tuple[float, float, str, Any]]:
    """The last point, the name and the colour of every curve."""
    last = max(row["budget"] for row in rows if row["algorithm"])
    ends = [
        (last, row[key], row["algorithm"], styles[row["algorithm"]]["color"])
        for row in rows
        if row["algorithm"] in styles and row["budget"] == last
    ]
    named = [(BASELINES[row["method"]][0], row) for row in rows if row["method"] in baselines]
    return [*ends, *((last, row[key], name, GREY) for name, row in named)]


def _by_depth(axis: Axes, rows: Sequence[Row], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """At most six curves: the chain, and the algorithms with the most tokens per round."""
    ranked = sorted(at_largest_budget(rows), key=lambda row: row["tau"], reverse=True)
    chain = [row for row in ranked if row["method"] == "chain"]
    trees = [row for row in ranked if row["method"] != "chain"]
    for row in trees[: FEW - 1] + chain:
        style = styles.get(row["algorithm"] or "", {"color": GREY, "linestyle": "dashed", "linewidth": 1.2})
        depths = range(1, len(row["acceptance"]) + 1)
        axis.plot(depths, row["acceptance"], label=row["algorithm"] or "linear chain", **style)
    axis.set_xlabel(f"least number of accepted drafted tokens; budget {trees[0]['budget']}")
    axis.set_ylim(0, 1.02)
    left_out = len(trees) - (FEW - 1)
    title = f"the {FEW - 1} longest of {len(trees)}" if left_out > 0 else None
    axis.legend(loc="best", frameon=False, fontsize=8, title=title, title_fontsize=8)
    axis.grid(alpha=0.3)
    without_frame(axis)
