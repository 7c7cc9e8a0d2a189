"""The choice of experts on Pallas's Triton backend: one launch, a program for each token.

A token's scores stay in the registers of one warp, where K rounds of two reductions find the best, the next
best and so on. In a round an integer that orders as the scores do is reduced, not the score: the hardware
reduces integers in one instruction, and an expert that is taken gets an integer below all scores.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.expert_choice.reference import TINY, ExpertChoice, RouterRule

_MOST_EXPERTS = 4096
_EXPERTS_PER_WARP = 512
_TAKEN = np.int32(-(2**31))  # below every score's order
_NOWHERE = np.int32(2**31 - 1)  # above every expert


def unsupported(logits: Array, *_: object) -> str | None:
    """Why the kernel cannot run such a call on any GPU; None if it can."""
    if logits.shape[1] > _MOST_EXPERTS:
        return f"{logits.shape[1]} experts are more than {_MOST_EXPERTS}"
    return None


@functools.partial(jax.jit, static_argnames=("routing", "interpret"))
def expert_choice(
    logits: Float32[Array, "T E"],
    bias: Float[Array, "E"] | None,
    expert_scale: Float[Array, "E"] | None,
    *,
    routing: RouterRule,
    interpret: bool = False,
) -> ExpertChoice:
    """See `api.expert_choice`. `interpret` runs without a GPU."""
    tokens, num_experts = logits.shape
    lanes = pl.next_power_of_2(num_experts)
    chosen = (tokens, routing.top_k)
    choose: Any = pl.pallas_call(
        functools.partial(_choose, routing),
        out_shape=(jax.ShapeDtypeStruct(chosen, jnp.int32), jax.ShapeDtypeStruct(chosen, jnp.float32)),
        grid=(tokens,),
        compiler_params=plgpu.CompilerParams(num_warps=max(1, lanes // _EXPERTS_PER_WARP), num_stages=1),
        interpret=interpret,
        name="expert_choice",
    )
    return ExpertChoice(*choose(logits, bias, expert_scale))


def _choose(
    routing: RouterRule, logits_ref: Any, bias_ref: Any, scale_ref: Any, experts_ref: Any, weights_ref: Any
) -> None:
    """One program: one token."""
    token, num_experts = pl.program_id(0), logits_ref.shape[1]
    expert = jnp.arange(pl.next_power_of_2(num_experts), dtype=jnp.int32)
    there = expert < num_experts
    logits = plgpu.load(logits_ref.at[token, expert], mask=there, other=-jnp.inf)
    order = logits
    if routing.scores == "softmax":
        scores = jnp.exp(logits - jnp.max(logits))  # times a constant, which a sum of them will divide by
    else:
        order = scores = jax.nn.sigmoid(logits)
        if bias_ref is not None:
            order = scores + plgpu.load(bias_ref.at[expert], mask=there, other=0.0).astype(jnp.float32)
    total = jnp.sum(scores)

    slot = jnp.arange(pl.next_power_of_2(routing.top_k), dtype=jnp.int32)

    def take(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        orders, experts, weights = carry
        best = jnp.min(jnp.where(orders == jnp.max(orders), expert, _NOWHERE))
        here = expert == best
        weight = jnp.sum(jnp.where(here, scores, 0.0))
        return (
            jnp.where(here, _TAKEN, orders),
            jnp.where(slot == i, best, experts),
            jnp.where(slot == i, weight, weights),
        )

    nothing = jnp.zeros_like(slot), jnp.zeros(slot.shape, jnp.float32)
    start = jnp.where(there, _order(order), _TAKEN), *nothing
    _, experts, weights = jax.lax.fori_loop(0, routing.top_k, take, start)
    if routing.renormalise:
        weights /= jnp.sum(weights) + TINY
    elif routing.scores == "softmax":
        weights /= total
    weights *= routing.scale
    wanted = slot < routing.top_k
    if scale_ref is not None:
        weights *= plgpu.load(scale_ref.at[experts], mask=wanted, other=0.0).astype(jnp.float32)
    plgpu.store(experts_ref.at[token, slot], experts, mask=wanted)
    plgpu.store(weights_ref.at[token, slot], weights, mask=wanted)


def _order(scores: Array) -> Array:
    """Integers that compare as the scores do, above `_TAKEN`."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.maximum(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _TAKEN + 1)
