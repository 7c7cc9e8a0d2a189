"""The target's choice at every node: greedy, or a sample whose noise depends on seed and position only.

A sample is the argmax of the filtered logits plus Gumbel noise, and the noise is keyed by the request's seed
and the absolute position of the emitted token. So a token is the same whether its position was reached by
plain decoding or through any tree, in any batch: losslessness at any temperature is an equality.

Logits come in the type they were computed in. Everything made of them is float32, inside a reduction over the
vocabulary: a GPU stores no float32 copy of a tree's logits, and nothing is sorted.

Where several devices each compute a part of the vocabulary (see `pallas_kernels.shards`), V is a device's own
part: all are of one size, in order, and logits of the padding after the last token are -inf. No device sees
another's logits, and all get the same choices.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Num, Shaped, UInt32

from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.sampling.token_sets import NO_CHOICE
from pallas_kernels import shards
from pallas_kernels.token_filter import least_kept

# Entries of a row that are reduced together. XLA:GPU takes a block for each, so that few rows keep it busy.
_CHUNK = 4096
# Chunks of a multiple of this are read in whole vectors.
_VECTOR = 8


def choose_tokens(
    logits: Float[Array, "B N V"],
    depths: Int[Array, "B N"],
    first_position: Int[Array, "B"],
    sampling: Sampling,
    *,
    max_depth: int,
    vocab_size: int | None = None,
) -> Int[Array, "B N"]:
    """The target's next token at every node; of equal ones the lowest id; `NO_CHOICE` where there is none.

    Args:
        logits: Logits of the nodes, of any floating type.
        depths: Depth of each node, at most ``max_depth``.
        first_position: Absolute position of the token that a node of depth 0 emits.
        sampling: Settings of each slot.
        max_depth: Static bound on the depths.
        vocab_size: Size of the whole vocabulary, needed where logits are a device's part of it.

    Raises:
        ValueError: Logits are a part of the vocabulary, and its size is not given or too large for the parts.
    """
    # Greedy slots take no noise, but it is made for them too: a condition would be read by the host, which on
    # a GPU waits for the target's forward to do so, and launches what follows only then.
    return _highest(
        perturb(logits, depths, first_position, sampling, max_depth=max_depth, vocab_size=vocab_size)
    )


def perturb(
    logits: Float[Array, "B N V"],
    depths: Int[Array, "B N"],
    first_position: Int[Array, "B"],
    sampling: Sampling,
    *,
    max_depth: int,
    vocab_size: int | None = None,
) -> Float32[Array, "B N V"]:
    """What `choose_tokens` takes the argmax of: scaled, filtered and noisy logits, or at temperature 0 these.

    Nodes at one position share their noise. The difference between the two largest entries of a row says how
    firm a choice is: rounding can only flip it where that gap is tiny. Of a part of the vocabulary, its part.
    """
    samples = sampling.temperature > 0
    least = least_kept(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    # Made once per position: without the barrier XLA may make it again at every node, inside the argmax.
    own = logits.shape[-1]
    noise = _noise(sampling.key, first_position, max_depth + 1, _size_of_all(own, vocab_size))
    noise = jax.lax.optimization_barrier(own_part(noise, own))
    own_noise = jnp.take_along_axis(noise, depths[:, :, None], axis=1, mode="promise_in_bounds")
    values = logits.astype(jnp.float32)
    scaled = values / jnp.where(samples, sampling.temperature, 1.0)[:, None, None]
    noisy = jnp.where(values >= least[:, :, None], scaled + own_noise, -jnp.inf)
    return jnp.where(samples[:, None, None], noisy, values)


def _size_of_all(own: int, vocab_size: int | None) -> int:
    """Size of the whole vocabulary, of which this device has ``own`` columns."""
    parts = shards.count()
    if parts == 1:
        return own
    if vocab_size is None or not 1 <= vocab_size <= parts * own:
        raise ValueError(
            f"vocab_size must be in 1..{parts * own}, as {parts} devices have logits of {own} tokens each; "
            f"got {vocab_size}"
        )
    return vocab_size


def _noise(
    keys: UInt32[Array, "B 2"], first_position: Int[Array, "B"], count: int, vocab: int
) -> Float32[Array, "B count V"]:
    """Gumbel noise of ``count`` consecutive positions per slot."""

    def at(key: UInt32[Array, "2"], position: Int[Array, ""]) -> Float32[Array, "V"]:
        # The implementation is named so that a user's global setting cannot change a seeded text.
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(typed, position), (vocab,), jnp.float32)

    positions = first_position[:, None] + jnp.arange(count)[None, :]
    return jax.vmap(jax.vmap(at, (None, 0)))(keys, positions)


def own_part(rows: Num[Array, "*shape W"], own: int) -> Num[Array, "*shape V"]:
    """This device's columns of whole rows, which are padded with 0 to as many as all parts have."""
    if shards.count() == 1:
        return rows
    missing = shards.count() * own - rows.shape[-1]
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])
    return jax.lax.dynamic_slice_in_dim(padded, shards.index() * own, own, axis=rows.ndim - 1)


def _highest(values: Float[Array, "B N V"]) -> Int[Array, "B N"]:
    """The index of the highest value of each row, the first among equals; `NO_CHOICE` if none has a value."""
    # Compared in float32, as XLA:GPU would otherwise round to bfloat16 after every comparison.
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, 2)
    pairs = _in_chunks(values.astype(jnp.float32)), _in_chunks(index)
    start = jnp.float32(-jnp.inf), jnp.int32(0)
    best = jax.lax.reduce(pairs, start, _better, (3,))
    value, index = jax.lax.reduce(best, start, _better, (2,))
    if shards.count() > 1:
        # Each part's best as bits, and its id in the whole vocabulary: one gather.
        own = jax.lax.bitcast_convert_type(value, jnp.int32), index + shards.index() * values.shape[-1]
        of_all = shards.gather(jnp.stack(own))
        pairs = jax.lax.bitcast_convert_type(of_all[:, 0], jnp.float32), of_all[:, 1]
        value, index = jax.lax.reduce(pairs, start, _better, (0,))
    return jnp.where(value > -jnp.inf, index, NO_CHOICE)


def _better(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """The better of two pairs of value and index: in any order, so that it may be reduced in any order."""
    (value, index), (other, other_index) = a, b
    first = (value > other) | ((value == other) & (index < other_index))
    return jnp.where(first, value, other), jnp.where(first, index, other_index)


def _in_chunks(rows: Shaped[Array, "B N V"]) -> Shaped[Array, "B N chunks size"]:
    """Rows cut into equal chunks, so that few rows are work for many blocks; whole where nothing divides."""
    vocab = rows.shape[-1]
    size = next((size for size in range(_CHUNK, vocab, _VECTOR) if vocab % size == 0), vocab)
    return rows.reshape(*rows.shape[:-1], vocab // size, size)
