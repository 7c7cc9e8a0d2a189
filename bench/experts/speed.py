"""Times a layer's experts and its router, with the floor of the experts."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.common.floors import Ceilings
from bench.common.programs import time_together
from bench.common.timing import on_gpu
from bench.experts.cases import (
    GROUPED,
    ExpertWeights,
    chain_choices,
    chain_experts,
    choice_by,
    expert_work,
    experts_by,
    random_choices,
    touched,
)
from pallas_kernels.expert_mlp.config import Config, config_for
from pallas_kernels.expert_mlp.shapes import ExpertShape

# Calls per chain: together they read more than fits into any cache.
GPU_CALLS, OTHER_CALLS = 16, 4


def config_of(shape: ExpertShape, tokens: int, itemsize: int, stored: str = "plain") -> Config:
    """The configuration of the kernels' rule for a call."""
    return config_for(
        stored=stored,
        tokens=tokens,
        top_k=shape.routing.top_k,
        experts=shape.experts,
        size=shape.size,
        features=shape.features,
        itemsize=itemsize,
    )


def counted_of(operation: str, implementation: str) -> str | None:
    """The kernel whose time counts: the router's, without the chain's other kernels; else None, for all."""
    return operation if (operation, implementation) == ("expert_choice", "pallas_triton") else None


def time_shape(
    shape: ExpertShape,
    layer: ExpertWeights,
    dtype: jnp.dtype,
    stored: str,
    counts: Sequence[int],
    names: Sequence[str],
    repeats: int,
    ceilings: Ceilings,
) -> list[dict[str, Any]]:
    """A row per operation and number of tokens; the first of ``names`` is the measured implementation."""
    calls = GPU_CALLS if on_gpu() else OTHER_CALLS
    keys, jobs, reads = [], [], {}
    for count in counts:
        rng = np.random.default_rng(count)
        x = jnp.asarray(rng.standard_normal((count, shape.size), np.float32).astype(dtype))
        choices = random_choices(rng, shape, calls, count)
        logits = jnp.asarray(rng.standard_normal((calls, count, shape.experts), np.float32))
        reads[count] = touched(choices)
        for name in names:
            keys.append(("expert_mlp", count, name))
            jobs.append((partial(chain_experts, experts_by(shape, name)), (layer, x, choices)))
            if name not in GROUPED:
                keys.append(("expert_choice", count, name))
                jobs.append((partial(chain_choices, choice_by(shape, name)), (logits,)))
    counted = [counted_of(operation, name) for operation, _, name in keys]
    times = dict(
        zip(
            keys,
            time_together(jobs, [calls] * len(jobs), counted, repeats, f"time {shape.name}"),
            strict=True,
        )
    )
    itemsize = dtype.itemsize
    rows = []
    for operation, count, name in keys:
        if name != names[0]:
            continue
        measured = times[operation, count, name]
        row = {"operation": operation, "shape": shape.name, "implementation": name, "tokens": count}
        row |= {"us": measured.micros, "wall_us": measured.wall, "kernels": measured.kernels}
        row["others"] = {
            other: times[operation, count, other]._asdict()
            for other in names[1:]
            if (operation, count, other) in times
        }
        if operation == "expert_mlp":
            work = expert_work(shape, count, reads[count], itemsize, stored)
            row |= {"experts": reads[count], **work._asdict()}
            row["floor_us"] = 1e6 * ceilings.seconds(work)
            row["times_floor"] = measured.micros / row["floor_us"]
            row["config"] = (
                asdict(config_of(shape, count, itemsize, stored)) if name == "pallas_triton" else None
            )
        rows.append(row)
    return rows
