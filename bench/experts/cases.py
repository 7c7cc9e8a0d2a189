"""Inputs, references and chains of calls for the kernels of a mixture of experts.

Shapes: T tokens, K experts per token, E experts, M model, I features of an expert, L calls of a chain.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from bench.common.floors import Work
from pallas_kernels.expert_choice import ExpertChoice, expert_choice
from pallas_kernels.expert_mlp import expert_mlp
from pallas_kernels.expert_mlp.shapes import ExpertShape
from pallas_kernels.mxfp4 import BLOCK, BLOCK_BYTES, Mxfp4
from pallas_kernels.quantized import Quantized
from pallas_kernels.weights import Narrow

# Calls per turn of the loop over calls.
UNROLL = 4
# Terms and columns per scale block of Qwen's FP8 checkpoints.
_FP8_BLOCK = 128
# Libraries with a product of rows grouped by expert, all with one signature. Tokamax is optional.
GROUPED = {"ragged_dot": "jax.lax", "tokamax": "tokamax"}


class ExpertWeights(NamedTuple):
    """The experts' weights of a layer; the last expert is NaN, and no token chooses it."""

    gate_up: Float[Array, "E M 2 I"] | Narrow
    down: Float[Array, "E I M"] | Narrow
    gate_up_bias: Float[Array, "E 2 I"] | None
    down_bias: Float[Array, "E M"] | None


#: A layer's experts, as computed by an implementation.
Run = Callable[[ExpertWeights, Float[Array, "T M"], ExpertChoice], Float[Array, "T M"]]


def random_layer(shape: ExpertShape, dtype: jnp.dtype, stored: str = "plain") -> ExpertWeights:
    """Random weights, made on the device because they are gigabytes.

    Args:
        dtype: The type of all that is not quantised.
        stored: The format of the matrices: one of `STORED`.
    """

    @jax.jit
    def make() -> ExpertWeights:
        keys = jax.random.split(jax.random.key(0), 4)
        e, m, i = shape.experts, shape.size, shape.features

        def normal(key: Array, scale: float, *axes: int) -> Array:
            values = jnp.asarray(scale, dtype) * jax.random.normal(key, axes, dtype)
            return values.at[-1].set(jnp.nan)

        biases = normal(keys[2], 0.1, e, 2, i), normal(keys[3], 0.1, e, m)
        gate_up, down = normal(keys[0], m**-0.5, e, m, 2, i), normal(keys[1], 0.5 * i**-0.5, e, i, m)
        quantise = STORED[stored]
        return ExpertWeights(quantise(gate_up), quantise(down), *(biases if shape.biases else (None, None)))

    return make()


def _in_fp8(w: Float[Array, "..."]) -> Quantized:
    """FP8 in blocks of 128 x 128 per expert, as Qwen's checkpoints; NaN stays NaN."""
    ends = (min(_FP8_BLOCK, w.shape[1]), min(_FP8_BLOCK, w.shape[-1]))
    return Quantized.of(w, (1, ends[0], *[1] * (w.ndim - 3), ends[1]))


def _in_mxfp4(w: Float[Array, "..."]) -> Mxfp4:
    """MXFP4; the last expert's scales are NaN, as its weights are."""
    made = Mxfp4.of(jnp.nan_to_num(w), 1)
    return Mxfp4(made.values, made.scales.at[-1].set(255), 1)


#: The formats of experts' weights: each quantises a matrix.
STORED: dict[str, Callable[[Array], Array | Narrow]] = {
    "plain": lambda w: w,
    "fp8": _in_fp8,
    "mxfp4": _in_mxfp4,
}
# Bytes per quantised weight with scales, except FP8's: one of these serves thousands of values.
_BYTES = {"fp8": 1, "mxfp4": BLOCK_BYTES / BLOCK + 1 / BLOCK}


def random_choices(rng: np.random.Generator, shape: ExpertShape, calls: int, tokens: int) -> ExpertChoice:
    """Random experts, never the last one, and weights that sum to one, both [L, T, K].

    With few tokens every call reads other experts, so that no cache holds their weights.
    """
    noise = rng.random((calls, tokens, shape.experts - 1))
    experts = np.argsort(noise, axis=-1)[:, :, : shape.routing.top_k]
    weights = rng.random(experts.shape, np.float32) + 0.1
    weights /= weights.sum(axis=-1, keepdims=True)
    return ExpertChoice(jnp.asarray(experts, jnp.int32), jnp.asarray(weights))


