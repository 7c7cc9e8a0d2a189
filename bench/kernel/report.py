"""The rows of ``python -m bench kernel``, one per case, and its tables and notes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax

from bench.common.comparison import TOLERANCES
from bench.common.floors import Ceilings
from bench.common.programs import LayerTime
from bench.common.report import measured_on
from bench.kernel.check import Outcome
from bench.kernel.speed import AttentionCase, num_layers, work_of
from pallas_kernels.tree_attention.config import config_for


def row_of(
    case: AttentionCase,
    implementation: str,
    measured: LayerTime,
    reference: LayerTime | None,
    ceilings: Ceilings,
) -> dict[str, Any]:
    """The row of a case, with times in microseconds of one layer.

    Args:
        implementation: The timed implementation.
        reference: The time of the XLA reference; None if the reference itself was timed.
        ceilings: The device's measured rates.
    """
    shape, work = case.shape, work_of(case)
    of_bytes, of_operations = work.bytes / ceilings.bandwidth, work.operations / ceilings.matmul
    folded = case.rows * shape.heads // shape.kv_heads
    config = None
    if implementation == "pallas_triton":
        kind = jax.devices()[0].device_kind
        config = asdict(config_for(kind, case.dtype, shape.head_size, folded))
    floor = 1e6 * ceilings.seconds(work)
    return {
        "shape": shape.name,
        "rows": case.rows,
        "prefix": case.prefix,
        "batch": case.batch,
        "us": measured.micros,
        "floor_us": floor,
        "times_floor": measured.micros / floor,
        "floor_of": "bytes" if of_bytes > of_operations else "operations",
        **work._asdict(),
        "wall_us": measured.wall,
        "kernels": measured.kernels,
        "layers": num_layers(case, implementation),
        "config": config,
        "xla_us": reference and reference.micros,
        "xla_wall_us": reference and reference.wall,
        "xla_layers": reference and num_layers(case, "xla"),
        "times_faster": reference and reference.micros / measured.micros,
    }


def check_row(outcome: Outcome) -> dict[str, Any]:
    """A comparison as the report has it."""
    return {
        **outcome.check._asdict(),
        "shape": outcome.check.shape.name,
        "relative_error": outcome.error,
        "tolerance": TOLERANCES[outcome.check.dtype],
    }


def title_of(report: Mapping[str, Any]) -> str:
    """What was measured, and on which device."""
    batch = report["arguments"]["batch"]
    return f"tree attention by {report['implementation']}, batch {batch}, {measured_on(report)}"


def tables_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A titled table per shape."""
    for name in dict.fromkeys(row["shape"] for row in rows):
        yield name, [_shown(row) for row in rows if row["shape"] == name]


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """The meaning of the figures, and the comparisons."""
    ceilings, checks = report["ceilings"], report["checks"]
    errors = {
        dtype: max(check["relative_error"] for check in checks if check["dtype"] == dtype)
        for dtype in report["arguments"]["dtypes"]
    }
    worst = ", ".join(
        f"{error:.1e} in {dtype} ({TOLERANCES[dtype]:.0e} allowed)" for dtype, error in errors.items()
    )
    clock = (
        "by the GPU's clock, the sum of the operation's kernels (for XLA, of all kernels); wall: by the "
        "host's clock, with launches and gaps."
        if report["clock"] == "GPU"
        else "by the host's clock: there is no GPU."
    )
    return [
        f"{len(checks)} comparisons with the reference in float32, all passed (seed {report['seed']}). "
        f"Largest relative error of a row: {worst}.",
        f"us: one layer, {clock}",
        f"Floor: keys, values, queries and output moved once at {ceilings['bandwidth'] / 1e9:,.0f} GB/s, or "
        f"computed at {ceilings['matmul'] / 1e12:,.2f} TFLOP/s, whichever takes longer; both measured here.",
    ]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {
        "rows": row["rows"],
        "prefix": row["prefix"],
        "us": row["us"],
        "floor us": row["floor_us"],
        "x floor": row["times_floor"],
        "floor of": row["floor_of"],
        "wall us": row["wall_us"],
    }
    if row["xla_us"] is None:
        return shown
    return {
        **shown,
        "XLA us": row["xla_us"],
        "XLA wall us": row["xla_wall_us"],
        "x faster": row["times_faster"],
    }
