"""Times a layer's attention, and counts its least work.

A layer is timed in a chain of layers on different pages, more than fit into the device's caches: in a model
the weights are read between two layers' keys and values.

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

# The keys and values of a chain: more than twice the L2 cache of any GPU so far. On a CPU times mean little,
# and a small chain is enough.
GPU_BYTES, OTHER_BYTES = 128 << 20, 1 << 20
# The kernels that count, by implementation; for other implementations all kernels count.
KERNELS = {"pallas_triton": "tree_attention"}


class AttentionCase(NamedTuple):
    """A timed call: B sequences with S committed tokens and a block each."""

    shape: AttentionShape
    rows: int
    prefix: int
    batch: int
    dtype: str

    @property
    def block(self) -> TreeMasks:
        """Random trees without padding, the same for all implementations."""
        return random_block(np.random.default_rng(self.rows), self.rows, [0] * self.batch)

    @property
    def pages(self) -> int:
        """T."""
        return -(-self.prefix // self.shape.page)


def work_of(case: AttentionCase) -> Work:
    """The least work of a layer.

    It reads q, and the keys and values that any row attends to, and writes the output. It multiplies each row
    with its keys, and their weights with the values. A window of W hides tokens at a distance of W or more.
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
    """Layers per chain: the pages that the implementation reads exceed the device's caches."""
    row = 2 * jnp.dtype(case.dtype).itemsize * case.shape.kv_heads * case.shape.head_size
    bytes_read = case.batch * pages_read(case, implementation) * case.shape.page * row
    least = GPU_BYTES if on_gpu() else OTHER_BYTES
    return UNROLL * max(1, -(-least // (UNROLL * bytes_read)))


def pages_read(case: AttentionCase, implementation: str) -> int:
    """Pages that a layer reads per sequence: the reference reads all, a kernel those in its window."""
    if case.shape.window is None or implementation == "xla":
        return case.pages
    return min(case.pages, -(-case.shape.window // case.shape.page) + 1)


def time_shape(
    cases: Sequence[AttentionCase], implementations: Sequence[str], repeats: int
) -> dict[tuple[AttentionCase, str], LayerTime]:
    """Times all cases of one shape by each implementation; ``repeats`` bursts by the host's clock."""
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
    """A call and its layers' block tables for every case and implementation; cases share pools."""
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
