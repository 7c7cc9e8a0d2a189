"""The sharding of parameters in training.

`RULES` maps the names of parameter axes to mesh axes. A target that is shared by a group of devices is
sharded as for decoding, by `partition.SPLIT`.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import abstract

#: The mesh axis that shards each parameter axis; axes that are absent here are replicated. Every matrix has
#: the model's width as an axis, which in the draft head's first matrix is called "features".
RULES: Mapping[str, str] = {"embed": "fsdp", "features": "fsdp"}


def parameter_shardings(config: ModelConfig | DraftHeadConfig, mesh: Mesh) -> Any:
    """The sharding of every parameter of a config's module, in the structure of its weights.

    Rules for axes that the mesh lacks are ignored.
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
    """Copies arrays of a mesh to the first local device, gathering them if they are sharded.

    With several processes, all must call this for the same arrays.
    """

    def gather(x: jax.Array) -> jax.Array:
        device = min(x.sharding.addressable_devices, key=lambda device: device.id)
        if x.is_fully_replicated:
            x = next(part.data for part in x.addressable_shards if part.device == device)
        elif not x.is_fully_addressable:
            x = multihost_utils.process_allgather(x, tiled=True)
        # Arrays on a mesh of one device would select other programs than arrays on a device.
        return jax.device_put(x, device)

    return jax.tree.map(gather, tree)
