"""Random weights, and decoding states in the middle of a sequence, all made on the device.

Times depend on shapes, not on the weights' meaning. But nothing is timed on zeros: they draw less power.

Shapes: B slots, S committed tokens, P pages, T pages per slot.
"""

import functools
import zlib
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec, Sharding
from jaxtyping import Array

from jetspec_jax import DecodeState, SamplingParams, SlotSettings, TreeDecoder
from jetspec_jax.cache.pages import PAGE_SIZE, pages_for
from jetspec_jax.cache.slots import Slots
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.decode.state import Stores, split
from jetspec_jax.device.mesh import shardings
from jetspec_jax.device.partition import parameter_specs, spread
from jetspec_jax.models import Weights, abstract, weights_of
from jetspec_jax.models.quantized import SCALES, stored_in_order
from pallas_kernels.mxfp4 import BLOCK, Mxfp4
from pallas_kernels.quantized import FP8

# More tokens than any run emits: no slot may stop while rounds are timed.
ENDLESS = 2**30


def random_weights(
    config: ModelConfig | DraftHeadConfig,
    dtype: jnp.dtype,
    seed: int,
    mesh: Mesh | None = None,
    *,
    placed: Any = None,
) -> Weights:
    """Parameters of a model: normal with deviation 0.02, norms 1; each device makes its shards.

    The formats of a model's weights differ in nothing else: all parameters that are stored alike are equal.

    Args:
        dtype: The type of all parameters.
        seed: The seed of the values.
        mesh: The devices that share the model as in decoding; None is one device.
        placed: The sharding of each parameter if there is no mesh; parameters are then not padded for a mesh.
    """
    module = abstract(spread(config, mesh), dtype)
    shapes = weights_of(module)
    if mesh is not None:
        placed = shardings(mesh, parameter_specs(config, mesh))
    normal = nnx.traversals.flatten_mapping(_random_like(shapes, seed, 0.02, placed))
    for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        order = parameter.get_metadata().get("memory_order")
        normal[tuple(path)] = stored_in_order(normal[tuple(path)], order)

    def ones(path: tuple[Any, ...], value: Array) -> Array:
        # Biases of 1 would dominate every token's activations, and all tokens would choose the same experts.
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name == SCALES and value.dtype != jnp.uint8:  # of FP8, whose values have a deviation of 1
            return jnp.full_like(value, 0.02, device=value.sharding)
        return jnp.ones_like(value) if value.ndim == 1 and not name.endswith(("bias", "sinks")) else value

    return jax.tree_util.tree_map_with_path(ones, nnx.traversals.unflatten_mapping(normal))


