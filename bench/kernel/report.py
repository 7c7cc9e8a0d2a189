"""The rows of ``python -m bench kernel``, one per case."""

from dataclasses import asdict
from typing import Any

import jax

from bench.common.floors import Ceilings
from bench.common.programs import LayerTime
from bench.kernel.speed import AttentionCase, num_layers, work_of
from pallas_kernels.tree_attention.config import config_for

#: The keys of a row that are printed.
SHOWN = (
    *("rows", "prefix", "us", "floor_us", "times_floor", "floor_of"),
    *("wall_us", "xla_us", "xla_wall_us", "times_faster"),
)


def row_of(
    case: AttentionCase,
    implementation: str,
    measured: LayerTime,
    reference: LayerTime,
    ceilings: Ceilings,
) -> dict[str, Any]:
    """The row of a case, with times in microseconds of one layer.

    Args:
        reference: The time of the XLA reference.
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
        "xla_us": reference.micros,
        "xla_wall_us": reference.wall,
        "times_faster": reference.micros / measured.micros,
    }
