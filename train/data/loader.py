"""Batches of windows, shuffled again in every epoch."""

from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from train.data.windows import Window

# Reader threads, and the default number of batches that they read ahead.
THREADS, AHEAD = 4, 8


def batches(
    windows: grain.sources.RandomAccessDataSource[Window],
    batch: int,
    seed: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    ahead: int = AHEAD,
) -> "grain.DatasetIterator[Window]":
    """Endless batches. An epoch uses every window once, in an order that depends on the seed alone.

    The windows of all epochs form one sequence, cut into global batches. A process takes its own rows of
    each, so the stacked parts of all processes are the batch of a single process. ``get_state()`` gives the
    position, which fits into JSON, and ``set_state()`` restores it. ``close()`` ends the reading threads.

    Args:
        batch: Windows per batch of this process.
        seed: Seed of the order, below 2**32.
        ahead: Batches to read ahead; does not affect their contents.
    """
    local = slice(process_index * batch, (process_index + 1) * batch)

    def read(indices: Int[np.ndarray, "G"]) -> Window:
        rows = [windows[int(index)] for index in indices[local]]
        batch: Any = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return batch

    # Indices are shuffled and batched before windows are read, so a process reads only its own rows.
    order = grain.MapDataset.range(len(windows)).shuffle(seed=seed).repeat()
    # The sequence is endless, so there is no remainder.
    dataset = order.batch(batch * process_count, drop_remainder=True).map(read)
    options = grain.ReadOptions(num_threads=min(THREADS, ahead), prefetch_buffer_size=ahead)
    return iter(dataset.to_iter_dataset(options))
