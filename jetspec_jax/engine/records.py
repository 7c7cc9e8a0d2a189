"""What the scheduler tells the runner, and what it gets back: numbers and NumPy arrays, no text, no device.

Shapes: R rounds that ran, L live slots, D draft depth, K buckets, T pages per slot, P prompts of a chunk,
C tokens of each.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree.routing import Routing


class Admission(NamedTuple):
    """A slot changes hands.

    Attributes:
        slot: Which.
        pages: Its block table, padded with `NO_PAGE`.
        length: Tokens that the pages hold already: whole pages that it shares with others; 0 is none.
        anchor: The last token of the prompt, or of what a request had when it lost its slot: the root of its
            first tree.
        active: Whether it decodes at once: nothing before the anchor is left to prefill.
        params: How the request is sampled, with a seed; no text.
        remaining: Tokens that it still gets.
        stop_ids: All tokens that end it.
        budget: Most nodes of its trees, root included.
        depth: Largest depth of its trees.
        routing: What is known of it, for algorithms that look at that: two numbers.
    """

    slot: int
    pages: Int32[np.ndarray, "T"]
    length: int
    anchor: int
    active: bool
    params: SamplingParams
    remaining: int
    stop_ids: tuple[int, ...]
    budget: int
    depth: int
    routing: Routing


class Growth(NamedTuple):
    """A slot has other pages than before, from its next round on; those that hold tokens are the same.

    Attributes:
        slot: Which.
        pages: Its whole block table, padded with `NO_PAGE`.
    """

    slot: int
    pages: Int32[np.ndarray, "T"]


class Chunk(NamedTuple):
    """Parts of prompts that one forward commits.

    Attributes:
        slots: Whose; all distinct, those of unused rows too.
        tokens: A part for each, padded.
        counts: Tokens that are no padding; 0 is an unused row.
        ready: Whether the slot decodes from then on: all before its anchor is committed.
    """

    slots: Int32[np.ndarray, "P"]
    tokens: Int32[np.ndarray, "P C"]
    counts: Int32[np.ndarray, "P"]
    ready: Bool[np.ndarray, "P"]


class Batch(NamedTuple):
    """All that a runner does until the host looks again, in this order.

    Attributes:
        releases: Slots that are free from now on.
        admissions: Slots that requests get.
        growths: Slots whose pages change.
        chunks: Of prompts.
        live: Slots that decode, padded with slots that do not to a number for which rounds are compiled: all
            distinct, in rising order.
        bucket: Nodes of the trees, root included; 1 is plain decoding.
        rounds: At most so many; 0 is none, and then nobody is live.
    """

    releases: tuple[int, ...]
    admissions: tuple[Admission, ...]
    growths: tuple[Growth, ...]
    chunks: tuple[Chunk, ...]
    live: tuple[int, ...]
    bucket: int
    rounds: int


class DispatchRecord(NamedTuple):
    """What the rounds of a dispatch did.

    Attributes:
        bucket: Nodes of the trees, root included.
        live: The batch's live slots.
        seconds: How long the rounds took; None where they were not timed alone.
        tokens: Committed tokens, -1 beyond.
        tree_sizes: Nodes of each tree; 0 for a slot that did not decode.
        expected: Drafted tokens that the head expected trees of each bucket up to this one to have accepted;
            None for plain rounds.
        accepted: Those that they would have had accepted.
    """

    bucket: int
    live: tuple[int, ...]
    seconds: float | None
    tokens: Int32[np.ndarray, "R L D1"]
    tree_sizes: Int32[np.ndarray, "R L"]
    expected: Float32[np.ndarray, "R L K"] | None = None
    accepted: Float32[np.ndarray, "R L K"] | None = None
