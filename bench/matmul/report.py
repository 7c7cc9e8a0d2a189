"""Tables and notes of ``python -m bench kernel --operation matmul``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.common.report import measured_on


def title_of(report: Mapping[str, Any]) -> str:
    """What was measured, and on which device."""
    return f"matrix products by {report['implementation']}, {measured_on(report)}"


def tables_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A titled table per shape."""
    for name in dict.fromkeys(row["shape"] for row in rows):
        yield name, [_shown(row) for row in rows if row["shape"] == name]


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """The meaning of the figures, and the comparisons."""
    ceilings, checks = report["ceilings"], report["checks"]
    worst = max(check["error"] for check in checks)
    clock = (
        "by the GPU's clock, the sum of all kernels" if report["clock"] == "GPU" else "by the host's clock"
    )
    return [
        f"{len(checks)} comparisons with float64, all passed (seed {report['seed']}). Largest error of an "
        f"output, divided by the sum of its terms' magnitudes: {worst:.1e}.",
        f"us: one call, {clock}; each call of a chain reads other weights.",
        f"Floor: stored weights, rows and outputs at {ceilings['bandwidth'] / 1e9:,.0f} GB/s, or the product "
        f"at {ceilings['matmul'] / 1e12:,.2f} TFLOP/s, whichever takes longer; both measured here.",
    ]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "stored": row["stored"],
        "rows": row["rows"],
        "us": row["us"],
        "floor us": row["floor_us"],
        "x floor": row["times_floor"],
        "wall us": row["wall_us"],
        "xla us": row["xla_us"],
        "x xla": row["xla_us"] / row["us"],
    }
