"""``python -m bench kernel --operation experts --tune``: configurations faster than the rule's.

The rule of `pallas_kernels/expert_mlp/config.py` is code. This search shows whether it should change.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.common.programs import UNCOMPILABLE, Program, compile_together, kernel_micros
from bench.common.report import show, write_report
from bench.experts.cases import ExpertWeights, chain_experts, random_choices, random_layer
from bench.experts.speed import GPU_CALLS, config_of
from jetspec_jax.progress import Progress
from pallas_kernels.expert_choice import ExpertChoice
from pallas_kernels.expert_mlp import pallas_triton
from pallas_kernels.expert_mlp.config import Config
from pallas_kernels.expert_mlp.shapes import ExpertShape

# The launches of the operation. Their columns are separate settings, so one candidate serves both.
KERNELS = ("expert_mlp_hidden", "expert_mlp_output")
# Shared memory of the GPUs that are tuned for.
_MOST_BYTES = 200 << 10


def candidates(rule: Config, itemsize: int) -> list[Config]:
    """The rule's configuration, then all with equal columns in both launches that fit into shared memory."""
    found = [rule]
    for columns, depth, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (3, 4, 6)):
        config = replace(
            rule,
            block_features=columns,
            block_model=columns,
            block_depth=depth,
            num_warps=warps,
            num_stages=stages,
        )
        if stages * depth * (rule.block_rows + 2 * columns) * itemsize <= _MOST_BYTES and config != rule:
            found.append(config)
    return found


def tune_experts(
    shapes: Sequence[ExpertShape],
    rows: Sequence[int] | None,
    dtype: str,
    path: Path,
    opening: Mapping[str, Any],
) -> int:
    """Times all candidates for every case, prints the best of each launch, and writes a report.

    Args:
        shapes: The layers.
        rows: Tokens per call; None is each shape's default.
        dtype: The type of the weights.
        path: The report's path.
        opening: The report's first keys.
    """
    report: list[dict[str, Any]] = []
    for shape in shapes:
        layer = random_layer(shape, jnp.dtype(dtype))
        for count in rows or shape.tokens:
            report += _tune_case(shape, layer, count)
        del layer
    show("fastest configurations of expert_mlp", [_shown(row) for row in report])
    write_report(path, {**opening, "benchmark": "experts, tuning", "dtype": dtype, "rows": report})
    return 0


def _tune_case(shape: ExpertShape, layer: ExpertWeights, count: int) -> list[dict[str, Any]]:
    """A row per launch: microseconds of every candidate, None if it does not run, and the best."""
    assert isinstance(layer.down, Array), "the rule is that of plain weights"
    rng = np.random.default_rng(count)
    x = jnp.asarray(rng.standard_normal((count, shape.size), np.float32).astype(layer.down.dtype))
    choices = random_choices(rng, shape, GPU_CALLS, count)
    configs = candidates(config_of(shape, count, x.dtype.itemsize), x.dtype.itemsize)

    def run(config: Config, layer: ExpertWeights, x: Array, choice: ExpertChoice) -> Array:
        return pallas_triton.expert_mlp(
            x,
            layer.gate_up,
            layer.down,
            *choice,
            layer.gate_up_bias,
            layer.down_bias,
            activation=shape.activation,
            config=config,
        )

    jobs = [(partial(chain_experts, partial(run, config)), (layer, x, choices)) for config in configs]
    programs: dict[int, Program] = {}
    with Progress(total=2 * len(jobs), desc=f"tune {shape.name}, {count} tokens", unit="step") as bar:
        for i, program in enumerate(compile_together(jobs, bar.update)):
            bar.update()
            if isinstance(program, Exception):
                continue
            candidate = Program(program, jobs[i][1], GPU_CALLS)
            try:
                candidate.warm_up()
            except UNCOMPILABLE:
                continue
            programs[i] = candidate
    found = dict(zip(programs, kernel_micros(list(programs.values()), "expert_mlp"), strict=True))
    rows = []
    for launch in KERNELS:
        micros = [found[i].get(launch) if i in found else None for i in range(len(configs))]
        best = min((time, i) for i, time in enumerate(micros) if time is not None)[1]
        rows.append(
            {
                "shape": shape.name,
                "tokens": count,
                "launch": launch,
                "micros": micros,
                "best": asdict(configs[best]),
                "configs": [asdict(config) for config in configs],
            }
        )
    return rows


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    best, hidden = row["best"], row["launch"] == KERNELS[0]
    return {
        "shape": row["shape"],
        "tokens": row["tokens"],
        "launch": row["launch"],
        "rule us": row["micros"][0],
        "best us": min(time for time in row["micros"] if time is not None),
        "columns": best["block_features" if hidden else "block_model"],
        "depth": best["block_depth"],
        "warps": best["num_warps"],
        "stages": best["num_stages"],
    }
