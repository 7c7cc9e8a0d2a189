"""What the scheduler tells the runner, and what it gets back: numbers and NumPy arrays, no text, no device.

Shapes: R rounds that ran, B slots, D draft depth, K buckets, T pages per slot, C tokens of a chunk.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree.routing import Routing


class Admission(NamedTuple):
    """A slot changes hands.

    Attributes:
        slot: Which.
        pages: Its block table, padded with `NO_PAGE`.
        params: How the request is sampled, with a seed, and how many tokens it gets; no text.
        stop_ids: All tokens that end it.
        budget: Most nodes of its trees, root included.
        depth: Largest depth of its trees.
        routing: What is known of it, for algorithms that look at that: two numbers.
    """

    slot: int
    pages: Int32[np.ndarray, "T"]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    budget: int
    depth: int
    routing: Routing


class Chunk(NamedTuple):
    """A part of a prompt.

    Attributes:
        slot: Whose.
        tokens: The part, padded.
        num_tokens: Tokens that are no padding.
        is_last: Whether the prompt ends here: then the first token comes back.
    """

    slot: int
    tokens: Int32[np.ndarray, "C"]
    num_tokens: int
    is_last: bool


class Batch(NamedTuple):
    """All that a runner does until the host looks again, in this order.

    Attributes:
        releases: Slots that are free from now on.
        admissions: Slots that requests get.
        chunks: Of their prompts.
        bucket: Nodes of the trees, root included; 1 is plain decoding.
        rounds: At most so many.
    """

    releases: tuple[int, ...]
    admissions: tuple[Admission, ...]
    chunks: tuple[Chunk, ...]
    bucket: int
    rounds: int


class DispatchRecord(NamedTuple):
    """What the rounds of a dispatch did.

    Attributes:
        bucket: Nodes of the trees, root included.
        seconds: How long the rounds took; None where they were not timed alone.
        tokens: Committed tokens, -1 beyond.
        tree_sizes: Nodes of each tree; 0 for a slot that did not decode.
        expected: Drafted tokens that the head expected trees of each bucket up to this one to have accepted;
            None for plain rounds.
        accepted: Those that they would have had accepted.
    """

    bucket: int
    seconds: float | None
    tokens: Int32[np.ndarray, "R B D1"]
    tree_sizes: Int32[np.ndarray, "R B"]
    expected: Float32[np.ndarray, "R B K"] | None = None
    accepted: Float32[np.ndarray, "R B K"] | None = None


class BatchRecord(NamedTuple):
    """What a batch did.

    Attributes:
        first_tokens: The first token of each prompt that ended, in the order of the chunks.
        dispatch: Its rounds.
    """

    first_tokens: tuple[int, ...]
    dispatch: DispatchRecord
