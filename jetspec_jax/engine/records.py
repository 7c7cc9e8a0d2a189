"""What the scheduler tells the runner, and what it gets back: numbers and NumPy arrays, no text, no device.

Shapes: R rounds that ran, L slots that a dispatch is for, D draft depth, K buckets, T pages per slot, P
prompts of a forward, C tokens of a chunk.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from jetspec_jax.sampling.params import SamplingParams


class Adjusting(NamedTuple):
    """What a request wants of the logits, beside its parameters.

    Attributes:
        prompt: Its prompt.
        output: What it has got already.
        endings: Tokens that are forbidden before ``min_tokens``.
        bad_words: Tokens of each bad word.
    """

    prompt: Int32[np.ndarray, "T"]
    output: tuple[int, ...]
    endings: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]


class Admission(NamedTuple):
    """A slot changes hands.

    Attributes:
        slot: Which.
        pages: Its block table, padded with `NO_PAGE`.
        length: Tokens that the pages hold already, always whole pages of them.
        anchor: The last token of the prompt, or of prompt and output so far where it goes on with one: the
            root of its first tree. What stands between is prefilled.
        active: Whether it decodes at once, because nothing is left to prefill.
        params: How the request is sampled, with a seed; no text.
        remaining: Tokens that it may still get.
        stop_ids: All tokens that end it.
        budget: Most nodes of its trees, root included.
        depth: Largest depth of its trees.
        routing: What the caller said of it, for algorithms that look at that: names and values.
        adjusting: What it wants of the logits; None is nothing.
        scored: Its prompt, where log-probabilities of that are asked for and not known yet.
        output: What it has got so far, where a grammar says how that goes on.
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
    routing: tuple[tuple[str, str], ...] = ()
    adjusting: Adjusting | None = None
    scored: Int32[np.ndarray, "T"] | None = None
    output: tuple[int, ...] = ()


class Growth(NamedTuple):
    """A slot gets more pages.

    Attributes:
        slot: Which.
        pages: Its whole block table anew; pages that it had stay where they are.
    """

    slot: int
    pages: Int32[np.ndarray, "T"]


class Chunk(NamedTuple):
    """Parts of some prompts, which one forward takes in.

    Attributes:
        slots: Whose, each slot once.
        tokens: The parts, padded.
        counts: Tokens of each that are no padding; 0 is no part, and its slot stays as it is.
        ready: Which slots decode from then on.
    """

    slots: Int32[np.ndarray, "P"]
    tokens: Int32[np.ndarray, "P C"]
    counts: Int32[np.ndarray, "P"]
    ready: Bool[np.ndarray, "P"]


class SlotCopy(NamedTuple):
    """What a slot keeps beside pages is copied to a place of snapshots, or from there.

    Attributes:
        after: How many of the batch's forwards of prompts come before.
        slot: Which.
        place: Which.
        restores: Whether the slot gets what the place holds; else the place gets what the slot holds.
    """

    after: int
    slot: int
    place: int
    restores: bool


class Batch(NamedTuple):
    """All that a runner does until the host looks again, in this order.

    Attributes:
        releases: Slots that are free from now on.
        admissions: Slots that requests get.
        growths: Slots that get more pages.
        chunks: Of prompts.
        live: The slots that rounds are for, each once: all, in order, or a power of two of them in any order.
        bucket: Nodes of the trees, root included; 1 is plain decoding.
        rounds: At most so many; 0 is none.
        adjusts: Whether a slot that decodes wants anything of the logits.
        logprobs: Whether one wants log-probabilities.
        copies: To snapshots and back, in order, each between forwards of prompts.
        masked: Slots that decode and whose outputs follow grammars.
    """

    releases: tuple[int, ...]
    admissions: tuple[Admission, ...]
    growths: tuple[Growth, ...]
    chunks: tuple[Chunk, ...]
    live: tuple[int, ...]
    bucket: int
    rounds: int
    adjusts: bool = False
    logprobs: bool = False
    copies: tuple[SlotCopy, ...] = ()
    masked: tuple[int, ...] = ()


class DispatchRecord(NamedTuple):
    """What the rounds of a batch did.

    Attributes:
        bucket: Nodes of the trees, root included.
        live: The slots that they were for, in the order of the arrays.
        seconds: How long the rounds took; None where they were not timed alone.
        tokens: Committed tokens, -1 beyond.
        tree_sizes: Nodes of each tree; 0 for a slot that did not decode.
        expected: Drafted tokens that the head expected trees of each bucket up to this one to have accepted;
            None for plain rounds.
        accepted: Those that they would have had accepted.
        logprobs: What is told of the tokens, as a `jetspec_jax.decode.logprobs.Logprobs` of arrays
            ``[R, L, D1, ...]``; None where nobody asked.
        scored: Likewise of prompts, by slot: of each token but the first.
    """

    bucket: int
    live: tuple[int, ...]
    seconds: float | None
    tokens: Int32[np.ndarray, "R L D1"]
    tree_sizes: Int32[np.ndarray, "R L"]
    expected: Float32[np.ndarray, "R L K"] | None = None
    accepted: Float32[np.ndarray, "R L K"] | None = None
    logprobs: Any = None
    scored: tuple[tuple[int, Any], ...] = ()
