"""Sets of tokens, packed: bit t % 32 of word t // 32 says whether token t is one of them. Imports no JAX."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import UInt32

#: What a row gives that has no choice, as all its logits are NaN or -inf. -1 ends lists of tokens.
NO_CHOICE = -2


def packed(tokens: Iterable[int], vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """A set of tokens of a vocabulary, as an array of the host."""
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits
