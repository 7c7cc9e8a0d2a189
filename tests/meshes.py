"""Meshes of the first devices, which on a CPU are simulated (see ``conftest.py``), and what runs on them."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from pallas_kernels import shards

#: The collective in lowered text; its attributes have like names.
GATHER = '"stablehlo.all_gather"'


def mesh_of(expert: int, tensor: int) -> Mesh:
    """A mesh of so many devices along each axis; the test is skipped where there are fewer."""
    return _mesh((expert, tensor), shards.ALL)


def training_mesh(data: int, fsdp: int, expert: int, tensor: int) -> Mesh:
    return _mesh((data, fsdp, expert, tensor), ("data", "fsdp", *shards.ALL))


def need_devices(count: int) -> None:
    """Skips a test where there are fewer GPUs; on a CPU devices are simulated, and never too few."""
    devices = jax.local_devices()
    if len(devices) < count:
        assert devices[0].platform != "cpu", f"{len(devices)} simulated devices: see conftest.py"
        pytest.skip(f"needs {count} devices, and there are {len(devices)}")


def _mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    count, devices = math.prod(shape), jax.local_devices()
    need_devices(count)
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(shape, axes, axis_types=types, devices=devices[:count])


@functools.cache
def on_parts(function: Callable[..., Any], expert: int, tensor: int) -> Any:
    """A compiled function of logits, of which each device gets its own part, and of arrays that all get.

    What the devices return is stacked: ``[parts, ...]``.
    """

    def own(logits: Any, *others: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(logits, *others))

    def run(logits: Any, *others: Any) -> Any:
        whole = (PartitionSpec(),) * len(others)
        specs = PartitionSpec(None, None, shards.ALL), *whole
        mapped: Any = jax.shard_map(
            own,
            mesh=mesh_of(expert, tensor),
            in_specs=specs,
            out_specs=PartitionSpec(shards.ALL),
            check_vma=False,
        )
        return mapped(logits, *others)

    return jax.jit(run)


def padded(logits: Any, parts: int) -> np.ndarray:
    """Logits whose last axis is filled with -inf to a multiple of the parts."""
    logits = np.asarray(logits)
    missing = -logits.shape[-1] % parts
    return np.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-np.inf)


def agreed(results: Any) -> Any:
    """What all devices returned, whose bits must be equal."""
    results = jax.tree.map(np.asarray, results)
    for own in jax.tree.leaves(results):
        rows = own.reshape(len(own), -1).view(np.uint8)
        assert (rows == rows[:1]).all()
    return jax.tree.map(lambda own: own[0], results)
