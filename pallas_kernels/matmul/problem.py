"""Products as kernels see them: a matrix of rows times a matrix of columns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Array

from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.quantized import Quantized
from pallas_kernels.weight_tiles import stored_of, unsupported
from pallas_kernels.weights import Narrow

#: The most rows of a call: with more, products compute longer than they read.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class Problem:
    """A product as a matrix of rows times a matrix of columns.

    Attributes:
        rows: M.
        depth: Sizes of the axes that are summed over.
        columns: Sizes of the weights' other axes.
        stored: How the weights are stored, see `stored_of`.
        depth_block: Of FP8, how many weights share a scale along each of the axes that are summed over.
        columns_block: Likewise along each of the others.
    """

    rows: int
    depth: tuple[int, ...]
    columns: tuple[int, ...]
    stored: str
    depth_block: tuple[int, ...]
    columns_block: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K and N."""
        return self.rows, math.prod(self.depth), math.prod(self.columns)

    def scales_matrix(self, scales: Array) -> Array:
        """Scales of FP8 as a matrix, whose indices are `cell_of` of terms and of columns."""
        return scales.reshape(math.prod(scales.shape[: len(self.depth)]), -1)

    @property
    def scaled_by_column(self) -> bool:
        """Whether the weights are FP8 and no two columns share a scale."""
        return self.stored in ("fp8", "fp8_rows") and math.prod(self.columns_block) == 1

    @property
    def depth_run(self) -> int:
        """So many terms from any multiple of it on have the same scales; 0 is all terms."""
        return _run(self.depth, self.depth_block)

    @property
    def columns_run(self) -> int:
        """Likewise of columns."""
        return _run(self.columns, self.columns_block)


def _run(sizes: Sequence[int], blocks: Sequence[int]) -> int:
    """So many elements of some axes from any multiple of it on lie in one block; 0 is all elements."""
    run = 1
    for i in reversed(range(len(sizes))):
        size, block = sizes[i], blocks[i]
        if block < size:
            return run * (block if math.prod(sizes[:i]) == 1 else math.gcd(block, size))
        run *= size
    return 0


def problem_of(spec: str, x: Array, w: Array | Narrow) -> Problem | str:
    """What a call of `api.matmul` computes, or why the kernel cannot."""
    found = form_of(spec, x, w)
    if isinstance(found, str):
        return found
    rows, terms, columns = found.sizes
    # Of quantised rows XLA would multiply one group after the other.
    if rows == 0 or (rows > MOST_ROWS and found.stored != "fp8_rows"):
        return f"{rows} rows: it is for 1 to {MOST_ROWS}"
    return unsupported(w, found.depth_run or terms, terms, columns) or found


def form_of(spec: str, x: Array, w: Array | Narrow) -> Problem | str:
    """A call of `api.matmul` as a product of matrices, or why it is none."""
    (x_axes, w_axes), out = spec.split("->")[0].split(","), spec.split("->")[1]
    count = sum(name not in out for name in w_axes)
    summed, columns = w_axes[:count], w_axes[count:]
    stored = stored_of(w)
    if isinstance(w, Mxfp4) and (w.axis, count) != (0, 1):
        return (
            "blocks do not lie along the first axis of the weights, or it is not the one that is summed over"
        )
    if x_axes != f"{out.removesuffix(columns)}{summed}" or not out.endswith(columns) or not columns:
        return f"{spec} is not of the form 'rows terms, terms columns -> rows columns'"
    block = w.block if isinstance(w, Quantized) else w.shape
    rows = math.prod(x.shape[: len(x_axes) - count])
    return Problem(rows, w.shape[:count], w.shape[count:], stored, block[:count], block[count:])
