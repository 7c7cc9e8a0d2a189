"""How long a layer's attention takes, and how long it must take.

A layer is timed in a chain of layers on different pages, so many that no cache of the device holds them: in a
model the weights pass between two layers' keys and values.

Shapes: B sequences, S committed tokens, N block rows, H query heads, G key/value heads, E head size.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.common.floors import Work
from bench.common.programs import LayerTime, time_together
from bench.common.timing import on_gpu
from bench.kernel.cases import (
    UNROLL,
    TreeMasks,
    attend_by,
    chain,
    layer_call,
    layer_tables,
    random_block,
    random_pool,
)
from pallas_kernels.tree_attention import PagedPrefix
from pallas_kernels.tree_attention.shapes import AttentionShape

# The keys and values of a chain: more than twice the second-level cache of any GPU so far. Where time means
# nothing, as on a CPU, little will do.
GPU_BYTES, OTHER_BYTES = 128 << 20, 1 << 20
# The names of the kernels that count, by implementation; of others, whatever runs counts.
KERNELS = {"pallas_triton": "tree_attention"}


class AttentionCase(NamedTuple):
    """A call to be timed: B sequences of S committed tokens, and their blocks."""

    shape: AttentionShape
    rows: int
    prefix: int
    batch: int
    dtype: str

    @property
    def block(self) -> TreeMasks:
        """Trees without padding, the same for all implementations."""
        return random_block(np.random.default_rng(self.rows), self.rows, [0] * self.batch)

    @property
    def pages(self) -> int:
        """T."""
        return -(-self.prefix // self.shape.page)


def work_of(case: AttentionCase) -> Work:
    """What a layer cannot do without.

    It reads the keys and values that any row sees, and q, and writes the output; it multiplies each row with
    the keys that it sees, and their weights with the values. A window at W hides what is W tokens away.
    """
    shape, (seen, depths) = case.shape, case.block
    window = case.prefix + case.rows + 1 if shape.window is None else shape.window
    reach = np.clip(window - 1 - depths, 0, case.prefix)
    near = depths[:, None, :] > depths[:, :, None] - window
    keys = int(reach.max(axis=1).sum()) + case.batch * case.rows
    pairs = int(reach.sum()) + int((seen & near).sum())
    queries = case.batch * case.rows * shape.heads * shape.head_size
    row = shape.kv_heads * shape.head_size
    return Work(
        jnp.dtype(case.dtype).itemsize * 2 * (keys * row + queries), 4 * pairs * shape.heads * shape.head_size
    )


def num_layers(case: AttentionCase, implementation: str) -> int:
    """Layers of a chain, all on different pages as far as the implementation reads them."""
    row = 2 * jnp.dtype(case.dtype).itemsize * case.shape.kv_heads * case.shape.head_size
    bytes_read = case.batch * pages_read(case, implementation) * case.shape.page * row
    least = GPU_BYTES if on_gpu() else OTHER_BYTES
    return UNROLL * max(1, -(-least // (UNROLL * bytes_read)))


def pages_read(case: AttentionCase, implementation: str) -> int:
    """Pages of a sequence that a layer reads: the reference reads all, a kernel those in its window."""
    if case.shape.window is None or implementation == "xla":
        return case.pages
    return min(case.pages, -(-case.shape.window // case.shape.page) + 1)


def time_shape(
    cases: Sequence[AttentionCase], implementations: Sequence[str], repeats: int
) -> dict[tuple[AttentionCase, str], LayerTime]:
    """Times all cases of one shape by each implementation.

    Args:
        cases: Of one shape.
        implementations: Their names.
        repeats: Bursts by the host's clock, interleaved.
    """
    keys = [(case, name) for case in cases for name in implementations]
    jobs = [
        (partial(chain, attend_by(case.shape, name)), arguments)
        for case, name, arguments in _inputs(cases, implementations)
    ]
    layers = [num_layers(case, name) for case, name in keys]
    counted = [KERNELS.get(name) for _, name in keys]
    times = time_together(jobs, layers, counted, repeats, f"time {cases[0].shape.name}")
    return dict(zip(keys, times, strict=True))


def _inputs(
    cases: Sequence[AttentionCase], implementations: Sequence[str]
) -> Iterator[tuple[AttentionCase, str, tuple[Any, ...]]]:
    """For every case and implementation a call and the tables of its layers; cases share their pools."""
    pools: dict[int, tuple[jax.Array, jax.Array]] = {}
    for case in cases:
        layers = {name: num_layers(case, name) for name in implementations}
        steps = {name: pages_read(case, name) for name in implementations}
        num_pages = max(case.pages, *(case.batch * layers[name] * steps[name] for name in implementations))
        if case.prefix not in pools:
            pools[case.prefix] = random_pool(case.shape, num_pages, jnp.dtype(case.dtype))
        k_pages, v_pages = pools[case.prefix]
        lengths = jnp.full(case.batch, case.prefix, jnp.int32)
        for name in implementations:
            tables = layer_tables(num_pages, layers[name], case.batch, case.pages, steps[name])
            prefix = PagedPrefix(k_pages, v_pages, tables[0], lengths)
            call = layer_call(np.random.default_rng(0), case.shape, case.block, prefix, jnp.dtype(case.dtype))
            yield case, name, (call, tables)
