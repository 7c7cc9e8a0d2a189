"""The picture of the ablations: all variants side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from train.loop.plot import ABOVE, ACCURACY, DEPTHS, save, shades

INCHES = (14.0, 6.0)


def plot_ablations(results: Mapping[str, Any], picture: Path) -> None:
    """Writes a PNG of 1400 x 600 and an SVG: acceptance lengths by budget, and accuracies by depth.

    Args:
        results: "variants" by name, each with "label", "tau" (by budget), "accepted_length" and
            "accuracy_by_depth", drawn in their order; "budgets"; and "device".
        picture: The PNG; the SVG lies beside it. Each is written whole or not at all.

    Raises:
        ValueError: The results lack something; the message lists all of it.
    """
    _check(results)
    figure = Figure(figsize=INCHES, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    variants, budgets = list(results["variants"].values()), results["budgets"]

    height = 0.84 / len(budgets)
    for i, (budget, shade) in enumerate(zip(budgets, shades("Blues", 0.35, 0.9, len(budgets)), strict=True)):
        places = [place + (i - (len(budgets) - 1) / 2) * height for place in range(len(variants))]
        lengths = [variant["tau"][str(budget)] for variant in variants]
        bars = left.barh(places, lengths, height=0.92 * height, color=shade, label=f"{budget} nodes")
        left.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    left.set_yticks(range(len(variants)), [variant["label"] for variant in variants])
    left.invert_yaxis()
    left.margins(x=0.1, y=0.02)
    left.set_xlabel("acceptance length τ (tokens a round)")
    left.legend(ncols=len(budgets), **ABOVE)

    last = max(len(variant["accuracy_by_depth"]) for variant in variants)
    depths = [*(depth for depth in DEPTHS if depth < last), last]
    for depth, shade in zip(depths, shades("viridis", 0, 0.85, len(depths)), strict=True):
        accuracies = [variant["accuracy_by_depth"][depth - 1] for variant in variants]
        right.plot(accuracies, range(len(variants)), "o", color=shade, label=f"{depth}")
    for place, variant in enumerate(variants):
        right.annotate(
            f"{variant['accepted_length']:.2f}",
            (1, place),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=9,
        )
    right.set_yticks(range(len(variants)), [""] * len(variants))
    right.set_ylim(left.get_ylim())
    right.set_xlim(0, 1.25 * max(max(variant["accuracy_by_depth"]) for variant in variants) or 1)
    right.xaxis.set_major_formatter(PercentFormatter(1))
    right.set_xlabel(f"{ACCURACY}\n(figures: accepted tokens of a greedy chain)")
    right.grid(axis="y", alpha=0.3)
    right.legend(title="at draft depth", ncols=len(depths), **ABOVE)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Draft heads trained in different ways, measured on {results['device']}", fontsize=11)
    for path in (picture.with_suffix(".svg"), picture):
        save(figure, path)


def _check(results: Mapping[str, Any]) -> None:
    missing = [key for key in ("variants", "budgets", "device") if not results.get(key)]
    for name, variant in results.get("variants", {}).items():
        keys = ("label", "tau", "accepted_length", "accuracy_by_depth")
        missing += [f"{name}: {key}" for key in keys if key not in variant]
        taus = variant.get("tau", {})
        missing += [f"{name}: tau of {b}" for b in results.get("budgets", ()) if str(b) not in taus]
    if missing:
        raise ValueError(f"the results of the ablations lack {'; '.join(missing)}")
