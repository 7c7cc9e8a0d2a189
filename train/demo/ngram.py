"""An interpolated Kneser-Ney n-gram model, the baseline of the target, as sorted arrays of packed keys.

Source: Kneser and Ney 1995, in the interpolated form with one discount per order (Chen and Goodman 1999).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Order(NamedTuple):
    """Counts of one order.

    Attributes:
        grams: Sorted keys of the n-grams: their tokens as digits in base V.
        counts: How often each occurs; below the highest order, how many different tokens precede it.
        contexts: Sorted keys of the (n-1)-grams that begin them.
        totals: Sum of the counts in each context.
        kinds: Number of different tokens in each context.
        discount: Subtracted from every count.
    """

    grams: Int[np.ndarray, "n"]
    counts: Int[np.ndarray, "n"]
    contexts: Int[np.ndarray, "c"]
    totals: Int[np.ndarray, "c"]
    kinds: Int[np.ndarray, "c"]
    discount: float


class NGram:
    """An n-gram model over a vocabulary of V ids."""

    def __init__(self, stream: Int[np.ndarray, "S"], *, order: int, vocab_size: int):
        """Counts a stream.

        Raises:
            ValueError: Keys of this order and vocabulary do not fit 63 bits.
        """
        if vocab_size**order >= 2**63:
            raise ValueError(f"{order}-grams over {vocab_size} ids do not fit 63 bits")
        self.vocab_size = vocab_size
        grams, counts = np.unique(_keys(stream, order, vocab_size), return_counts=True)
        self.orders = [_order(grams, counts, vocab_size)]
        for n in range(order - 1, 0, -1):
            # Without its first token an n-gram is the key's remainder.
            grams, counts = np.unique(grams % vocab_size**n, return_counts=True)
            self.orders.insert(0, _order(grams, counts, vocab_size))

    def bits(self, stream: Int[np.ndarray, "S"]) -> Float[np.ndarray, "S"]:
        """Bits of every token given the tokens before it; the first ones have shorter contexts."""
        probability = np.full(len(stream), 1 / self.vocab_size)
        for n, order in enumerate(self.orders, 1):
            keys = _keys(stream, n, self.vocab_size)
            counts, _ = _look_up(order.grams, keys, order.counts)
            totals, known = _look_up(order.contexts, keys // self.vocab_size, order.totals)
            kinds, _ = _look_up(order.contexts, keys // self.vocab_size, order.kinds)
            lower = probability[n - 1 :]
            discounted = np.maximum(counts - order.discount, 0) + order.discount * kinds * lower
            probability[n - 1 :] = np.where(known, discounted / np.maximum(totals, 1), lower)
        return -np.log2(probability)


def _order(grams: np.ndarray, counts: np.ndarray, vocab_size: int) -> Order:
    contexts, begin = np.unique(grams // vocab_size, return_index=True)
    ones, twos = (np.count_nonzero(counts == c) for c in (1, 2))
    discount = ones / (ones + 2 * twos) if ones and twos else 0.5
    kinds = np.diff(np.append(begin, len(grams)))
    return Order(grams, counts, contexts, np.add.reduceat(counts, begin), kinds, discount)


def _keys(stream: np.ndarray, n: int, vocab_size: int) -> Int[np.ndarray, "grams"]:
    count = max(len(stream) - n + 1, 0)
    keys = np.zeros(count, np.int64)
    for i in range(n):
        keys = keys * vocab_size + stream[i : i + count]
    return keys


def _look_up(keys: np.ndarray, queries: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    place = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    found = keys[place] == queries
    return np.where(found, values[place], 0), found
