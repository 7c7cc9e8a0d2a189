"""Packed sets of tokens: bit t % 32 of word t // 32 is set iff token t is in the set. Imports no JAX."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import UInt32

#: The choice of a row whose logits are all NaN or -inf. (-1 pads lists of tokens.)
NO_CHOICE = -2


def packed(tokens: Iterable[int], vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """A packed set of tokens, as a NumPy array."""
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits
