"""Pictures of acceptance: tokens per round, a profile's tables, and a diagnosis of a draft head."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.acceptance.counts import FAITHFUL
from bench.common.picture import (
    BLUE,
    COLOURS,
    ORANGE,
    Report,
    empty_figure,
    grid_of,
    grouped,
    legend_below,
    without_frame,
)
from bench.common.report import measured_on

LIGHT = "#999999"


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
        _heat_map(axis, table, first_depth=0)
        axis.set_title(name, fontsize=10)
        axis.set_ylabel("depth of the node")
    return figure


def draw_diagnosis(report: Report) -> Figure:
    """The report of ``diagnose``: branches, faithfulness by depth, committed tokens and accepted ranks."""
    given = report["arguments"]
    figure = empty_figure(
        11.5,
        9.6,
        "Confidence of the draft head and of the target, and accepted nodes",
        f"{given['num_prompts']} prompts, {given['max_tokens']} tokens each, temperature "
        f"{given['temperature']:g}, {measured_on(report)}",
    )
    (scatter, by_depth), (committed, ranks) = figure.subplots(2, 2)
    _scatter(scatter, report["branches"])
    _by_depth(by_depth, report["faithfulness"])
    _committed(committed, report["committed_per_round"])
    accepted = report["accepted_by_depth_and_rank"]
    shares = np.asarray(accepted["nodes"]) / max(accepted["rounds"], 1)
    _heat_map(ranks, shares.tolist(), first_depth=1)
    ranks.set_ylabel("depth of the accepted node")
    ranks.set_title("share of rounds that accept a node, by its rank", fontsize=10)
    without_frame(scatter, by_depth, committed)
    return figure


def _heat_map(axis: Axes, shares: Sequence[Sequence[float]], *, first_depth: int) -> None:
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
    axis.set_yticks(range(len(table)), [str(first_depth + depth) for depth in range(len(table))])
    axis.set_xlabel("rank of the head's candidate (figures in %)")


def _scatter(axis: Axes, branches: Mapping[str, Sequence[float]]) -> None:
    draft, target = np.asarray(branches["draft"]), np.asarray(branches["target"])
    low = float(min(draft.min(), target.min()))
    diagonal = np.array([low, 0.0])
    axis.fill_between(
        diagonal, diagonal - FAITHFUL, diagonal + FAITHFUL, color=LIGHT, alpha=0.25, linewidth=0
    )
    axis.plot(diagonal, diagonal, color="black", linewidth=0.8)
    axis.scatter(draft, target, s=8, alpha=0.4, color=BLUE, linewidths=0)
    axis.set_ylim(1.02 * float(target.min()) - 1, 1)
    axis.set_xlim(1.02 * float(draft.min()) - 1, 1)
    axis.set_xlabel("head's log-probability of its rank-1 branch, nats")
    axis.set_ylabel("target's log-probability of the same tokens, nats")
    within = np.mean(np.abs(draft - target) <= FAITHFUL)
    axis.set_title(f"{within:.0%} of {len(draft):,} branches within {FAITHFUL:g} nats (grey)", fontsize=10)


def _by_depth(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    depths = [row["depth"] for row in rows]
    axis.plot(depths, [100 * row["faithful"] for row in rows], color=BLUE, marker="o", markersize=4)
    axis.set_ylim(0, 104)
    axis.set_xticks(depths)
    axis.set_xlabel("depth of the branch")
    axis.set_ylabel(f"branches within {FAITHFUL:g} nats, %")
    axis.set_title("faithfulness by depth", fontsize=10)


def _committed(axis: Axes, histograms: Mapping[str, Sequence[int]]) -> None:
    most = max(map(len, histograms.values()))
    for i, (name, counts) in enumerate(histograms.items()):
        shares = np.zeros(most)
        shares[: len(counts)] = np.asarray(counts) / max(sum(counts), 1)
        mean = float(np.arange(most) @ shares)
        colour = (ORANGE, BLUE)[i % 2]
        places = np.arange(most)[1:] + 0.4 * (i - 0.5)
        axis.bar(places, 100 * shares[1:], 0.4, color=colour, label=f"{name}: {mean:.2f} a round")
    axis.set_xticks(range(1, most))
    axis.set_xlabel("tokens that a round commits")
    axis.set_ylabel("rounds, %")
    axis.set_title("acceptance length", fontsize=10)
    axis.legend(loc="best", frameon=False, fontsize=9)
