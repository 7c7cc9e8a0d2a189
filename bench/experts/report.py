"""Tables and notes of ``python -m bench kernel --operation experts``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.common.report import measured_on


def title_of(report: Mapping[str, Any]) -> str:
    """What was measured, and on which device."""
    weights = "" if report["weights"] == "plain" else f" in {report['weights']}"
    return f"experts of a layer{weights} by {report['implementation']}, {measured_on(report)}"


def tables_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A titled table per operation and shape."""
    for key in dict.fromkeys((row["operation"], row["shape"]) for row in rows):
        yield ", ".join(key), [_shown(row) for row in rows if (row["operation"], row["shape"]) == key]


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """The meaning of the figures, and the comparisons."""
    ceilings, checks = report["ceilings"], report["checks"]
    worst = {}
    for check in checks:
        key = check["operation"], check["dtype"]
        worst[key] = max(worst.get(key, 0.0), check["relative_error"])
    errors = ", ".join(f"{error:.1e} of {name} in {dtype}" for (name, dtype), error in worst.items())
    clock = (
        "by the GPU's clock, the sum of all kernels; wall: by the host's clock, with launches and gaps."
        if report["clock"] == "GPU"
        else "by the host's clock: there is no GPU."
    )
    return [
        f"{len(checks)} comparisons with the references in float32, all passed (seed {report['seed']}). "
        f"Largest relative error of a row: {errors}.",
        f"us: one call, {clock}",
        f"Floor: the tokens' experts (their mean number is the column experts) read once at "
        f"{ceilings['bandwidth'] / 1e9:,.0f} GB/s, or computed at {ceilings['matmul'] / 1e12:,.2f} TFLOP/s, "
        "whichever takes longer; both measured here.",
    ]


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
