"""Building blocks of all model families.

Shapes: B sequences, N tokens, M model, H query heads, G KV heads, R = H / G, E head size; of recurrent
layers, K key heads of size D, V value heads of size E, C channels of the convolution.

Modules compute in the dtype of their input; norms, softmax and rotary angles are float32 inside. Parameters
are created with the names of their axes. On a mesh each device has a shard of some axes (see
`pallas_kernels.shards`): layers take their local sizes from the shapes of their parameters, and `joined` sums
the terms of all devices.
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
    """A recurrent layer's rows of a block's tokens; a store computes the state after any token from them.

    Attributes:
        rows: Projected queries, keys and values, before the convolution.
        k: Normalised keys.
        delta: The change of the state along each token's key, given the path that leads to the token.
        decay: Logarithm of the state's decay at each token, never positive.
    """

    rows: Float[Array, "B N C"]
    k: Float32[Array, "B N K D"]
    delta: Float32[Array, "B N V E"]
    decay: Float32[Array, "B N V"]


#: A layer's rows of a block's tokens, for its store.
Rows = KV | RecurrentRows


class History(NamedTuple):
    """A recurrent layer's input from the tokens before a block, and the structure of the block.

    Attributes:
        rows: The last projected rows before the block, oldest first, padded with zeros. None: the block is
            the beginning.
        state: The state before the block; None: the block is the beginning.
        parents: Each tree token's parent, -1 for the root; None: the block is a chain.
        begins: The tokens of a chain that begin a new sequence, which sees nothing of the tokens before.
            None: the block is one sequence.
    """

    rows: Float[Array, "B taps C"] | None
    state: Float32[Array, "B V D E"] | None
    parents: Int32[Array, "B N"] | None
    begins: Bool[Array, "B N"] | None = None


@runtime_checkable
class Attend(Protocol):
    """Attention over committed pages, a dense sequence, or a context.

    Layers project and normalise. The caller provides the tokens before the block and the mask inside it.
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
    """Access to other tokens for the layers of a target: attention, and the history of recurrent layers."""

    def history(self, layer: int) -> History:
        """The history before the block, for a recurrent layer."""
        ...


def einsum(spec: str, x: Array, w: Array | Narrow, *, wide: bool = False) -> Array:
    """A product in ``x``'s dtype. float32 has full precision, where a GPU would by default round to TF32.

    The contracted axes must be the last of ``x``. Weights are cast to its type; of quantised ones the product
    applies the scales. With ``wide`` the result is float32.
    """
    return matmul(spec, x, w if isinstance(w, Narrow) else w.astype(x.dtype), wide=wide)


def joined(terms: Any, local: int, whole: int) -> Any:
    """The sum over all devices of partial results over heads, features or experts.

    ``terms`` is an array, or a tuple, which is summed in one collective. A device that has all (``local`` of
    ``whole``) returns them unchanged.
    """
    if local == whole:
        return terms
    if not isinstance(terms, tuple):
        return shards.all_sum(terms)
    flat, restore = ravel_pytree(terms)
    return restore(shards.all_sum(flat))


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype) -> nnx.Param:
    """A parameter with named axes, initialised from a normal distribution of deviation 0.02."""
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square norm. As in Qwen3, the result is cast before it is multiplied by the weight.

    Attributes:
        INITIAL: The initial weight.
        WEIGHT_OFFSET: Added to the stored weight, which then multiplies in float32 before the result is
            rounded. None: the weight multiplies in the dtype of the rows.
    """

    INITIAL: ClassVar[float] = 1.0
    WEIGHT_OFFSET: ClassVar[float | None] = None

    def __init__(self, size: int, eps: float, *, axis: str, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.full((size,), self.INITIAL, dtype), axes=(axis,))
        self.eps = eps

    def weight_for(self, dtype: jnp.dtype) -> Float[Array, "size"]:
        """The weight in the type that kernels need for rows of ``dtype``."""
        weight = self.weight[...]
        return weight.astype(dtype) if self.WEIGHT_OFFSET is None else weight

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Normalises the last axis."""
        return self.after(x, None)[0]

    def after(
        self, x: Float[Array, "*rows size"], delta: Float[Array, "*rows size"] | None
    ) -> tuple[Float[Array, "*rows size"], Float[Array, "*rows size"]]:
        """The sum ``x + delta``, normalised and as it is."""
        weight, offset = self.weight_for(x.dtype), self.WEIGHT_OFFSET
        return rms_norm(x, weight, eps=self.eps, delta=delta, weight_offset=offset)


class WideRMSNorm(RMSNorm):
    """A norm whose weight multiplies in float32, before the result is rounded: GPT-OSS, Gemma 4."""

    WEIGHT_OFFSET = 0.0


class CenteredRMSNorm(RMSNorm):
    """A norm whose weight is stored minus one, and multiplies in float32: Gemma 3, Step-3.7."""

    INITIAL = 0.0
    WEIGHT_OFFSET = 1.0
