"""The search for the kernel's best tiles: the candidates and their order.

Shapes: N block rows, H query heads, G key/value heads, E head size.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp

from bench.common.tuned import Entry
from pallas_kernels.tree_attention.config import Config
from pallas_kernels.tree_attention.shapes import AttentionShape

#: The score of each configuration: seconds over seconds at the floor, summed over a task's cases.
Score = Callable[[Sequence[Config]], list[float]]

ROWS_AND_KEYS = (16, 32, 64, 128)
WARPS = (2, 4, 8)
# A step loads its page number first: three stages prefetch keys and values for one step, five for two. The
# first pass uses the first of the coarse numbers of stages with which a tile runs.
STAGES, COARSE_STAGES = (1, 3, 5), (3, 1)
# Programs per multiprocessor.
PROGRAMS, COARSE_PROGRAMS = (0.5, 1, 2, 3, 4), (1, 4)
# The number of tiles in the finer search, and the slowdown against the best above which a tile is dropped.
BEST, HOPELESS = 4, 2.0
# Configurations that are compiled together.
CHUNK = 32
# At least one 16 x 8 product of the tensor cores per warp and step.
LEAST_SCORES = 128
# Accumulators per thread, which has 255 registers.
MOST_ACCUMULATORS = 128
# Shared memory per program is 163 KB on an A100 and 227 KB on an H100; larger configurations are skipped.
MOST_SHARED_BYTES = 224 << 10
# Every row block reads all keys: more row blocks would read the same keys too often.
MOST_ROW_BLOCKS = 16


class OutOfTime(Exception):
    """The search has reached its time limit."""


class Task(NamedTuple):
    """An entry of the table: the calls that share a configuration.

    Attributes:
        dtype: bfloat16 (for all 16-bit floats) or float32.
        head_size: E.
        rows: Query rows per key/value head, N * H / G.
        calls: The shapes with this number of rows, and their N.
    """

    dtype: str
    head_size: int
    rows: int
    calls: tuple[tuple[AttentionShape, int], ...]

    @property
    def key(self) -> Entry:
        """What the table's entry has beside its configuration."""
        return {"dtype": self.dtype, "head_size": self.head_size, "rows": self.rows}

    def __str__(self) -> str:
        return f"{self.dtype}, head size {self.head_size}, {self.rows} rows"


def tasks_of(
    shapes: Iterable[AttentionShape], dtypes: Sequence[str], rows: Sequence[int] | None
) -> list[Task]:
    """A task for each kind of call; ``rows`` replaces the shapes' numbers of rows."""
    calls: dict[tuple[str, int, int], list[tuple[AttentionShape, int]]] = {}
    for shape, dtype in product(shapes, dtypes):
        for count in rows or shape.rows:
            folded = count * shape.heads // shape.kv_heads
            calls.setdefault((dtype, shape.head_size, folded), []).append((shape, count))
    order = sorted(calls, key=lambda key: (dtypes.index(key[0]), *key[1:]))
    return [Task(*key, tuple(calls[key])) for key in order]


def makes_sense(config: Config, task: Task) -> bool:
    """Whether a configuration is worth trying: it fits, no tile is mostly padding, and no warp is idle."""
    threads = 32 * config.num_warps
    row = task.head_size * jnp.dtype(task.dtype).itemsize
    ahead = (config.num_stages - 1) // 2
    shared = row * (config.block_rows + 2 * (ahead + 1) * config.block_keys)
    most_rows = max(16, 1 << (task.rows - 1).bit_length())
    # At most that many row blocks, unless registers limit the tile.
    most_rows_of_registers = MOST_ACCUMULATORS * 32 * max(WARPS) // task.head_size
    least_rows = min(task.rows // MOST_ROW_BLOCKS, max(ROWS_AND_KEYS), most_rows_of_registers)
    return (
        least_rows <= config.block_rows <= most_rows
        # A step reads one page.
        and config.block_keys <= min(shape.page for shape, _ in task.calls)
        and config.block_rows * task.head_size <= MOST_ACCUMULATORS * threads
        and config.block_rows * config.block_keys >= LEAST_SCORES * config.num_warps
        and shared <= MOST_SHARED_BYTES
    )


def different(configs: Iterable[Config], task: Task, seen: set[Any]) -> Iterator[Config]:
    """The configurations whose launches differ from all earlier ones, which are added to ``seen``.

    If the rows alone make enough programs, the number of programs has no influence on the launch.
    """
    for config in configs:
        tiles = [-(-task.rows // config.block_rows) * shape.kv_heads for shape, _ in task.calls]
        splits = tuple(max(1, config.programs // count) for count in tiles)
        key = replace(config, programs=1), splits
        if key not in seen:
            seen.add(key)
            yield config


def search(
    task: Task, score: Score, multiprocessors: int, deadline: float = float("inf")
) -> list[tuple[float, Config]]:
    """Searches a task's configurations; returns all that ran, the best first.

    The first pass times all tiles with one program per multiprocessor, prefetching one step if the tile runs
    with that. The second pass times tiles within `HOPELESS` of the best with four programs. Then the best
    tiles are timed with all numbers of stages and of programs.

    Args:
        score: Scores configurations, a failing one with infinity.
        multiprocessors: The device's number of multiprocessors.
        deadline: The time limit on the clock of `time.monotonic()`.

    Raises:
        OutOfTime: The deadline has passed before the end of the search.
    """
    scores: dict[Config, float] = {}
    seen: set[Any] = set()

    def try_all(configs: Iterable[Config]) -> None:
        chosen = [c for c in different(configs, task, seen) if makes_sense(c, task)]
        for i in range(0, len(chosen), CHUNK):
            if time.monotonic() > deadline:
                raise OutOfTime
            chunk = chosen[i : i + CHUNK]
            scores.update(zip(chunk, score(chunk), strict=True))

    def ranking() -> list[Config]:
        return sorted((c for c in scores if scores[c] < float("inf")), key=scores.__getitem__)

    def best() -> dict[tuple[int, int, int], Config]:
        """The best configuration of each tile, the best tile first."""
        found: dict[tuple[int, int, int], Config] = {}
        for c in ranking():
            found.setdefault((c.block_rows, c.block_keys, c.num_warps), c)
        return found

    def leaders() -> list[Config]:
        return list(best().values())[:BEST]

    few, many = (round(factor * multiprocessors) for factor in COARSE_PROGRAMS)
    tiles = list(product(ROWS_AND_KEYS, ROWS_AND_KEYS, WARPS))
    for stages in COARSE_STAGES:
        done = best()
        try_all(Config(*tile, stages, few) for tile in tiles if tile not in done)
    ran = ranking()
    try_all(replace(c, programs=many) for c in ran if scores[c] <= HOPELESS * scores[ran[0]])
    try_all(replace(c, num_stages=stages) for c in leaders() for stages in STAGES)
    numbers = [max(1, round(factor * multiprocessors)) for factor in PROGRAMS]
    try_all(replace(c, programs=number) for c in leaders() for number in numbers)
    return [(scores[config], config) for config in ranking()]
