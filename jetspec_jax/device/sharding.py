"""Where parameters lie on a mesh in training: from the names of their axes to the mesh's.

Parameters name their axes where they are made; for training, `RULES` is all that connects those names with
devices, but for a target that a group shares: it is split as for decoding, by `partition.SPLIT`.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import abstract

#: The mesh axis that splits a parameter's axis; an axis that is not named is whole on every device. All
#: matrices have the model's width as one of their axes, the draft head's first under a name of its own.
RULES: Mapping[str, str] = {"embed": "fsdp", "features": "fsdp"}


def parameter_shardings(config: ModelConfig | DraftHeadConfig, mesh: Mesh) -> Any:
    """The sharding of every parameter of a config's module, in the structure of its weights.

    Args:
        config: Of a target or a draft head.
        mesh: The devices; a mesh axis that it does not have splits nothing.

    Raises:
        ValueError: A mesh axis does not divide what it should split; all such parameters are listed.
    """
    wrong = []

    def sharding(path: tuple[Any, ...], parameter: nnx.Variable) -> NamedSharding:
        names = parameter.get_metadata()["axes"]
        chosen = [rule if (rule := RULES.get(name)) in mesh.shape else None for name in names]
        for name, size, axis in zip(names, parameter.shape, chosen, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                dotted = ".".join(map(str, path))
                wrong.append(f"{dotted}: {name} of {size} over {axis} of {mesh.shape[axis]}")
        return NamedSharding(mesh, PartitionSpec(*chosen))

    flat = nnx.to_flat_state(nnx.state(abstract(config), nnx.Param))
    found: dict[tuple[Any, ...], Any] = {tuple(path): sharding(tuple(path), p) for path, p in flat}
    if wrong:
        raise ValueError("the mesh does not divide these parameters: " + "; ".join(wrong))
    return nnx.traversals.unflatten_mapping(found)


def on_one_device(tree: Any) -> Any:
    """Arrays of a mesh on its first local device: as they are where that has all of them, else gathered.

    With several processes all must call this, for the same arrays.
    """

    def gather(x: jax.Array) -> jax.Array:
        device = min(x.sharding.addressable_devices, key=lambda device: device.id)
        if x.is_fully_replicated:
            x = next(part.data for part in x.addressable_shards if part.device == device)
        elif not x.is_fully_addressable:
            x = multihost_utils.process_allgather(x, tiled=True)
        # A mesh of one device is still a mesh, and its programs are not those of a device.
        return jax.device_put(x, device)

    return jax.tree.map(gather, tree)
