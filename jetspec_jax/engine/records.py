"""What the host learns of a dispatch, as plain values that another process could send."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32


class DispatchRecord(NamedTuple):
    """What the rounds of one dispatch did.

    Shapes: R rounds, B slots, D1 tokens that a round can commit, K buckets of drafted trees up to this one.

    Attributes:
        bucket: Nodes of a tree, root included; 1 is plain decoding.
        seconds: How long the dispatch took; None if it was not timed.
        tokens: Committed tokens, -1 beyond.
        tree_sizes: Nodes of the trees; 0 where a slot did not decode.
        expected: Drafted tokens that the head expected trees of each bucket to have accepted; None for
            plain rounds.
        accepted: Drafted tokens that they would have had accepted; None for plain rounds.
    """

    bucket: int
    seconds: float | None
    tokens: Int32[np.ndarray, "R B D1"]
    tree_sizes: Int32[np.ndarray, "R B"]
    expected: Float32[np.ndarray, "R B K"] | None = None
    accepted: Float32[np.ndarray, "R B K"] | None = None
