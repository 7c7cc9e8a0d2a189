"""The picture of the ablations: all variants side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from train.loop.plot import ABOVE, LEGEND, depth_axis, save, shades

INCHES = (14.0, 6.0)
# Of Okabe and Ito's colours, which most kinds of colour vision tell apart, those that show as lines on white.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def plot_ablations(results: Mapping[str, Any], picture: Path) -> None:
    """Writes a PNG of 1400 x 600: acceptance lengths by budget, and accuracies by depth, of all variants.

    Args:
        results: "variants" by name, each with "label", "tau" (by budget), "accepted_length" and
            "accuracy_by_depth", drawn in their order; "budgets"; and "device".
        picture: The file, which is written whole or not at all.

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
    left.legend(ncols=len(budgets), **LEGEND, **ABOVE)

    for i, variant in enumerate(variants):
        accuracies = variant["accuracy_by_depth"]
        right.plot(
            range(1, len(accuracies) + 1),
            accuracies,
            color=COLOURS[i % len(COLOURS)],
            linestyle=("solid", "dashed")[i // len(COLOURS) % 2],
            marker="os^vDP*"[i % 7],
            markersize=4,
            label=f"{variant['label']}: {variant['accepted_length']:.2f}",
        )
    depth_axis(right)
    right.legend(title="accepted tokens of a greedy chain", **LEGEND)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Draft heads trained in different ways, measured on {results['device']}", fontsize=11)
    save(figure, picture)


def _check(results: Mapping[str, Any]) -> None:
    missing = [key for key in ("variants", "budgets", "device") if not results.get(key)]
    for name, variant in results.get("variants", {}).items():
        wanted = ("label", "tau", "accepted_length", "accuracy_by_depth")
        missing += [f"{name}: {key}" for key in wanted if key not in variant]
        taus = variant.get("tau", {})
        missing += [f"{name}: tau of {b}" for b in results.get("budgets", ()) if str(b) not in taus]
    if missing:
        raise ValueError(f"the results of the ablations lack {'; '.join(missing)}")