@dataclass(frozen=True)
class Scene:
    """Slots with the same number of tokens in scattered pages.

    Attributes:
        batch: B.
        context: S.
        room: Tokens that fit after the context.
    """

    batch: int
    context: int
    room: int

    @property
    def pages_per_slot(self) -> int:
        """T."""
        return pages_for(self.context + self.room)

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot's pages."""
        return self.pages_per_slot * PAGE_SIZE

    def num_bytes(self, decoder: TreeDecoder, dtype: jnp.dtype) -> int:
        """Bytes of the stores."""
        leaves = jax.tree.leaves(split(self._shapes(decoder, dtype))[0])
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def stores(self, decoder: TreeDecoder, dtype: jnp.dtype) -> Stores:
        """Stores full of normal values, also in unused pages."""
        shapes = split(self._shapes(decoder, dtype))[0]
        return _random_like(shapes, 2, 1.0, self._where(decoder, dtype, stores=True))

    def slots(
        self, decoder: TreeDecoder, dtype: jnp.dtype, budget: int, params: SamplingParams
    ) -> DecodeState:
        """A state without stores: every slot decodes after ``context`` tokens and does not stop."""
        # Compiled, so that the stores of the empty state are never made.
        whole = replace(decoder, mesh=None)
        empty = jax.jit(lambda: split(self._empty(whole, dtype))[1])()
        rng = np.random.default_rng(0)
        pages = rng.permutation(self.batch * self.pages_per_slot).astype(np.int32)
        settings = [
            SlotSettings.of(
                replace(params, seed=slot, max_tokens=ENDLESS),
                (),
                vocab_size=decoder.target.vocab_size,
                budget=budget,
                depth=decoder.depth,
            )
            for slot in range(self.batch)
        ]
        state = replace(
            empty,
            slots=Slots.of(
                jnp.asarray(pages.reshape(self.batch, -1)), jnp.full(self.batch, self.context, jnp.int32)
            ),
            room=jnp.full(self.batch, self.capacity, jnp.int32),
            anchors=jnp.asarray(rng.integers(0, decoder.target.vocab_size, self.batch, np.int32)),
            active=jnp.ones(self.batch, bool),
            settings=jax.tree.map(lambda *values: jnp.asarray(np.stack(values)), *settings),
        )
        where = self._where(decoder, dtype, stores=False)
        return state if where is None else jax.device_put(state, where)

    def _where(self, decoder: TreeDecoder, dtype: jnp.dtype, *, stores: bool) -> Any:
        """Shardings of the stores or of the rest of the state; None on one device."""
        if decoder.mesh is None:
            return None
        shapes = self._shapes(decoder, dtype)
        specs = decoder.state_specs(shapes)
        full = jax.tree.broadcast(specs, shapes, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
        return shardings(decoder.mesh, split(full)[0 if stores else 1])

    def _empty(self, decoder: TreeDecoder, dtype: jnp.dtype) -> DecodeState:
        return decoder.empty_state(
            self.batch,
            num_pages=self.batch * self.pages_per_slot,
            pages_per_slot=self.pages_per_slot,
            page_size=PAGE_SIZE,
            dtype=dtype,
        )

    def _shapes(self, decoder: TreeDecoder, dtype: jnp.dtype) -> Any:
        return jax.eval_shape(lambda: self._empty(decoder, dtype))


def _random_like(shapes: Any, seed: int, scale: float, placed: Any = None) -> Any:
    """Normal values for floating leaves and in MXFP4, zeros for others, with the given shardings.

    Leaves are made one at a time: a few small programs serve a whole model, and memory holds the random bits
    of one leaf only. Their keys depend on their paths, those of an MXFP4 matrix on the matrix's path.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    where = [None] * len(leaves) if placed is None else jax.tree.leaves(placed)

    def random(path: tuple[Any, ...], leaf: Any, sharding: Sharding | None) -> Array:
        packed = leaf.dtype == jnp.uint8
        name = jax.tree_util.keystr(path[:-1] if packed else path)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        if packed:
            part = jax.tree_util.keystr(path[-1:], simple=True)
            return _packed(leaf.shape, part, sharding)(key, jnp.float32(scale))
        if leaf.dtype == FP8 or jnp.issubdtype(leaf.dtype, jnp.floating):
            deviation = 1.0 if leaf.dtype == FP8 else scale
            return _normal(leaf.shape, leaf.dtype, sharding)(key, jnp.float32(deviation))
        return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)

    return jax.tree.unflatten(
        tree, [random(path, leaf, own) for (path, leaf), own in zip(leaves, where, strict=True)]
    )


@functools.cache
def _normal(shape: tuple[int, ...], dtype: jnp.dtype, where: Sharding | None) -> Any:
    """A program that makes an array of normal values, each device its shard."""

    def make(key: Array, scale: Array) -> Array:
        # In bfloat16 they would be 1 % of a deviation too small on average: outputs of all matrices would get
        # a common part, and all tokens would choose the same experts.
        return (scale * jax.random.normal(key, shape)).astype(dtype)

    return jax.jit(make, out_shardings=where)


@functools.cache
def _packed(shape: tuple[int, ...], part: str, where: Sharding | None) -> Any:
    """A program that makes the values or the scales of normal numbers in MXFP4."""
    blocks = shape if part == SCALES else shape[:-1]

    def make(key: Array, scale: Array) -> Array:
        normal = scale * jax.random.normal(key, (*blocks[:-1], blocks[-1] * BLOCK))
        packed = Mxfp4.of(normal, axis=normal.ndim - 1)
        return packed.scales if part == SCALES else packed.values

    return jax.jit(make, out_shardings=where)
