"""The public operation: it checks its arguments and chooses an implementation.

Shapes: M elements of a row.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.differentiable import differentiable
from pallas_kernels.dispatch import Operation
from pallas_kernels.rms_norm import pallas_triton, reference

OPERATION = Operation.of(
    "rms_norm",
    reference.rms_norm,
    differentiable(pallas_triton.rms_norm, reference.rms_norm),
    pallas_triton.unsupported,
)
implementations = OPERATION.implementations


def rms_norm(
    x: Float[Array, "*rows M"],
    weight: Float[Array, "M"],
    *,
    eps: float,
    delta: Float[Array, "*rows M"] | None = None,
    weight_offset: float | None = None,
    weight_scale: float = 1.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows M"], Float[Array, "*rows M"]]:
    """Add `delta` to the residual stream and normalise the rows of the sum; both are returned.

        total = x + delta                                             in the dtype of x
        y = total / sqrt(mean(total^2) + eps)                         in float32
        normed = y * weight                                           in the dtype of x

    If the weight has the dtype of `x`, `y` is rounded before the multiplication, as in Qwen3's norm; with a
    wider weight the product is rounded. Most other norms round the product for any dtype of the weight. An
    offset selects this, without a wider copy of the weight:

        normed = y * (weight_scale * (weight_offset + weight))        in float32, then the dtype of x

    (The norm: Zhang and Sennrich, arXiv 1910.07467.)

    Args:
        x: rows of M elements, in float32, bfloat16 or float16.
        weight: of any floating dtype.
        eps: prevents a division by zero; static.
        delta: of the dtype of `x`; None for nothing to add.
        weight_offset: added to the stored weight, 1.0 for weights stored minus one; static. None multiplies
            in the wider of the two dtypes.
        weight_scale: a factor of the weight; static, and only with an offset.
        implementation: one of `implementations()`; None picks the best for the case.

    Returns:
        (normed, total); with no delta, `total` is `x`.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or
            there is no such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    if not x.ndim:
        raise ValueError("rms_norm: x must be [..., M], got a scalar")
    wrong = wrong_arrays(
        ("x", x, x.shape, FLOATS),
        ("weight", weight, x.shape[-1:], jnp.floating),
        ("delta", delta, x.shape, x.dtype),
    )
    if weight_offset is None and weight_scale != 1:
        wrong.append(f"weight_scale is {weight_scale} without a weight_offset, say 0.0")
    refuse("rms_norm", wrong)
    run = OPERATION.choose(implementation, x, weight, delta)
    return run(x, weight, delta, eps=eps, weight_offset=weight_offset, weight_scale=weight_scale)
