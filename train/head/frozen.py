"""The frozen target of a run: its placement on the training mesh, and the target for decoding."""

from dataclasses import replace
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.device import mesh as device_mesh
from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.partition import check_partition
from jetspec_jax.device.sharding import parameter_shardings
from jetspec_jax.models import Weights
from pallas_kernels import shards
from train.loop.mesh import MeshSettings, make_mesh, shares_target, spread, target_groups


class Frozen(NamedTuple):
    """A target on a training mesh.

    Attributes:
        weights: The weights for training, on all devices. A sharded target is split as for decoding and
            replicated over "data" and "fsdp", so a group of devices can decode without a copy.
        decoding: The target for decoding, on local devices of each process: the first device, or the first
            group that shards the target.
    """

    weights: Weights
    decoding: Target


def mesh_to_load(settings: MeshSettings) -> Mesh | None:
    """The mesh to load the target onto, if devices shard it; None loads it onto one device.

    Raises:
        ValueError: As for `make_mesh`.
    """
    mesh = make_mesh(settings)
    return mesh if shares_target(mesh) else None


def decoding_mesh(mesh: Mesh) -> Mesh | None:
    """A mesh of this process's first group of devices that shard the target; None if none do."""
    if not shares_target(mesh):
        return None
    groups = target_groups(mesh)
    local = next(group for group in groups if group.flat[0].process_index == jax.process_index())
    return device_mesh.make_mesh(
        mesh.shape[shards.TENSOR], mesh.shape[shards.EXPERT], devices=list(local.flat)
    )


def freeze(target: Target, mesh: Mesh) -> Frozen:
    """Places a target, loaded onto one device or onto the mesh.

    Raises:
        ValueError: The mesh cannot shard the target, or the target is on another mesh.
    """
    if target.mesh is not None and (target.mesh != mesh or not shares_target(mesh)):
        raise ValueError(
            f"the target lies on {describe_mesh(target.mesh)}, and the recipe asks for {describe_mesh(mesh)}"
        )
    if not shares_target(mesh):
        return Frozen(spread(target.weights, parameter_shardings(target.config, mesh)), target)
    check_partition(target.config, mesh)
    weights = target.weights if target.mesh is not None else place(target.weights, target.config, mesh)
    group = decoding_mesh(mesh)
    assert group is not None
    return Frozen(weights, replace(target, weights=_on_group(weights, group), mesh=group))


def _on_group(weights: Weights, group: Mesh) -> Weights:
    """Weights of a mesh as arrays on a group of its devices, which holds all shards; nothing is copied."""

    def same(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        sharding = NamedSharding(group, x.sharding.spec)
        parts = {shard.device: shard.data for shard in x.addressable_shards}
        local = [parts[device] for device in sharding.addressable_devices_indices_map(x.shape)]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, local)

    return jax.tree.map(same, weights)
