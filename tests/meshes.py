"""Meshes of the first devices, which on a CPU are simulated (see ``conftest.py``), and what runs on them."""

import functools
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
    count, devices = expert * tensor, jax.local_devices()
    if len(devices) < count:
        pytest.skip(f"needs {count} devices, and there are {len(devices)}")
    axes = (AxisType.Auto,) * 2
    return jax.make_mesh((expert, tensor), shards.ALL, axis_types=axes, devices=devices[:count])


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
