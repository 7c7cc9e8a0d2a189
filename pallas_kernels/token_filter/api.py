"""The public operation: it checks its arguments and chooses an implementation.

Shapes: B slots, N rows per slot, V vocabulary. If the vocabulary is sharded over devices (see `shards`), V is
a device's shard: all shards have the same size, with padding of -inf.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.checks import refuse, wrong_arrays
from pallas_kernels.dispatch import Operation
from pallas_kernels.token_filter import pallas_triton, reference

OPERATION = Operation.of(
    "least_kept", reference.least_kept, pallas_triton.least_kept, pallas_triton.unsupported
)
implementations = OPERATION.implementations


def least_kept(
    logits: Float[Array, "B N V"],
    temperature: Float32[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float32[Array, "B"],
    min_p: Float32[Array, "B"],
    *,
    implementation: str | None = None,
) -> Float32[Array, "B N"]:
    """The threshold of each row below which top-k, then top-p, then min-p drop logits.

    Tokens with the same logit as the last one kept are kept too, and the likeliest token is always kept.
    Top-p sums the renormalised probabilities of the tokens that top-k keeps; min-p compares with the
    likeliest token. Division by a temperature keeps the order, so the threshold applies to the undivided
    logits.

    Args:
        logits: of any floating type.
        temperature: 0 is greedy and filters nothing.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        implementation: one of `implementations()`; None picks the best for the case.

    Returns:
        Thresholds; -inf keeps all tokens. Sums are in float32, so rounding decides about a token at the edge
        of top-p.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or
            there is no such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    arrays = logits, temperature, top_k, top_p, min_p
    if logits.ndim != 3 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"least_kept: logits must be floating [B, N, V], got {logits.dtype} {logits.shape}")
    slots = logits.shape[:1]
    wrong = wrong_arrays(
        ("temperature", temperature, slots, jnp.float32),
        ("top_k", top_k, slots, jnp.integer),
        ("top_p", top_p, slots, jnp.float32),
        ("min_p", min_p, slots, jnp.float32),
    )
    refuse("least_kept", wrong)
    return OPERATION.choose(implementation, *arrays)(*arrays)
