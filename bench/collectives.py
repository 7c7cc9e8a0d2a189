"""``python -m bench collectives``: the cost of sums over devices in a loop on the devices.

A round on a mesh sums the activations of all its nodes twice per layer. Here a loop only sums ``rows`` x
``features`` numbers over all devices and halves them. The time of the same loop without sums is subtracted.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from bench.common.options import check_least
from bench.common.report import add_report_arguments, check_report, measured_on, opening_of, publish
from bench.common.timing import compile_seconds, median, seconds_of
from jetspec_jax.checkpoint.source import resolve_dtype
from jetspec_jax.cli.options import MODELS
from jetspec_jax.device.mesh import WHOLE, everywhere, make_mesh
from jetspec_jax.device.peers import say_apart
from jetspec_jax.progress import Progress
from pallas_kernels import shards

#: XLA's options for the loop: the defaults, and XLA's kernel for small sums instead of NCCL's.
WAYS: dict[str, dict[str, bool]] = {
    "default": {},
    "one-shot": {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    MODELS.add(parser, ["tensor_parallel_size"], tensor_parallel_size=2)
    add("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256], help="nodes per round")
    add("--features", type=int, default=4096, help="numbers per node (default: 4096)")
    add("--turns", type=int, default=512, help="sums per dispatch (default: 512)")
    add("--repeats", type=int, default=7, help="timed dispatches (default: 7)")
    add("--dtype", default="auto", help="auto, float32 or bfloat16")
    add_report_arguments(parser, "collectives", picture=False)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the JSON."""
    check_least(arguments, 1, "rows", "features", "turns", "repeats")
    check_report(arguments)
    mesh, dtype = make_mesh(arguments.tensor_parallel_size), resolve_dtype(arguments.dtype)
    say_apart((mesh,))
    rows = []
    with Progress(total=len(arguments.rows) * (1 + len(WAYS)), unit="loop") as bar:
        for count in arguments.rows:
            x = np.asarray(np.random.default_rng(0).normal(size=(count, arguments.features)), dtype)
            empty = _seconds(mesh, lambda x: x, x, arguments, {})
            bar.update()
            row: dict[str, Any] = {"rows": count, "KiB": x.nbytes / 1024, "loop us": 1e6 * empty}
            for name, options in WAYS.items():
                row[f"{name} us"] = 1e6 * (_seconds(mesh, shards.all_sum, x, arguments, options) - empty)
                bar.update()
            rows.append(row)
    report = {
        **opening_of("collectives", arguments),
        "devices": mesh.size,
        "dtype": str(dtype),
        "rows": rows,
    }
    heading = f"one sum of {arguments.features} numbers per row, in microseconds: {measured_on(report)}"
    publish(arguments, report, [(heading, rows)])
    return 0


def _seconds(
    mesh: Mesh,
    add_up: Callable[[Array], Array],
    x: np.ndarray,
    arguments: argparse.Namespace,
    options: dict[str, bool],
) -> float:
    """Median seconds per turn."""

    def loop(x: Array, turns: Int[Array, ""]) -> Array:
        half = jnp.asarray(0.5, x.dtype)
        return jax.lax.fori_loop(0, turns, lambda _, x: add_up(x * half), x)

    jitted = jax.jit(everywhere(mesh, loop, (WHOLE, WHOLE), WHOLE), compiler_options=options)
    _, program = compile_seconds(jitted, x, np.int32(arguments.turns))
    seconds = [seconds_of(program, x, np.int32(arguments.turns))[0] for _ in range(1 + arguments.repeats)]
    return median(seconds[1:]) / arguments.turns
