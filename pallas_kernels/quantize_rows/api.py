"""The public operation: it checks its arguments and chooses an implementation.

Shapes: R rows, K terms.
"""

from jaxtyping import Array, Float, Float8e4m3fn, Float32

from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.differentiable import differentiable
from pallas_kernels.dispatch import Operation
from pallas_kernels.quantize_rows import pallas_triton, reference

OPERATION = Operation.of(
    "quantize_rows",
    reference.quantize_rows,
    differentiable(pallas_triton.quantize_rows, reference.quantize_rows),
    pallas_triton.unsupported,
)
implementations = OPERATION.implementations


def quantize_rows(
    x: Float[Array, "R K"], group: int, *, length: int | None = None, implementation: str | None = None
) -> tuple[Float8e4m3fn[Array, "length K"], Float32[Array, "groups length"]]:
    """Rows in FP8, and a scale for each ``group`` neighbouring terms of a row; 0 is all terms.

    A group's largest magnitude becomes `LARGEST`, the others are rounded to the nearest value. The scale of
    zeros is 1. A row's values and scales depend on no other row. There are no derivatives.

    Args:
        x: in float32, bfloat16 or float16.
        group: terms that share a scale; static. The last group may have fewer.
        length: how many rows the results have; static. Those after R are undefined. None for R.
        implementation: one of `implementations()`; None picks the best for the case.

    Returns:
        (values, scales).

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (both are listed), or there is no such
            implementation.
        NotImplementedError: the named implementation does not support the case or the device; or a derivative
            is taken.
    """
    wrong = wrong_arrays(("x", x, x.shape, FLOATS))
    length = x.shape[0] if length is None else length
    if length < x.shape[0]:
        wrong.append(f"length is {length}, less than {x.shape[0]} rows")
    refuse("quantize_rows", wrong)
    return OPERATION.choose(implementation, x, group)(x, group=group, length=length)
