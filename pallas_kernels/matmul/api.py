"""The operation as a caller sees it: checks and the choice of an implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.matmul import reference
from pallas_kernels.quantized import FP8, Quantized, scale_shape

OPERATION = Operation("matmul", {"xla": Implementation(reference.matmul)})
implementations = OPERATION.implementations


def matmul(
    spec: str,
    x: Float[Array, "*rows"],
    w: Quantized,
    *,
    wide: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*out"]:
    """The product of rows and quantised weights; rows are never quantised.

    With W the weights as `Quantized.widened` gives them in x's dtype, it is ``einsum(spec, x, W)``. So in
    float32 the weights are value times scale in float32, and the product has full precision; in bfloat16 each
    weight is rounded once. Derivatives are those of x alone.

    Args:
        spec: as of `jnp.einsum`, such as ``bnm,mgre->bngre``; x ends with the axes that are summed over.
        x: of float32, bfloat16 or float16.
        w: the weights.
        wide: whether the result is in float32, not in x's dtype.
        implementation: one of `implementations()`; None picks the best for the case.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or there is no
            such implementation.
    """
    wrong = wrong_arrays(
        ("x", x, x.shape, FLOATS),
        ("w.values", w.values, w.shape, FP8),
        ("w.scales", w.scales, scale_shape(w.shape, w.block), jnp.floating),
    )
    refuse("matmul", wrong)
    return OPERATION.choose(implementation, x, w)(x, w, spec=spec, wide=wide)
