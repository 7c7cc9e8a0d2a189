"""The target's choice at every node: greedy, or a sample whose noise depends only on seed and position.

A sample is the argmax of the filtered logits plus Gumbel noise, keyed by the request's seed and the absolute
position of the emitted token. So the token at a position is the same for plain decoding, any tree and any
batch: losslessness is exact equality at any temperature.

Logits keep the type in which they were computed. Computations are float32, inside reductions over the
vocabulary, so a GPU stores no float32 copy of a tree's logits and sorts nothing.

If the vocabulary is sharded over devices (see `pallas_kernels.shards`), V is the size of a shard. Shards have
equal sizes and are in order, and logits of padding are -inf. Devices do not exchange logits, and all get the
same choices.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Num, Shaped, UInt32

from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.sampling.token_sets import NO_CHOICE
from pallas_kernels import shards
from pallas_kernels.token_filter import least_kept

# Entries of a row per reduction. XLA:GPU uses a block for each chunk, so that few rows keep it busy.
_CHUNK = 4096
# Chunks whose size is a multiple of this are read as whole vectors.
_VECTOR = 8


def choose_tokens(
    logits: Float[Array, "B N V"],
    depths: Int[Array, "B N"],
    first_position: Int[Array, "B"],
    sampling: Sampling,
    *,
    max_depth: int,
    vocab_size: int | None = None,
    noise: Float32[Array, "B D1 V"] | None = None,
) -> Int[Array, "B N"]:
    """The target's next token at every node: the lowest id among equals, `NO_CHOICE` if no token is possible.

    A node of depth 0 emits the token at ``first_position``. ``vocab_size`` is required if the vocabulary is
    sharded. ``noise`` is the result of `gumbel_noise`, if it exists already.
    """
    # Noise is computed for greedy slots too. A condition would be read by the host, which on a GPU would have
    # to wait for the target's forward before it launches the next kernels.
    settings = {"max_depth": max_depth, "vocab_size": vocab_size, "noise": noise}
    return _highest(perturb(logits, depths, first_position, sampling, **settings))


def perturb(
    logits: Float[Array, "B N V"],
    depths: Int[Array, "B N"],
    first_position: Int[Array, "B"],
    sampling: Sampling,
    *,
    max_depth: int,
    vocab_size: int | None = None,
    noise: Float32[Array, "B D1 V"] | None = None,
) -> Float32[Array, "B N V"]:
    """The values whose argmax `choose_tokens` returns: scaled, filtered and noisy logits, or plain logits.

    Slots of temperature 0 get plain logits. Nodes at the same position share their noise. Rounding can change
    a choice only if the two largest entries of its row are nearly equal. With a sharded vocabulary the values
    are those of this device's shard.
    """
    samples = sampling.temperature > 0
    least = least_kept(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    if noise is None:
        size = {"local": logits.shape[-1], "vocab_size": vocab_size}
        noise = gumbel_noise(sampling.key, first_position, max_depth + 1, **size)
    node_noise = jnp.take_along_axis(noise, depths[:, :, None], axis=1, mode="promise_in_bounds")
    values = logits.astype(jnp.float32)
    scaled = values / jnp.where(samples, sampling.temperature, 1.0)[:, None, None]
    noisy = jnp.where(values >= least[:, :, None], scaled + node_noise, -jnp.inf)
    return jnp.where(samples[:, None, None], noisy, values)


def _whole_size(local: int, vocab_size: int | None) -> int:
    """The size of the whole vocabulary, of which this device has ``local`` columns."""
    parts = shards.count()
    if parts == 1:
        return local
    if vocab_size is None or not 1 <= vocab_size <= parts * local:
        raise ValueError(
            f"vocab_size must be in 1..{parts * local}, as {parts} devices have logits of {local} tokens "
            f"each; got {vocab_size}"
        )
    return vocab_size


def gumbel_noise(
    keys: UInt32[Array, "B 2"],
    first_position: Int[Array, "B"],
    count: int,
    *,
    local: int,
    vocab_size: int | None = None,
) -> Float32[Array, "B count V"]:
    """The noise of ``count`` consecutive positions per slot, for this device's ``local`` tokens."""
    vocab = _whole_size(local, vocab_size)

    def at(key: UInt32[Array, "2"], position: Int[Array, ""]) -> Float32[Array, "V"]:
        # The implementation is explicit, so that a user's global setting cannot change seeded texts.
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(typed, position), (vocab,), jnp.float32)

    positions = first_position[:, None] + jnp.arange(count)[None, :]
    noise = local_columns(jax.vmap(jax.vmap(at, (None, 0)))(keys, positions), local)
    # Without the barrier, XLA might recompute the noise wherever it is read, at every node.
    return jax.lax.optimization_barrier(noise)


def local_columns(rows: Num[Array, "*shape W"], local: int) -> Num[Array, "*shape V"]:
    """This device's columns of whole rows, which are padded with 0 to the total size of all shards."""
    if shards.count() == 1:
        return rows
    missing = shards.count() * local - rows.shape[-1]
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])
    return jax.lax.dynamic_slice_in_dim(padded, shards.index() * local, local, axis=rows.ndim - 1)


def _highest(values: Float[Array, "B N V"]) -> Int[Array, "B N"]:
    """The index of each row's maximum, the first among equals; `NO_CHOICE` if all values are -inf or NaN."""
    # In float32, because XLA:GPU would otherwise round to bfloat16 after every comparison.
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, 2)
    pairs = _in_chunks(values.astype(jnp.float32)), _in_chunks(index)
    start = jnp.float32(-jnp.inf), jnp.int32(0)
    best = jax.lax.reduce(pairs, start, _better, (3,))
    value, index = jax.lax.reduce(best, start, _better, (2,))
    if shards.count() > 1:
        # Each shard's best value, as bits, and its id in the whole vocabulary, in one gather.
        pair = jax.lax.bitcast_convert_type(value, jnp.int32), index + shards.index() * values.shape[-1]
        of_all = shards.gather(jnp.stack(pair))
        pairs = jax.lax.bitcast_convert_type(of_all[:, 0], jnp.float32), of_all[:, 1]
        value, index = jax.lax.reduce(pairs, start, _better, (0,))
    return jnp.where(value > -jnp.inf, index, NO_CHOICE)


def _better(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """The better of two pairs of value and index; commutative and associative, for reductions."""
    (value, index), (other, other_index) = a, b
    first = (value > other) | ((value == other) & (index < other_index))
    return jnp.where(first, value, other), jnp.where(first, index, other_index)


def _in_chunks(rows: Shaped[Array, "B N V"]) -> Shaped[Array, "B N chunks size"]:
    """Rows in equal chunks, so that few rows occupy many blocks; a single chunk if no size divides."""
    vocab = rows.shape[-1]
    size = next((size for size in range(_CHUNK, vocab, _VECTOR) if vocab % size == 0), vocab)
    return rows.reshape(*rows.shape[:-1], vocab // size, size)
