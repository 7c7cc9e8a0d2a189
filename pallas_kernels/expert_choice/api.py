"""The public operation: it checks its arguments and chooses an implementation.

Shapes: T tokens, E experts, K experts of a token.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.checks import refuse, wrong_arrays
from pallas_kernels.dispatch import Operation
from pallas_kernels.expert_choice import pallas_triton, reference
from pallas_kernels.expert_choice.reference import ExpertChoice, RouterRule

OPERATION = Operation.of(
    "expert_choice", reference.expert_choice, pallas_triton.expert_choice, pallas_triton.unsupported
)
implementations = OPERATION.implementations


def expert_choice(
    logits: Float32[Array, "T E"],
    *,
    routing: RouterRule,
    bias: Float[Array, "E"] | None = None,
    expert_scale: Float[Array, "E"] | None = None,
    implementation: str | None = None,
) -> ExpertChoice:
    """The experts of every token, the best first, and the weights of their outputs.

    See `RouterRule` for the rules. Among equal scores the lower index comes first, as in `jax.lax.top_k`.
    Logits must not be NaN; rows with NaN get distinct, but unspecified experts. All is computed in float32.

    Args:
        logits: the router's logits.
        routing: the rule.
        bias: of any floating dtype; added to sigmoid scores for the choice, but not for the weights.
        expert_scale: of any floating dtype; multiplies the final weight of each expert.
        implementation: one of `implementations()`; None picks the best for the case.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), more experts are
            wanted than there are, a bias comes with softmax scores, or there is no such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"expert_choice: logits must be float32 [T, E], got {logits.dtype} {logits.shape}")
    num_experts = logits.shape[1]
    wrong = wrong_arrays(
        ("bias", bias, (num_experts,), jnp.floating),
        ("expert_scale", expert_scale, (num_experts,), jnp.floating),
    )
    if routing.top_k > num_experts:
        wrong.append(f"{routing.top_k} experts are wanted of {num_experts}")
    if bias is not None and routing.scores != "sigmoid":
        wrong.append(f"a bias is for sigmoid scores, not for {routing.scores}")
    if logits.size == 0:
        wrong.append(f"logits are {logits.shape}: no elements")
    refuse("expert_choice", wrong)
    arrays = logits, bias, expert_scale
    return OPERATION.choose(implementation, *arrays)(*arrays, routing=routing)