def experts_by(shape: ExpertShape, name: str) -> Run:
    """A layer's experts by an implementation of the operation, or by a library of `GROUPED`."""
    if name in GROUPED:
        product = importlib.import_module(GROUPED[name]).ragged_dot
        return partial(_grouped, shape, product)
    return lambda layer, x, choice: expert_mlp(
        x,
        layer.gate_up,
        layer.down,
        *choice,
        activation=shape.activation,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
        implementation=name,
    )


def choice_by(shape: ExpertShape, name: str) -> Callable[[Float32[Array, "T E"]], ExpertChoice]:
    """A layer's router by an implementation."""
    rng = np.random.default_rng(0)
    bias, scale = (jnp.asarray(rng.random(shape.experts, np.float32)) for _ in range(2))
    return partial(
        expert_choice,
        routing=shape.routing,
        bias=bias if shape.choice_bias else None,
        expert_scale=scale if shape.expert_scale else None,
        implementation=name,
    )


def _grouped(
    shape: ExpertShape,
    product: Callable[..., Array],
    layer: ExpertWeights,
    x: Float[Array, "T M"],
    choice: ExpertChoice,
) -> Float[Array, "T M"]:
    """Experts without a kernel: sorted rows and two grouped products."""
    assert isinstance(layer.gate_up, Array), "grouped products of quantised experts"
    rows, top_k = choice.experts.size, choice.experts.shape[1]
    expert = choice.experts.reshape(rows)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=shape.experts).astype(jnp.int32)
    row_expert = expert[order]
    gates = product(x[order // top_k], layer.gate_up.reshape(shape.experts, shape.size, -1), sizes)
    gates = gates.reshape(rows, 2, -1).astype(jnp.float32)
    if layer.gate_up_bias is not None:
        gates += layer.gate_up_bias[row_expert].astype(jnp.float32)
    hidden = shape.activation(gates[:, 0], gates[:, 1]).astype(x.dtype)
    out = product(hidden, layer.down, sizes).astype(jnp.float32)
    if layer.down_bias is not None:
        out += layer.down_bias[row_expert].astype(jnp.float32)
    out = out[jnp.argsort(order)].reshape(*choice.experts.shape, -1)
    return jnp.sum(choice.weights[:, :, None] * out, axis=1).astype(x.dtype)


def chain_experts(
    run: Run, layer: ExpertWeights, x: Float[Array, "T M"], choices: ExpertChoice
) -> Float[Array, "T M"]:
    """A chain of calls, each with ``x`` plus the output of the call before."""

    # Jitted, so that the kernels are traced and lowered once, not once per unrolled copy.
    @jax.jit
    def step(last: Array, choice: ExpertChoice) -> Array:
        return run(layer, x + last, choice)

    steps = jax.lax.scan(lambda y, choice: (step(y, choice), None), jnp.zeros_like(x), choices, unroll=UNROLL)
    return steps[0]


def chain_choices(
    run: Callable[[Array], ExpertChoice], logits: Float32[Array, "L T E"]
) -> tuple[Float32[Array, ""], Int32[Array, "L T K"]]:
    """A chain of choices, in which the logits of each depend on the weights of the choice before."""

    @jax.jit
    def step(last: Array, scores: Array) -> tuple[Array, Array]:
        choice = run(scores + last)
        return 1e-9 * choice.weights[0, 0], choice.experts

    return jax.lax.scan(step, jnp.float32(0), logits, unroll=UNROLL)


def touched(choices: ExpertChoice) -> float:
    """The mean number of experts that a call reads."""
    return float(np.mean([np.unique(experts).size for experts in np.asarray(choices.experts)]))


def expert_work(
    shape: ExpertShape, tokens: int, experts: float, itemsize: int, stored: str = "plain"
) -> Work:
    """The least work of a call: it reads the weights of ``experts`` experts and x, and writes the result."""
    weights = 3 * shape.size * shape.features * _BYTES.get(stored, itemsize)
    biases = itemsize * (2 * shape.features + shape.size) * shape.biases
    moved = experts * (weights + biases) + itemsize * 2 * tokens * shape.size
    return Work(round(moved), 6 * tokens * shape.routing.top_k * shape.size * shape.features)
