"""How long a layer's experts and the router's choice take, and how long the experts must take."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bench.common.floors import Ceilings
from bench.common.programs import Program, compile_together, kernel_micros
from bench.common.timing import median
from bench.experts.cases import (
    GROUPED,
    Layer,
    chain_choices,
    chain_experts,
    choice_by,
    expert_work,
    experts_by,
    random_choices,
    touched,
)
from bench.kernel.speed import on_gpu
from pallas_kernels.expert_mlp.config import Config, config_for
from pallas_kernels.expert_mlp.shapes import Shape

# Calls of a chain: together they read more than any cache holds.
GPU_CALLS, OTHER_CALLS = 16, 4


class Time(NamedTuple):
    """Microseconds of one call: by the GPU's clock (elsewhere as `wall`), by the host's, and by kernel."""

    micros: float
    wall: float
    kernels: dict[str, float]


def config_of(shape: Shape, tokens: int, itemsize: int) -> Config:
    """What the kernels' own rule makes of a call."""
    return config_for(
        tokens=tokens,
        top_k=shape.routing.top_k,
        experts=shape.experts,
        size=shape.size,
        features=shape.features,
        itemsize=itemsize,
    )


def time_shape(
    shape: Shape,
    layer: Layer,
    counts: Sequence[int],
    names: Sequence[str],
    repeats: int,
    ceilings: Ceilings,
) -> list[dict[str, Any]]:
    """A row of the report for each operation and number of tokens; the first name is what is measured."""
    calls = GPU_CALLS if on_gpu() else OTHER_CALLS
    keys, jobs, reads = [], [], {}
    for count in counts:
        rng = np.random.default_rng(count)
        x = jnp.asarray(rng.standard_normal((count, shape.size), np.float32).astype(layer.down.dtype))
        choices = random_choices(rng, shape, calls, count)
        logits = jnp.asarray(rng.standard_normal((calls, count, shape.experts), np.float32))
        reads[count] = touched(choices)
        for name in names:
            keys.append(("expert_mlp", count, name))
            jobs.append((partial(chain_experts, experts_by(shape, name)), (layer, x, choices)))
            if name not in GROUPED:
                keys.append(("expert_choice", count, name))
                jobs.append((partial(chain_choices, choice_by(shape, name)), (logits,)))
    times = _times(keys, jobs, calls, repeats, shape.name)
    itemsize = layer.down.dtype.itemsize
    rows = []
    for operation, count, name in keys:
        if name != names[0]:
            continue
        own = times[operation, count, name]
        row = {"operation": operation, "shape": shape.name, "implementation": name, "tokens": count}
        row |= {"us": own.micros, "wall_us": own.wall, "kernels": own.kernels}
        row["others"] = {
            other: times[operation, count, other]._asdict()
            for other in names[1:]
            if (operation, count, other) in times
        }
        if operation == "expert_mlp":
            work = expert_work(shape, count, reads[count], itemsize)
            row |= {"experts": reads[count], **work._asdict()}
            row["floor_us"] = 1e6 * work.seconds(ceilings.bandwidth, ceilings.matmul)
            row["times_floor"] = own.micros / row["floor_us"]
            row["config"] = asdict(config_of(shape, count, itemsize)) if name == "pallas_triton" else None
        rows.append(row)
    return rows


def _times(
    keys: Sequence[tuple[str, int, str]],
    jobs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
    calls: int,
    repeats: int,
    title: str,
) -> dict[tuple[str, int, str], Time]:
    """Times chains of `calls` calls, in bursts that take turns."""
    with tqdm(total=len(keys) * (2 + repeats), desc=f"time {title}", unit="step") as bar:
        programs = []
        for program, (_, arguments) in zip(compile_together(jobs, bar.update), jobs, strict=True):
            if isinstance(program, Exception):
                raise program
            programs.append(Program(program, arguments, calls))
        for program in programs:
            program.warm_up()
            bar.update()
        walls: list[list[float]] = [[] for _ in programs]
        for _ in range(repeats):
            for program, wall in zip(programs, walls, strict=True):
                wall.append(program.wall_micros())
                bar.update()
    kernels: list[dict[str, float]] = [{} for _ in programs]
    if on_gpu():
        # Of a router's kernel it alone, for the chain between two choices is no part of it.
        for counted in ("expert_choice", None):
            own = [
                i
                for i, key in enumerate(keys)
                if (key[0] == "expert_choice" and key[2] == "pallas_triton") == (counted is not None)
            ]
            for i, micros in zip(own, kernel_micros([programs[i] for i in own], counted), strict=True):
                kernels[i] = micros
    return {
        key: Time(sum(own.values()) or median(wall), median(wall), own)
        for key, wall, own in zip(keys, walls, kernels, strict=True)
    }
