"""The frozen target of a run: how it lies on the run's mesh, and the target that decodes in evaluations."""

from dataclasses import replace
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.device import mesh as decoding_mesh
from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.partition import check_partition
from jetspec_jax.device.sharding import parameter_shardings
from jetspec_jax.models import Weights
from pallas_kernels import shards
from train.loop.mesh import MeshSettings, make_mesh, shares_target, spread, target_groups


class Frozen(NamedTuple):
    """A target on a mesh of training.

    Attributes:
        weights: On all devices, as training reads them. Where devices share the target they are split as for
            decoding, and whole over "data" and "fsdp": so a group decodes with what it has, without a copy.
        decoding: The target that decodes, in each process on devices of its own: on the first one, or on the
            first group that shares the target.
    """

    weights: Weights
    decoding: Target


def mesh_to_load(settings: MeshSettings) -> Mesh | None:
    """The mesh to read the target onto, so that no device needs room for all of it; None: any one device.

    Raises:
        ValueError: As for `make_mesh`.
    """
    mesh = make_mesh(settings)
    return mesh if shares_target(mesh) else None


def freeze(target: Target, mesh: Mesh) -> Frozen:
    """Lays out a target, which is whole on one device or was read onto the mesh.

    Raises:
        ValueError: The mesh does not divide the target, or the target lies on another mesh.
    """
    if target.mesh is not None and (target.mesh != mesh or not shares_target(mesh)):
        raise ValueError(
            f"the target lies on {describe_mesh(target.mesh)}, and the recipe asks for {describe_mesh(mesh)}"
        )
    if not shares_target(mesh):
        return Frozen(spread(target.weights, parameter_shardings(target.config, mesh)), target)
    check_partition(target.config, mesh)
    weights = target.weights if target.mesh is not None else place(target.weights, target.config, mesh)
    groups = target_groups(mesh)
    own = next(group for group in groups if group.flat[0].process_index == jax.process_index())
    sizes = mesh.shape[shards.TENSOR], mesh.shape[shards.EXPERT]
    group = decoding_mesh.make_mesh(*sizes, devices=list(own.flat))
    return Frozen(weights, replace(target, weights=_on_group(weights, group), mesh=group))


def _on_group(weights: Weights, group: Mesh) -> Weights:
    """Weights of a mesh as arrays of some of its devices, which have all parts of them: nothing is copied."""

    def same(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        sharding = NamedSharding(group, x.sharding.spec)
        parts = {shard.device: shard.data for shard in x.addressable_shards}
        own = [parts[device] for device in sharding.addressable_devices_indices_map(x.shape)]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, own)

    return jax.tree.map(same, weights)
