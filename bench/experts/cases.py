"""What the kernels of a mixture of experts are called with, and what they are compared with.

Shapes: T tokens, K experts of each, E experts, M model, I features of an expert, L calls of a chain.
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

# Copies of the call in a round of the loop over calls.
UNROLL = 4
# Products of rows grouped by expert, from elsewhere, that experts can be made of: `jax.lax` has one, and a
# package that need not be installed another of the same signature.
GROUPED = {"ragged_dot": "jax.lax", "tokamax": "tokamax"}


class ExpertWeights(NamedTuple):
    """The experts' weights of a layer; the last expert is all NaN, and nobody's."""

    gate_up: Float[Array, "E M 2 I"]
    down: Float[Array, "E I M"]
    gate_up_bias: Float[Array, "E 2 I"] | None
    down_bias: Float[Array, "E M"] | None


#: The experts of a shape by some implementation.
Run = Callable[[ExpertWeights, Float[Array, "T M"], ExpertChoice], Float[Array, "T M"]]


def random_layer(shape: ExpertShape, dtype: jnp.dtype) -> ExpertWeights:
    """Weights made on the device, for they are gigabytes."""

    @jax.jit
    def make() -> ExpertWeights:
        keys = jax.random.split(jax.random.key(0), 4)
        e, m, i = shape.experts, shape.size, shape.features

        def normal(key: Array, scale: float, *axes: int) -> Array:
            values = jnp.asarray(scale, dtype) * jax.random.normal(key, axes, dtype)
            return values.at[-1].set(jnp.nan)

        biases = normal(keys[2], 0.1, e, 2, i), normal(keys[3], 0.1, e, m)
        gate_up, down = normal(keys[0], m**-0.5, e, m, 2, i), normal(keys[1], 0.5 * i**-0.5, e, i, m)
        return ExpertWeights(gate_up, down, *(biases if shape.biases else (None, None)))

    return make()


def random_choices(rng: np.random.Generator, shape: ExpertShape, calls: int, tokens: int) -> ExpertChoice:
    """Experts that are chosen by chance, never the last one, with weights that sum to one: [L, T, K] of both.

    Few tokens choose other experts in every call, so that no cache holds what they read.
    """
    noise = rng.random((calls, tokens, shape.experts - 1))
    experts = np.argsort(noise, axis=-1)[:, :, : shape.routing.top_k]
    weights = rng.random(experts.shape, np.float32) + 0.1
    weights /= weights.sum(axis=-1, keepdims=True)
    return ExpertChoice(jnp.asarray(experts, jnp.int32), jnp.asarray(weights))


def experts_by(shape: ExpertShape, name: str) -> Run:
    """The experts of `shape` by one of the operation's implementations, or one of `GROUPED`."""
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
    """The router of `shape` by the named implementation."""
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
    """Sorted rows and two grouped products: what one would write without a kernel."""
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
    """Calls one after the other, each with `x` plus what the one before it made."""

    # A function of its own, so that the kernels are traced and lowered once, not once for each copy.
    @jax.jit
    def step(last: Array, choice: ExpertChoice) -> Array:
        return run(layer, x + last, choice)

    return jax.lax.scan(lambda y, own: (step(y, own), None), jnp.zeros_like(x), choices, unroll=UNROLL)[0]


def chain_choices(
    run: Callable[[Array], ExpertChoice], logits: Float32[Array, "L T E"]
) -> tuple[Float32[Array, ""], Int32[Array, "L T K"]]:
    """Choices one after the other: the logits of each wait for the weights of the one before it."""

    @jax.jit
    def step(last: Array, own: Array) -> tuple[Array, Array]:
        choice = run(own + last)
        return 1e-9 * choice.weights[0, 0], choice.experts

    return jax.lax.scan(step, jnp.float32(0), logits, unroll=UNROLL)


def touched(choices: ExpertChoice) -> float:
    """Experts that a call reads, on average."""
    return float(np.mean([np.unique(own).size for own in np.asarray(choices.experts)]))


def expert_work(shape: ExpertShape, tokens: int, experts: float, itemsize: int) -> Work:
    """What a call cannot do without: it reads so many experts' weights and x, and writes the result."""
    weights = 3 * shape.size * shape.features + (2 * shape.features + shape.size) * shape.biases
    moved = itemsize * (experts * weights + 2 * tokens * shape.size)
    return Work(round(moved), 6 * tokens * shape.routing.top_k * shape.size * shape.features)
