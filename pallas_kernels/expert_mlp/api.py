"""The operation as a caller sees it: checks and the choice of an implementation.

Shapes: T tokens, K experts of each, E experts, M model, I features of an expert.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.activation import Activation
from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.dispatch import Operation
from pallas_kernels.expert_mlp import pallas_triton, reference
from pallas_kernels.weights import Narrow, expected_weights


def _unsupported(_: Array, gate_up: Array | Narrow, down: Array | Narrow, *_others: object) -> str | None:
    """Why the Triton kernels cannot do a call."""
    return pallas_triton.problem_of(gate_up, down)


OPERATION = Operation.of("expert_mlp", reference.expert_mlp, pallas_triton.expert_mlp, _unsupported)
implementations = OPERATION.implementations


def expert_mlp(
    x: Float[Array, "T M"],
    gate_up: Float[Array, "E M 2 I"] | Narrow,
    down: Float[Array, "E I M"] | Narrow,
    experts: Int32[Array, "T K"],
    weights: Float32[Array, "T K"],
    *,
    activation: Activation,
    gate_up_bias: Float[Array, "E 2 I"] | None = None,
    down_bias: Float[Array, "E M"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T M"]:
    """The weighted sum of what a token's experts make of it.

    With e = experts[t, k] and, where there are biases, each added to the product that it belongs to:

        hidden[t, k] = activation(x[t] @ gate_up[e, :, 0], x[t] @ gate_up[e, :, 1])
        y[t] = sum over k of weights[t, k] * (hidden[t, k] @ down[e])

    An e outside [0, E) adds nothing, whatever its weight: so rows of padding are switched off. What no token
    names does not count, not even NaN. No token may name an expert twice.

    Products are of x's dtype, of float32 at full precision, and are summed in float32; so are activation,
    weights and the sum over k. `hidden` is rounded to x's dtype, and so is the result. Weights in FP8 with a
    `Quantized.row_group` have x or `hidden` quantised, as `matmul` does it.

    Args:
        x: of float32, bfloat16 or float16.
        gate_up: in x's dtype, or quantised with scales of each expert's own, as `matmul` takes them; the gate
            before the other half, as two halves.
        down: likewise.
        experts: of every token.
        weights: of the experts' outputs.
        activation: between the two products.
        gate_up_bias: of any floating type, or none.
        down_bias: of any floating type, or none.
        implementation: one of `implementations()`; None picks the best for the case.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or there is no
            such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    arrays = x, gate_up, down, experts, weights, gate_up_bias, down_bias
    if x.ndim != 2 or len(down.shape) != 3 or experts.ndim != 2:
        raise ValueError(
            "expert_mlp: x must be [T, M], down [E, I, M] and experts [T, K],"
            f" got {x.shape}, {down.shape}, {experts.shape}"
        )
    (tokens, size), (num_experts, features, _), top_k = x.shape, down.shape, experts.shape[1]
    wrong = wrong_arrays(
        ("x", x, x.shape, FLOATS),
        *expected_weights("gate_up", gate_up, (num_experts, size, 2, features), x.dtype),
        *expected_weights("down", down, (num_experts, features, size), x.dtype),
        ("experts", experts, (tokens, top_k), jnp.int32),
        ("weights", weights, (tokens, top_k), jnp.float32),
        ("gate_up_bias", gate_up_bias, (num_experts, 2, features), jnp.floating),
        ("down_bias", down_bias, (num_experts, size), jnp.floating),
        empty=False,
    )
    refuse("expert_mlp", wrong)
    return OPERATION.choose(implementation, *arrays)(*arrays, activation=activation)
