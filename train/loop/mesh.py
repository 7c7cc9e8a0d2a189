"""Meshes for training: copies of the head, the parts of each, and groups of devices that share the target.

Where a target does not fit a device, a group of devices shares it: expert x tensor of them, which compute the
same sequences together.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jetspec_jax.device.mesh import size_of
from pallas_kernels import shards

#: The axes over which the sequences of a batch are split.
BATCH_AXES = ("data", "fsdp")
#: All axes. Neighbours along the last ones, which are those of decoding, share the frozen target.
AXES = (*BATCH_AXES, *shards.ALL)


@dataclass(frozen=True)
class MeshSettings:
    """How devices are used.

    Attributes:
        data: Copies of the head, which train on different sequences; -1 is as many as the devices allow.
        fsdp: Parts of a copy's weights and optimiser state; the parts, too, train on different sequences.
        expert: Into how many parts a group splits the frozen target's routed experts by number. All else of
            the target is split over the expert x tensor devices of the group.
        tensor: Into how many parts a group splits the frozen target's routed experts by features.
    """

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        """The sizes; those of a group are left out where it is one device, which has all of the target."""
        sizes = {"data": self.data, "fsdp": self.fsdp}
        if (self.expert, self.tensor) != (1, 1):
            sizes |= {"expert": self.expert, "tensor": self.tensor}
        return " x ".join(f"{name} {size}" for name, size in sizes.items())


def make_mesh(settings: MeshSettings) -> Mesh:
    """The mesh over all devices of all processes.

    Raises:
        ValueError: The settings do not give the number of devices, or devices of several processes would
            share the target.
    """
    count, sizes = jax.device_count(), (settings.fsdp, settings.expert, settings.tensor)
    data = count // math.prod(sizes) if settings.data == -1 and min(sizes) > 0 else settings.data
    if min(data, *sizes) < 1 or data * math.prod(sizes) != count:
        raise ValueError(
            f"a mesh of {settings} does not divide {count} devices; possible: {_possible(settings, count)}"
        )
    devices, shared = jax.devices(), settings.expert * settings.tensor
    # Each process reads its batches alone, and decodes alone in evaluations.
    owners = [device.process_index for device in devices]
    if any(len(set(owners[i : i + shared])) > 1 for i in range(0, count, shared)):
        raise ValueError(
            f"a mesh of {settings} shares the target between processes, and only devices of one process can "
            f"share it: expert x tensor must divide {min(owners.count(owner) for owner in owners)}"
        )
    return _mesh((data, *sizes), devices)


def _possible(settings: MeshSettings, count: int) -> str:
    """Meshes of so many devices: with the same parts of the target where they divide."""
    shared = settings.expert * settings.tensor
    if min(settings.expert, settings.tensor) < 1 or count % shared:
        sizes = [str(n) for n in range(1, count + 1) if count % n == 0]
        return f"expert x tensor of {', '.join(sizes)}"
    groups = count // shared
    fitting = [replace(settings, data=groups // n, fsdp=n) for n in range(1, groups + 1) if groups % n == 0]
    return ", ".join(map(str, fitting))


def one_device() -> Mesh:
    """A mesh of the first local device."""
    return _mesh((1,) * len(AXES), jax.local_devices()[:1])


def _mesh(shape: tuple[int, ...], devices: list[Any]) -> Mesh:
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_parts(mesh: Mesh) -> int:
    """How many devices, or groups that share the target, train on different sequences."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def target_groups(mesh: Mesh) -> np.ndarray:
    """The devices by the groups that share the target: ``[groups, expert, tensor]``."""
    return mesh.devices.reshape(-1, mesh.shape[shards.EXPERT], mesh.shape[shards.TENSOR])


def shares_target(mesh: Mesh) -> bool:
    """Whether several devices share the target."""
    return size_of(mesh) > 1


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
