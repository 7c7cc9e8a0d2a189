"""The operation as a caller sees it: checks and the choice of an implementation.

Shapes: B slots, N rows of each, V vocabulary.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.token_filter import pallas_triton, reference

_IMPLEMENTATIONS = {  # the preferred first
    "pallas_triton": Implementation(pallas_triton.least_kept, pallas_triton.unsupported),
    "xla": Implementation(reference.least_kept, lambda *args, **kwargs: None),
}


def implementations() -> tuple[str, ...]:
    """Names that `least_kept(implementation=...)` accepts, the preferred first."""
    return tuple(_IMPLEMENTATIONS)


def least_kept(
    logits: Float[Array, "B N V"],
    temperature: Float32[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float32[Array, "B"],
    min_p: Float32[Array, "B"],
    *,
    implementation: str | None = None,
) -> Float32[Array, "B N"]:
    """The threshold of each row below which top-k, then top-p, then min-p drop its logits.

    Tokens that tie with the last one kept are kept too, and the likeliest always is. Top-p counts the
    probabilities of what top-k kept, renormalised; min-p compares with the likeliest. Dividing by a
    temperature changes no order, so the threshold is one on the logits as they are.

    Args:
        logits: of any floating type.
        temperature: a row of a slot at 0 is greedy and filters nothing.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        implementation: one of `implementations()`; None picks the best for the case.

    Returns:
        Thresholds; -inf where nothing is dropped. With sums in float32 a token at the edge of top-p may fall
        on either side.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or
            there is no such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    arrays = logits, temperature, top_k, top_p, min_p
    if logits.ndim != 3 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"least_kept: logits must be floating [B, N, V], got {logits.dtype} {logits.shape}")
    wrong = [
        f"{name} is {array.dtype} {array.shape}, expected {dtype.__name__} {logits.shape[:1]}"
        for name, array, dtype in (
            ("temperature", temperature, jnp.float32),
            ("top_k", top_k, jnp.integer),
            ("top_p", top_p, jnp.float32),
            ("min_p", min_p, jnp.float32),
        )
        if array.shape != logits.shape[:1] or not jnp.issubdtype(array.dtype, dtype)
    ]
    if wrong:
        raise ValueError("least_kept: " + "; ".join(wrong))
    return choose("least_kept", _IMPLEMENTATIONS, implementation, *arrays)(*arrays)
