"""The operation as a caller sees it: checks and the choice of an implementation.

Unlike other kernels, this one is not taken wherever it runs: XLA's own product is as good or better at many
shapes. So by default the kernel is taken where it was measured to be faster, on this kind of device at these
sizes (`config.is_faster`), and on Hopper GPUs for weights in quantised blocks, which XLA widens first.
"""

from jaxtyping import Array, Float

from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.differentiable import differentiable
from pallas_kernels.dispatch import Operation, compute_capability, device_kind, gpu_problem
from pallas_kernels.matmul import pallas_triton, reference
from pallas_kernels.matmul.config import is_faster
from pallas_kernels.weights import Narrow, expected_weights

_HOPPER = (9, 0)
#: On an H200 the kernel was faster at all 24 products of quantised blocks that were measured, 1.03 to 3.0
#: times with the default configuration; 128 is the most rows of them.
_MOST_QUANTISED_ROWS = 128


def _unsupported(x: Array, w: Array | Narrow, spec: str) -> str | None:
    """Why the Triton kernel cannot do a call."""
    problem = pallas_triton.problem_of(spec, x, w)
    return problem if isinstance(problem, str) else None


OPERATION = Operation.of(
    "matmul", reference.matmul, differentiable(pallas_triton.matmul, reference.matmul), _unsupported
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
    """The product of rows and weights, which may be quantised; rows never are.

    With W the weights, as `widened` gives them in x's dtype if they are quantised, it is
    ``einsum(spec, x, W)``. So in float32 quantised weights are value times scale in float32, and any product
    has full precision; in bfloat16 each of them is rounded once. Quantised weights have no derivatives.

    Args:
        spec: as of `jnp.einsum`, such as ``bnm,mgre->bngre``; x ends with the axes that are summed over.
        x: of float32, bfloat16 or float16.
        w: the weights, in x's dtype or quantised.
        wide: whether the result is in float32, not in x's dtype.
        implementation: one of `implementations()`; None chooses as this module says.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or there is no
            such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    refuse("matmul", wrong_arrays(("x", x, x.shape, FLOATS), *expected_weights("w", w, w.shape, x.dtype)))
    if implementation is None:
        implementation = "pallas_triton" if _is_faster(spec, x, w) else "xla"
    return OPERATION.choose(implementation, x, w, spec)(x, w, spec=spec, wide=wide)


def _is_faster(spec: str, x: Array, w: Array | Narrow) -> bool:
    """Whether the kernel runs here and is taken to be faster."""
    if gpu_problem() is not None or x.dtype.itemsize != 2:
        return False
    problem = pallas_triton.problem_of(spec, x, w)
    # Scales of single columns have not been measured, and measurements do not tell them from blocks.
    if isinstance(problem, str) or problem.scaled_by_column:
        return False
    measured = is_faster(device_kind(), problem.stored, *problem.sizes)
    if measured is not None:
        return measured
    few = problem.rows <= _MOST_QUANTISED_ROWS
    return problem.stored != "plain" and few and compute_capability() == _HOPPER
