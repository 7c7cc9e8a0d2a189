"""The operation as a caller sees it: checks and the choice of an implementation."""

from jaxtyping import Array, Float

from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.matmul import reference
from pallas_kernels.weights import Narrow, expected_weights

OPERATION = Operation("matmul", {"xla": Implementation(reference.matmul)})
implementations = OPERATION.implementations


def matmul(
    spec: str,
    x: Float[Array, "*rows"],
    w: Float[Array, "*weights"] | Narrow,
    *,
    wide: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*out"]:
    """The product of rows and weights, which may be quantised; rows never are.

    With W the weights, as `widened` gives them in x's dtype if they are quantised, it is
    ``einsum(spec, x, W)``. So in float32 quantised weights are value times scale in float32, and any product
    has full precision; in bfloat16 each of them is rounded once. Quantised weights have no derivatives.

    Args:
        spec: as of `jnp.einsum`, such as ``bnm,mgre->bngre``; x ends with the axes that are summed over.
        x: of float32, bfloat16 or float16.
        w: the weights, in x's dtype or quantised.
        wide: whether the result is in float32, not in x's dtype.
        implementation: one of `implementations()`; None picks the best for the case.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or there is no
            such implementation.
    """
    refuse("matmul", wrong_arrays(("x", x, x.shape, FLOATS), *expected_weights("w", w, w.shape, x.dtype)))
    return OPERATION.choose(implementation, x, w)(x, w, spec=spec, wide=wide)
