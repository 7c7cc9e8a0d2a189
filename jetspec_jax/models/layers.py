"""Blocks that every family is made of.

Shapes: B sequences, N tokens, M model, H query heads, G KV heads, R = H / G, E head size; of recurrent
layers, K key heads of size D, V value heads of size E, C channels of the convolution.

Modules compute in the dtype of their input; norms, softmax and rotary angles are float32 inside. Every
parameter names its axes where it is made. On a mesh each device has its own part of some of these axes (see
`pallas_kernels.shards`): what a layer knows of its sizes it then takes from its parameters, and what its own
heads or features make is `joined` with the others'.
"""

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import shards
from pallas_kernels.matmul import matmul
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.weights import Narrow


class KV(NamedTuple):
    """Keys (after norm and rotary) and values of some tokens in one layer, each ``[B, N, G, E]``."""

    k: Float[Array, "B N G E"]
    v: Float[Array, "B N G E"]


class RecurrentRows(NamedTuple):
    """What a recurrent layer leaves of some tokens, of which a store makes the state after any of them.

    Attributes:
        rows: Queries, keys and values as they were projected, before the convolution.
        k: Keys, normalised.
        delta: What each token adds to the state along its key, on the path that leads to it.
        decay: Logarithm of what the state is multiplied with at each token, never positive.
    """

    rows: Float[Array, "B N C"]
    k: Float32[Array, "B N K D"]
    delta: Float32[Array, "B N V E"]
    decay: Float32[Array, "B N V"]


#: What a layer's store keeps of a block's tokens.
Rows = KV | RecurrentRows


class History(NamedTuple):
    """What a recurrent layer knows of the tokens before a block, and how the block hangs together.

    Attributes:
        rows: The last ones before the convolution, the oldest first; zero where there are none. None: nothing
            is before the block.
        state: The state after the last of them; None likewise.
        parents: Of each token of a tree the one before it, -1 for the root; None: each follows the one to its
            left.
        begins: Which tokens of a chain begin a sequence of their own, and know nothing of those before. None:
            the block is one sequence.
    """

    rows: Float[Array, "B taps C"] | None
    state: Float32[Array, "B V D E"] | None
    parents: Int32[Array, "B N"] | None
    begins: Bool[Array, "B N"] | None = None


@runtime_checkable
class Attend(Protocol):
    """Attention over whatever a layer's tokens may see: committed pages, a dense sequence, a context.

    Layers project and normalise; what lies before the block, and who sees whom inside it, is the caller's.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B N H E"],
        kv: KV,
        *,
        scale: float,
        window: int | None,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "B N H E"]:
        """Attends with the queries of one layer."""
        ...


@runtime_checkable
class Mix(Attend, Protocol):
    """Whatever the layers of a target may ask about other tokens: attention, and what recurrent ones keep."""

    def history(self, layer: int) -> History:
        """What a recurrent layer starts from."""
        ...


def einsum(spec: str, x: Array, w: Array | Narrow, *, wide: bool = False) -> Array:
    """A product in ``x``'s dtype. float32 means all of float32: by default a GPU would round to TF32.

    Args:
        spec: As for `jnp.einsum`: the weights' axes that are summed over are the last of ``x``.
        x: What the weights are cast to.
        w: The weights; quantised ones stay as they are, and the product has their scales in it.
        wide: Whether the sums stay in float32.
    """
    return matmul(spec, x, w if isinstance(w, Narrow) else w.astype(x.dtype), wide=wide)


def joined(terms: Any, own: int, whole: int) -> Any:
    """What all devices together make of a sum's terms: heads, features or experts.

    Args:
        terms: What this device's own make: an array, or several, which are added up in one go.
        own: How many terms this device has.
        whole: How many there are; where it has them all, nothing is added.
    """
    if own == whole:
        return terms
    if not isinstance(terms, tuple):
        return shards.all_sum(terms)
    flat, restore = ravel_pytree(terms)
    return restore(shards.all_sum(flat))


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype) -> nnx.Param:
    """A normally initialised parameter (deviation 0.02) that names its axes."""
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square norm. As Qwen3 does it, the result is cast before the weight multiplies it.

    Attributes:
        INITIAL: What a new weight is.
        WEIGHT_OFFSET: What the stored weight lacks of what multiplies, in float32 and before the result is
            rounded; None multiplies in the dtype of the rows.
    """

    INITIAL: ClassVar[float] = 1.0
    WEIGHT_OFFSET: ClassVar[float | None] = None

    def __init__(self, size: int, eps: float, *, axis: str, dtype: jnp.dtype):
        """Makes a norm over the last axis of ``size`` elements, called ``axis``."""
        self.weight = nnx.Param(jnp.full((size,), self.INITIAL, dtype), axes=(axis,))
        self.eps = eps

    def weight_for(self, dtype: jnp.dtype) -> Float[Array, "size"]:
        """The weight as kernels take it for rows of a dtype: if it multiplies in float32, as it is stored."""
        weight = self.weight[...]
        return weight.astype(dtype) if self.WEIGHT_OFFSET is None else weight

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Normalises the last axis."""
        return self.after(x, None)[0]

    def after(
        self, x: Float[Array, "*rows size"], delta: Float[Array, "*rows size"] | None
    ) -> tuple[Float[Array, "*rows size"], Float[Array, "*rows size"]]:
        """The sum of a residual stream and what a block adds to it, normalised, and as it is."""
        weight, offset = self.weight_for(x.dtype), self.WEIGHT_OFFSET
        return rms_norm(x, weight, eps=self.eps, delta=delta, weight_offset=offset)


class WideRMSNorm(RMSNorm):
    """A norm whose weight multiplies in float32, before the result is rounded: GPT-OSS, Gemma 4."""

    WEIGHT_OFFSET = 0.0


class CenteredRMSNorm(RMSNorm):
    """A norm whose weight is stored less one, and multiplies in float32: Gemma 3, Step-3.7."""

    INITIAL = 0.0
    WEIGHT_OFFSET = 1.0
