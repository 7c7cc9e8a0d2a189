"""Records between scheduler and runner: numbers and NumPy arrays, no text and no device arrays.

Shapes: R rounds that ran, L slots of a dispatch, D draft depth, K buckets, T pages per slot, P prompts of a
forward, C tokens of a chunk.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from jetspec_jax.engine.programs import Kind
from jetspec_jax.sampling.params import SamplingParams


class Adjusting(NamedTuple):
    """Inputs of a request's logit adjustments, besides its parameters; see `Request` for the last two."""

    prompt: Int32[np.ndarray, "T"]
    output: tuple[int, ...]
    endings: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]


class Admission(NamedTuple):
    """A request gets a slot. Attributes that are not listed are those of `Request`.

    Attributes:
        pages: Its block table, padded with `NO_PAGE`.
        length: Tokens that its pages already hold, always whole pages.
        anchor: The last token of the prompt, or of prompt and output after a preemption: the root of its
            first tree. Tokens between ``length`` and the anchor are prefilled.
        active: Whether it decodes at once, because nothing remains to prefill.
        params: Sampling parameters, with a seed and without texts.
        output: Its tokens so far, if it follows a grammar.
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
    output: tuple[int, ...] = ()


class Growth(NamedTuple):
    """A slot gets more pages: its whole new block table, in which earlier pages keep their position."""

    slot: int
    pages: Int32[np.ndarray, "T"]


class Chunk(NamedTuple):
    """Parts of prompts that one prefill forward contains.

    Attributes:
        slots: The slot of each part, each once.
        tokens: The parts, padded.
        counts: Tokens of each part without padding; 0 is no part and leaves the slot unchanged.
        ready: Whether each slot decodes from then on.
    """

    slots: Int32[np.ndarray, "P"]
    tokens: Int32[np.ndarray, "P C"]
    counts: Int32[np.ndarray, "P"]
    ready: Bool[np.ndarray, "P"]


class SlotCopy(NamedTuple):
    """Copies a slot's rings and states to a snapshot, or back.

    Attributes:
        after: Number of the batch's prefill forwards before it.
        place: The snapshot.
        restores: Whether the snapshot is copied to the slot; else the slot to the snapshot.
    """

    after: int
    slot: int
    place: int
    restores: bool


class Batch(NamedTuple):
    """Everything that a runner does in one launch, in this order.

    Attributes:
        releases: Slots that become free.
        admissions: Slots that requests get.
        growths: Slots that get more pages.
        chunks: Prefill forwards.
        live: Slots of the rounds, each once, in rising order; their number has a program.
        bucket: Nodes of the trees, root included; 1 is plain decoding.
        rounds: Most rounds; 0 is none.
        kind: Optional parts of the rounds: those of all decoding slots.
        copies: Copies to snapshots and back, in order, between prefill forwards.
        masked: Decoding slots that follow a grammar.
    """

    releases: tuple[int, ...]
    admissions: tuple[Admission, ...]
    growths: tuple[Growth, ...]
    chunks: tuple[Chunk, ...]
    live: tuple[int, ...]
    bucket: int
    rounds: int
    kind: Kind = Kind()
    copies: tuple[SlotCopy, ...] = ()
    masked: tuple[int, ...] = ()


class DispatchRecord(NamedTuple):
    """Results of a batch; by default of one without rounds.

    Attributes:
        bucket: Nodes of the trees, root included.
        live: Slots of the rounds, in the order of the arrays.
        seconds: Seconds of the prefill forwards and the rounds; None if they were not timed.
        forwards: Shapes of the prefill forwards: prompts, and rows of each.
        tokens: Committed tokens, -1 as padding.
        tree_sizes: Nodes of each tree; 0 for a slot that did not decode.
        expected: Drafted tokens that the head expected trees of each bucket up to this one to have accepted;
            None for plain rounds.
        accepted: Drafted tokens that trees of these buckets would have had accepted.
        logprobs: A `jetspec_jax.decode.logprobs.Logprobs` of the tokens, arrays ``[R, L, D1, ...]``; None if
            no request wants them.
        tree_depths: Depth of each tree's deepest node.
    """

    bucket: int
    live: tuple[int, ...]
    seconds: float | None = None
    forwards: tuple[tuple[int, int], ...] = ()
    tokens: Int32[np.ndarray, "R L D1"] = np.zeros((0, 0, 0), np.int32)
    tree_sizes: Int32[np.ndarray, "R L"] = np.zeros((0, 0), np.int32)
    expected: Float32[np.ndarray, "R L K"] | None = None
    accepted: Float32[np.ndarray, "R L K"] | None = None
    logprobs: Any = None
    tree_depths: Int32[np.ndarray, "R L"] = np.zeros((0, 0), np.int32)

    @property
    def shape(self) -> tuple[int, int]:
        """Live slots and nodes of the rounds."""
        return len(self.live), self.bucket

    @property
    def rounds(self) -> int:
        """Number of rounds in which a slot decoded."""
        return int((self.tree_sizes > 0).any(axis=1).sum())
