"""Meshes for training: data and FSDP parallelism of the head, and groups of devices that shard the target.

A target that does not fit a device is sharded over a group of expert x tensor devices, which compute the same
sequences together.
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
#: All axes. The last two, which are those of decoding, shard the frozen target.
AXES = (*BATCH_AXES, *shards.ALL)


@dataclass(frozen=True)
class MeshSettings:
    """The sizes of a training mesh.

    Attributes:
        data: Replicas of the head, which train on different sequences; -1 is as many as the devices allow.
        fsdp: Shards of a replica's weights and optimiser state; they also train on different sequences.
        expert: Expert parallelism of the frozen target's routed experts. All other weights of the target are
            sharded over the group's expert x tensor devices.
        tensor: Tensor parallelism of the frozen target's routed experts.
    """

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        """The sizes; "expert" and "tensor" are omitted if the target is not sharded."""
        sizes = {"data": self.data, "fsdp": self.fsdp}
        if (self.expert, self.tensor) != (1, 1):
            sizes |= {"expert": self.expert, "tensor": self.tensor}
        return " x ".join(f"{name} {size}" for name, size in sizes.items())


def make_mesh(settings: MeshSettings) -> Mesh:
    """The mesh over all devices of all processes.

    Raises:
        ValueError: The sizes do not match the number of devices, or the target would be sharded over several
            processes.
    """
    count, sizes = jax.device_count(), (settings.fsdp, settings.expert, settings.tensor)
    data = count // math.prod(sizes) if settings.data == -1 and min(sizes) > 0 else settings.data
    if min(data, *sizes) < 1 or data * math.prod(sizes) != count:
        raise ValueError(
            f"a mesh of {settings} does not divide {count} devices; possible: {_possible(settings, count)}"
        )
    devices, shared = jax.devices(), settings.expert * settings.tensor
    # Each process reads its own batches, and decodes independently in evaluations.
    owners = [device.process_index for device in devices]
    if any(len(set(owners[i : i + shared])) > 1 for i in range(0, count, shared)):
        raise ValueError(
            f"a mesh of {settings} shares the target between processes, and only devices of one process can "
            f"share it: expert x tensor must divide {min(owners.count(owner) for owner in owners)}"
        )
    return _mesh((data, *sizes), devices)


def _possible(settings: MeshSettings, count: int) -> str:
    """Possible mesh sizes for a number of devices, with the same sharding of the target if it divides."""
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
    """The number of devices, or groups that shard the target, with different sequences."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def target_groups(mesh: Mesh) -> np.ndarray:
    """The devices of each group that shards the target: ``[groups, expert, tensor]``."""
    return mesh.devices.reshape(-1, mesh.shape[shards.EXPERT], mesh.shape[shards.TENSOR])


def shares_target(mesh: Mesh) -> bool:
    """Whether the target is sharded over several devices."""
    return size_of(mesh) > 1


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def spread(tree: Any, shardings: Any) -> Any:
    """Places arrays on a mesh; each process must hold the whole arrays."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])

    return jax.tree.map(put, tree, shardings)


def put_batch(local: np.ndarray, mesh: Mesh, axis: int) -> jax.Array:
    """A batch sharded over the mesh along one axis, from this process's part of it."""
    spec = PartitionSpec(*([None] * axis), BATCH_AXES)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
