"""Pictures of acceptance: tokens per round, and a profile's tables."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.picture import COLOURS, Report, empty_figure, grid_of, grouped, legend_below, without_frame
from bench.common.report import measured_on


def draw_acceptance(report: Report) -> Figure:
    """Tokens per round by budget: a panel for each temperature and number of candidates."""
    rows = report["rows"]
    panels = grouped(rows, lambda row: f"T = {row['temperature']:g}, {row['candidates']} candidates")
    given = report["arguments"]
    figure, axes = grid_of(
        panels,
        "Tokens per round by the size of the trees",
        f"{given['num_prompts']} prompts x {given['max_tokens']} tokens, {measured_on(report)}",
        "Replayed along one text, so nothing is timed.",
        columns=len({row["candidates"] for row in rows}),
        width=3.2,
        height=2.8,
        sharey="row",
    )
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    for axis, panel in zip(axes, panels.values(), strict=True):
        for i, name in enumerate(names):
            points = sorted((row["budget"], row["tau"]) for row in panel if row["algorithm"] == name)
            style = {"color": COLOURS[i % len(COLOURS)], "marker": "o", "markersize": 3.5}
            axis.plot(*zip(*points, strict=True), label=name, **style)
        budgets = sorted({row["budget"] for row in panel})
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.set_xlabel("nodes of a tree")
        axis.set_ylabel("tokens per round")
        temperature = panel[0]["temperature"]
        axis.set_ylim(0, 1.05 * max(row["tau"] for row in rows if row["temperature"] == temperature))
    legend_below(figure, axes[0])
    without_frame(*axes)
    return figure


def draw_profile(profile: Report) -> Figure:
    """A profile's tables of shares: for all rounds and for each class."""
    meta = profile["meta"]
    given = meta["arguments"]
    panels = {f"all {meta['rounds']:,} rounds": profile["depth_rank_accept"]}
    for name, table in profile["per_class_histograms"].items():
        panels[f"{name}: {meta['rounds_by_class'][name]:,} rounds"] = table
    figure = empty_figure(
        1 + 3.6 * len(panels),
        6,
        "How often the target chooses a candidate, by depth and rank",
        f"{meta['prompts']} prompts, {given['max_tokens']} tokens each, trees of {given['budget']} by "
        f"{given['algorithm']}, temperature {given['temperature']:g}, {measured_on(meta)}",
        "Shares of the counted nodes in per cent; the shade is the square root of the share.",
    )
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, table) in zip(axes, panels.items(), strict=True):
        _heat_map(axis, table)
        axis.set_title(name, fontsize=10)
        axis.set_ylabel("depth of the node")
    return figure


def _heat_map(axis: Axes, shares: Sequence[Sequence[float]]) -> None:
    """Shares by depth (downwards) and rank, with figures in per cent."""
    table = np.asarray(shares, float)
    # Small shares decide about caps, and the square root makes them visible.
    axis.imshow(np.sqrt(table), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (depth, rank), share in np.ndenumerate(table):
        if share > 0:
            text = f"{100 * share:.0f}" if share >= 0.0995 else f"{100 * share:.1f}"
            colour = "white" if share > 0.4 else "black"
            axis.text(rank, depth, text, ha="center", va="center", fontsize=8, color=colour)
    axis.set_xticks(range(table.shape[1]), [str(rank + 1) for rank in range(table.shape[1])])
    axis.set_yticks(range(len(table)), [str(depth) for depth in range(len(table))])
    axis.set_xlabel("rank of the head's candidate (figures in %)")
