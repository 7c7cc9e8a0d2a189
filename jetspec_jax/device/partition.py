"""The sharding of a model over a mesh for decoding.

Parameters are created with the names of their axes. `SPLIT` maps these names to mesh axes (for training,
`sharding.RULES` does). Three things differ from the model on one device, so that all shards are equal and
contiguous:

* KV heads that do not divide evenly are repeated, up to the least common multiple of heads and devices. Query
  heads are regrouped and keep their order. Example: four query heads of one KV head, on two devices::

      q0 q1 q2 q3 | k0      ->      q0 q1 | k0      q2 q3 | k0

* The vocabulary is padded to a multiple of the devices.
* The channels of a recurrent layer (queries, keys and values of all heads) are ordered by device.
"""

import functools
import math
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jetspec_jax.config import DraftHeadConfig, LayerConfig, ModelConfig, Recurrence
from jetspec_jax.device.mesh import size_of
from jetspec_jax.device.processes import check_devices
from jetspec_jax.models import abstract, quantization_of, quantized_blocks, with_quantization
from jetspec_jax.models.quantized import BLOCKS
from pallas_kernels import shards

#: The mesh axes that shard each parameter axis; axes that are absent here are replicated.
_SPLIT: dict[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "features"), shards.ALL),
    **dict.fromkeys(("channels", "key_heads", "value_heads"), shards.ALL),
    "expert": shards.EXPERT,
    "expert_mlp": shards.TENSOR,
}
SPLIT = {**_SPLIT, **{f"{name}{BLOCKS}": axes for name, axes in _SPLIT.items()}}

Config = TypeVar("Config", ModelConfig, DraftHeadConfig)


def check_partition(config: ModelConfig | DraftHeadConfig, mesh: Mesh | AbstractMesh | None) -> None:
    """Checks that a mesh can shard a target. (A draft head that cannot be sharded is replicated.)"""
    if mesh is None:
        return
    if isinstance(mesh, Mesh):
        check_devices(mesh)
    if isinstance(config, DraftHeadConfig):
        return
    wrong = _undivided(config, mesh) or cut_blocks(config, mesh)
    if mesh.shape[shards.EXPERT] > 1 and all(layer.experts is None for layer in config.layers):
        wrong.append("expert_parallel_size above 1 is for models with experts, and this one has none")
    if wrong:
        raise ValueError(f"{size_of(mesh)} devices cannot split the model: {'; '.join(wrong)}")


