"""What ``python -m bench kernel --operation experts`` reports: tables, notes and a picture."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.report import write_png

# How lines are drawn, by what they show; what is measured comes first.
_STYLES = (("black", "o"), ("tab:orange", "s"), ("tab:green", "^"), ("tab:red", "v"))
COLUMNS = 3


def title_of(report: Mapping[str, Any]) -> str:
    """What was measured, and where."""
    names = f"{report['implementation']}, {report['dtype']}"
    return f"experts of a layer by {names}, {report['device']}, JAX {report['jax']}"


def tables_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A titled table for each operation and shape."""
    for key in dict.fromkeys((row["operation"], row["shape"]) for row in rows):
        own = [row for row in rows if (row["operation"], row["shape"]) == key]
        yield f"{key[0]}, {key[1]}", [_shown(row) for row in own]


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """What the figures mean, and what was compared."""
    ceilings, checks = report["ceilings"], report["checks"]
    worst = {}
    for check in checks:
        key = check["operation"], check["dtype"]
        worst[key] = max(worst.get(key, 0.0), check["relative_error"])
    errors = ", ".join(f"{error:.1e} of {name} in {dtype}" for (name, dtype), error in worst.items())
    clock = (
        "by the GPU's own clock, the sum of all that runs; wall: by the host's, with launches and gaps."
        if report["clock"] == "GPU"
        else "by the host's clock: there is no GPU."
    )
    return [
        f"{len(checks)} comparisons with the references in float32, all right (seed {report['seed']}). "
        f"Largest relative error of a row: {errors}.",
        f"us: one call, {clock}",
        f"Floor: the experts that the tokens chose (experts, on average) read once at "
        f"{ceilings['bandwidth'] / 1e9:,.0f} GB/s, or computed at {ceilings['matmul'] / 1e12:,.2f} TFLOP/s, "
        "whichever takes longer; both measured here.",
    ]


def plot_experts(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG: microseconds of a call by tokens, a panel for each shape.

    Args:
        rows: Of the report, of `expert_mlp`.
        title: Above all panels.
        path: Where to.
    """
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(row["shape"], []).append(row)
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    # Without pyplot there is no global state, and no window system is asked for.
    figure = Figure(figsize=(2.4 + 3.6 * columns, 0.8 + 3.4 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (shape, own) in zip(axes, panels.items(), strict=False):
        _panel(axis, own)
        axis.set_title(shape, fontsize=10)
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.suptitle(title, fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    write_png(path, figure)


def _panel(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    own = sorted(rows, key=lambda row: row["tokens"])
    tokens = [row["tokens"] for row in own]
    lines = {own[0]["implementation"]: [row["us"] for row in own]}
    lines |= {name: [row["others"][name]["micros"] for row in own] for name in own[0]["others"]}
    for (name, values), (colour, marker) in zip(lines.items(), _STYLES, strict=False):
        axis.plot(tokens, values, color=colour, marker=marker, markersize=4, label=name)
    floors = [row["floor_us"] for row in own]
    axis.plot(tokens, floors, color="grey", linestyle="dashed", marker=".", label="floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [str(count) for count in tokens])
    axis.set_xlabel("tokens")
    axis.set_ylabel("microseconds a call")
    axis.spines[["top", "right"]].set_visible(False)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"tokens": row["tokens"]}
    if "experts" in row:
        shown |= {"experts": round(row["experts"], 1)}
    shown["us"] = row["us"]
    if "floor_us" in row:
        shown |= {"floor us": row["floor_us"], "x floor": row["times_floor"]}
    shown["wall us"] = row["wall_us"]
    for name, other in row["others"].items():
        shown |= {f"{name} us": other["micros"], f"x {name}": other["micros"] / row["us"]}
    return shown
