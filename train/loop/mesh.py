"""The devices of a training run: data-parallel groups, each of which shares one copy of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

#: Sequences of a batch are spread over all devices, whether those hold whole weights or parts of them.
BATCH_AXES = ("data", "fsdp")


@dataclass(frozen=True)
class MeshShape:
    """How devices are used.

    Attributes:
        data: Groups that train on different sequences; -1 is as many as there are devices for.
        fsdp: Devices of a group, over which weights and optimiser state are split.
    """

    data: int = -1
    fsdp: int = 1


def make_mesh(shape: MeshShape) -> Mesh:
    """The mesh over all devices of all processes.

    Raises:
        ValueError: The shape does not make up the number of devices.
    """
    count = jax.device_count()
    data = count // shape.fsdp if shape.data == -1 and shape.fsdp > 0 else shape.data
    if data < 1 or shape.fsdp < 1 or data * shape.fsdp != count:
        fitting = [f"data {count // n} x fsdp {n}" for n in range(1, count + 1) if count % n == 0]
        raise ValueError(
            f"a mesh of data {shape.data} x fsdp {shape.fsdp} does not divide {count} devices; "
            f"possible: {', '.join(fitting)}"
        )
    return _mesh((data, shape.fsdp), jax.devices())


def one_device() -> Mesh:
    """A mesh of the first local device."""
    return _mesh((1, 1), jax.local_devices()[:1])


def _mesh(shape: tuple[int, int], devices: list[Any]) -> Mesh:
    return jax.make_mesh(shape, BATCH_AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def spread(tree: Any, shardings: Any) -> Any:
    """Arrays laid out over a mesh; with several processes, each has all of them and gives what it should."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])

    return jax.tree.map(put, tree, shardings)


def agreed(value: bool) -> bool:
    """The first process's answer, in all processes: what they do next must not differ."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


@contextmanager
def in_turn() -> Iterator[bool]:
    """What the first process does before all others: files are then made once, and there for the others.

    The value is whether this is the first process.
    """
    if jax.process_count() == 1:
        yield True
        return
    first = jax.process_index() == 0
    if not first:
        multihost_utils.sync_global_devices("in turn")
    try:
        yield first
    finally:
        if first:
            multihost_utils.sync_global_devices("in turn")


def put_batch(local: np.ndarray, mesh: Mesh, axis: int) -> jax.Array:
    """A batch spread over the mesh along one axis, from this process's part of it."""
    spec = PartitionSpec(*([None] * axis), BATCH_AXES)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