def is_split(config: ModelConfig | DraftHeadConfig, mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh shards a model: targets always, draft heads if all their sizes divide."""
    return isinstance(config, ModelConfig) or not _undivided_of_head(config, mesh)


def why_whole(config: DraftHeadConfig, mesh: Mesh | AbstractMesh) -> str:
    """The reason why a mesh cannot shard a draft head."""
    return "; ".join(_undivided_of_head(config, mesh))


@functools.cache
def spread(config: Config, mesh: Mesh | None) -> Config:
    """The config of a model on a mesh, with repeated KV heads and a padded vocabulary.

    It gives the global shapes of parameters and stores. Programs use the original config, and take the sizes
    of shards from their arrays.
    """
    if mesh is None or not is_split(config, mesh):
        return config
    if isinstance(config, DraftHeadConfig):
        return replace(config, layers=spread(config.layers, mesh))
    parts = size_of(mesh)
    layers = tuple(replace(layer, num_kv_heads=_kv_heads(layer, parts)) for layer in config.layers)
    return replace(config, layers=layers, vocab_size=-(-config.vocab_size // parts) * parts)


def own_part(config: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """The config of one device's shard of a decoder.

    The number of experts is not divided, because a device computes the routing over all experts.
    """
    if mesh is None:
        return config
    parts, tensor = size_of(mesh), mesh.shape[shards.TENSOR]

    def local(layer: LayerConfig) -> LayerConfig:
        rec, routed = layer.recurrence, layer.experts
        if rec is not None:
            keys, values = rec.num_key_heads // parts, rec.num_value_heads // parts
            rec = replace(rec, num_key_heads=keys, num_value_heads=values)
        return replace(
            layer,
            num_heads=layer.num_heads // parts,
            num_kv_heads=layer.num_kv_heads // parts,
            mlp_size=layer.mlp_size // parts,
            experts=None if routed is None else replace(routed, size=routed.size // tensor),
            recurrence=rec,
        )

    whole = spread(config, mesh)
    return replace(whole, layers=tuple(map(local, whole.layers)), vocab_size=whole.vocab_size // parts)


@functools.cache
def parameter_specs(config: ModelConfig | DraftHeadConfig, mesh: Mesh | AbstractMesh) -> Any:
    """The partition specs of all parameters of a config's module, in the structure of its weights."""
    split = SPLIT if is_split(config, mesh) else {}

    def spec(parameter: nnx.Variable) -> PartitionSpec:
        return PartitionSpec(*(split.get(name) for name in parameter.get_metadata()["axes"]))

    flat = nnx.to_flat_state(nnx.state(abstract(config), nnx.Param))
    return nnx.traversals.unflatten_mapping({tuple(path): spec(parameter) for path, parameter in flat})


def channel_order(recurrence: Recurrence, parts: int) -> np.ndarray:
    """The original index of each channel of a recurrent layer, ordered by shard.

    Two shards of two key heads, with queries q, keys k and values v of one element::

        q0 q1 k0 k1 v0 v1      ->      q0 k0 v0  q1 k1 v1
    """
    keys, values = (
        recurrence.num_key_heads * recurrence.key_dim,
        recurrence.num_value_heads * recurrence.value_dim,
    )
    starts = np.split(np.arange(recurrence.channels), (keys, 2 * keys))
    assert len(starts[2]) == values
    return np.concatenate([block.reshape(parts, -1) for block in starts], axis=1).reshape(-1)


def _undivided_of_head(config: DraftHeadConfig, mesh: Mesh | AbstractMesh) -> list[str]:
    return _undivided(config.layers, mesh, features=True) or cut_blocks(config, mesh)


def cut_blocks(config: ModelConfig | DraftHeadConfig, mesh: Mesh | AbstractMesh) -> list[str]:
    """The quantised parameters whose shards would begin or end inside a block.

    An FP8 block that is as long as its axis may be cut, because every device has its scale. Activations in
    FP8 may not, because a device would find another largest magnitude.
    """
    layers = config if isinstance(config, ModelConfig) else config.layers
    found: dict[str, list[int]] = {}
    plain = nnx.state(abstract(with_quantization(config, None)), nnx.Param)
    blocks, quantization = quantized_blocks(config), quantization_of(config)
    for key_path, parameter in nnx.to_flat_state(plain):
        path: Any = tuple(key_path)
        _, layer, *rest = path if len(path) > 1 else ("", -1, *path)
        names, terms, shared = parameter.get_metadata()["axes"], 1, 1
        for name, size, block in zip(names, parameter.shape, blocks.get(path, ()), strict=False):
            axes = SPLIT.get(name, ())
            parts = math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
            # Products whose result is not split have their sums split.
            if names[-1] == "embed" and name not in ("expert", "embed"):
                terms, shared = terms * size // parts, shared * parts
            pieces = [size]
            if name == "channels":
                recurrence = layers.layers[path[1]].recurrence
                pieces = [
                    recurrence.num_key_heads * recurrence.key_dim,
                    recurrence.num_value_heads * recurrence.value_dim,
                ]
            cuts = any(piece // parts % block for piece in pieces)
            packed = quantization is not None and quantization.is_mxfp4
            if parts > 1 and block > 1 and (block < size or packed) and cuts:
                assert quantization is not None
                text = f"parts of {size // parts} values cut {quantization.type} blocks of {block}"
                found.setdefault(f"{'.'.join(rest)}: {text}", []).append(layer)
        group = None if quantization is None else quantization.row_group
        if shared > 1 and group is not None and terms % (group or terms * shared):
            text = f"parts of {terms} activations cut groups of {group or terms * shared} in FP8"
            found.setdefault(f"{'.'.join(rest)}: {text}", []).append(layer)
    return [f"{what} (layers {ranges(numbers)})" for what, numbers in found.items()]


def _kv_heads(layer: LayerConfig, parts: int) -> int:
    return layer.num_kv_heads if layer.recurrence is not None else math.lcm(layer.num_kv_heads, parts)


def _undivided(config: ModelConfig, mesh: Mesh | AbstractMesh, *, features: bool = False) -> list[str]:
    """The sizes of a decoder's layers that do not divide; ``features`` includes those of a head's context."""
    parts, experts, tensor = size_of(mesh), mesh.shape[shards.EXPERT], mesh.shape[shards.TENSOR]
    found: dict[str, list[int]] = {}
    for number, layer in enumerate(config.layers):
        recurrence, routed = layer.recurrence, layer.experts
        counts = [(layer.mlp_size, parts, "features of the dense block")]
        if recurrence is not None:
            counts.append((recurrence.num_key_heads, parts, "key heads of the recurrence"))
        elif layer.num_heads % _kv_heads(layer, parts):
            repeated = f"{layer.num_kv_heads} KV heads for {layer.num_heads} query heads over {parts} parts"
            found.setdefault(repeated, []).append(number)
        if routed is not None:
            counts.append((routed.count, experts, "experts"))
            counts.append((routed.size, tensor, "features of an expert"))
        for size, over, what in counts:
            if size % over:
                found.setdefault(f"{size} {what} over {over} parts", []).append(number)
    if features and config.hidden_size % parts:
        found[f"{config.hidden_size} context features over {parts} parts"] = list(range(config.num_layers))
    return [f"{what} (layers {ranges(layers)})" for what, layers in found.items()]


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as text: 0-3, 5."""
    runs = np.split(np.asarray(numbers), np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
