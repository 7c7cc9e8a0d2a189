"""The operation as a caller sees it: checks and the choice of an implementation.

Unlike other operations' kernels, these are not taken wherever they run: XLA's own product is as good or
better at many shapes. So by default a kernel is taken where it was measured to be faster, on this kind of
device at these sizes (`config.fastest`), on Hopper GPUs for weights in quantised blocks, which XLA widens
first, and wherever rows are quantised too.
"""

from jaxtyping import Array, Float

from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.differentiable import differentiable
from pallas_kernels.dispatch import Implementation, Operation, compute_capability, device_kind, gpu_problem
from pallas_kernels.matmul import pallas_mosaic, pallas_triton, reference
from pallas_kernels.matmul.config import fastest
from pallas_kernels.matmul.problem import problem_of
from pallas_kernels.weights import Narrow, expected_weights

#: Up to so many rows were measured. On an H200 XLA took 1.03 to 3.0 times as long for all 24 products of
#: quantised blocks as a slower Triton kernel than today's.
_MOST_ROWS_WIDENED = 128
#: Beyond these rows the Mosaic kernel was the faster one of quantised rows, on an H200.
_MOST_TRITON_ROWS = 16


def _unsupported(x: Array, w: Array | Narrow, spec: str) -> str | None:
    """Why the Triton kernel cannot do a call."""
    problem = problem_of(spec, x, w)
    return problem if isinstance(problem, str) else None


OPERATION = Operation(
    "matmul",
    {
        "pallas_mosaic": Implementation(
            differentiable(pallas_mosaic.matmul, reference.matmul), pallas_mosaic.unsupported, needs_gpu=True
        ),
        "pallas_triton": Implementation(
            differentiable(pallas_triton.matmul, reference.matmul), _unsupported, needs_gpu=True
        ),
        "xla": Implementation(reference.matmul),
    },
)
implementations = OPERATION.implementations


def matmul(
    spec: str,
    x: Float[Array, "*rows"],
    w: Float[Array, "*weights"] | Narrow,
    *,
    wide: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*out"]:
    """The product of rows and weights, which may be quantised.

    With W the weights, as `widened` gives them in x's dtype if they are quantised, it is
    ``einsum(spec, x, W)``. So in float32 quantised weights are value times scale in float32, and any product
    has full precision; in bfloat16 each of them is rounded once. Quantised weights have no derivatives.

    Weights in FP8 with a `Quantized.row_group` have the rows quantised too, see `quantize_rows`. Within a
    group with constant scales, products of values are summed in float32. Each sum is multiplied by both
    scales, and the results are added in float32. Quantised rows have no derivatives either.

    Args:
        spec: as of `jnp.einsum`, such as ``bnm,mgre->bngre``; x ends with the axes that are summed over, and
            the result has x's other axes, then those of w.
        x: of float32, bfloat16 or float16.
        w: the weights, in x's dtype or quantised.
        wide: whether the result is in float32, not in x's dtype.
        implementation: one of `implementations()`; None chooses as this module says.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), there is no such
            implementation, or rows are quantised and `spec` is no product of two matrices.
        NotImplementedError: the named implementation does not support the case or the device; or a derivative
            is taken through quantised rows.
    """
    refuse("matmul", wrong_arrays(("x", x, x.shape, FLOATS), *expected_weights("w", w, w.shape, x.dtype)))
    if implementation is None:
        implementation = _fastest(spec, x, w)
    return OPERATION.choose(implementation, x, w, spec)(x, w, spec=spec, wide=wide)


def _fastest(spec: str, x: Array, w: Array | Narrow) -> str:
    """The implementation that is taken to be the fastest here."""
    if gpu_problem() is not None or x.dtype.itemsize != 2:
        return "xla"
    problem = problem_of(spec, x, w)
    # Scales of single columns have not been measured, and measurements do not tell them from blocks.
    if isinstance(problem, str) or problem.scaled_by_column:
        return "xla"
    measured = fastest(device_kind(), problem.stored, *problem.sizes)
    if measured is not None and OPERATION.table[measured].unsupported(x, w, spec) is None:
        return measured
    # XLA multiplies quantised rows 10 to 36 times as slowly as the kernels.
    if problem.stored == "fp8_rows":
        few = problem.rows <= _MOST_TRITON_ROWS
        return "pallas_triton" if few or pallas_mosaic.unsupported(x, w, spec) else "pallas_mosaic"
    few = problem.rows <= _MOST_ROWS_WIDENED and compute_capability() == pallas_mosaic.HOPPER
    return "pallas_triton" if few and problem.stored != "plain" else "xla"
