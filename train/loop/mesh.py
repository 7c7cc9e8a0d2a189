"""Meshes for training: data-parallel groups of devices, each of which shares one copy of the weights."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

#: The axes over which the sequences of a batch are split: all devices.
BATCH_AXES = ("data", "fsdp")


@dataclass(frozen=True)
class MeshSettings:
    """How devices are used.

    Attributes:
        data: Groups that train on different sequences; -1 is as many as the devices allow.
        fsdp: Devices of a group, over which weights and optimiser state are split.
    """

    data: int = -1
    fsdp: int = 1


def make_mesh(settings: MeshSettings) -> Mesh:
    """The mesh over all devices of all processes.

    Raises:
        ValueError: The settings do not give the number of devices.
    """
    count = jax.device_count()
    data = count // settings.fsdp if settings.data == -1 and settings.fsdp > 0 else settings.data
    if data < 1 or settings.fsdp < 1 or data * settings.fsdp != count:
        fitting = [f"data {count // n} x fsdp {n}" for n in range(1, count + 1) if count % n == 0]
        raise ValueError(
            f"a mesh of data {settings.data} x fsdp {settings.fsdp} does not divide {count} devices; "
            f"possible: {', '.join(fitting)}"
        )
    return _mesh((data, settings.fsdp), jax.devices())


def one_device() -> Mesh:
    """A mesh of the first local device."""
    return _mesh((1, 1), jax.local_devices()[:1])


def _mesh(shape: tuple[int, int], devices: list[Any]) -> Mesh:
    return jax.make_mesh(shape, BATCH_AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def spread(tree: Any, shardings: Any) -> Any:
    """Lays arrays out over a mesh; each process must hold the whole arrays."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])

    return jax.tree.map(put, tree, shardings)


def put_batch(local: np.ndarray, mesh: Mesh, axis: int) -> jax.Array:
    """A batch spread over the mesh along one axis, from this process's part of it."""
    spec = PartitionSpec(*([None] * axis), BATCH_AXES)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
