"""What a dispatch runs and what came back, and the names of its programs: no text and no device arrays.

Shapes: R rounds that ran, L slots of a dispatch, D draft depth, K buckets, T pages per slot, P prompts of a
forward, C tokens of a chunk.
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from jetspec_jax.sampling.params import SamplingParams

#: The shape of a program: live slots and nodes of a round, or prompts and rows of a prefill forward.
Shape = tuple[int, int]
#: `Program.kind` of prefill forwards, and of log-probabilities of prompts; rounds have `str` of a `Kind`.
PREFILL, SCORES = "prompts", "scores"


class Kind(NamedTuple):
    """Optional parts of rounds: each kind has separate programs."""

    adjusts: bool = False  # the logits are adjusted
    logprobs: bool = False  # log-probabilities are returned
    masked: bool = False  # the host makes token masks in each round

    def __str__(self) -> str:
        parts = [name for name in ("adjusts", "logprobs") if getattr(self, name)]
        return " ".join([*(["masked"] if self.masked else []), "rounds", *parts])

    @property
    def parts(self) -> "list[Kind]":
        """All kinds with a subset of the parts, itself included: a dispatch has only its requests' parts."""
        return [Kind(*flags) for flags in itertools.product(*(sorted({False, part}) for part in self))]

    @classmethod
    def of(cls, params: SamplingParams) -> "Kind":
        """The kind of rounds that a request needs."""
        return cls(params.adjusts, params.logprobs is not None, params.structured_outputs is not None)

    @classmethod
    def union(cls, kinds: "Iterable[Kind]") -> "Kind":
        """The kind with the parts of all these kinds."""
        return cls(*map(any, zip(cls(), *kinds, strict=True)))


#: Kinds of rounds by `Program.kind`.
KINDS = {str(kind): kind for kind in Kind(adjusts=True, logprobs=True, masked=True).parts}


class Program(NamedTuple):
    """The name of a program that is compiled ahead of time."""

    kind: str  # `PREFILL`, `SCORES`, or a key of `KINDS`
    slots: int  # of a forward, one per prompt; or live slots of a round
    size: int  # rows of each prompt, nodes of a tree with its root, or pages of a prompt that is scored


class Adjusting(NamedTuple):
    """Inputs of a request's logit adjustments, besides its parameters; see `Request` for the last two."""

    prompt: Int32[np.ndarray, "T"]
    output: tuple[int, ...]
    endings: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]


class Admission(NamedTuple):
    """A request gets a slot. Fields without a comment are those of `Request`."""

    slot: int
    pages: Int32[np.ndarray, "T"]  # its block table, padded with `NO_PAGE`
    length: int  # tokens that its pages already hold, always whole pages
    # The last token of the prompt, or of prompt and output after a preemption: the root of its first tree.
    # Tokens between ``length`` and the anchor are prefilled.
    anchor: int
    active: bool  # whether it decodes at once, because nothing remains to prefill
    params: SamplingParams  # with a seed and without texts
    remaining: int
    stop_ids: tuple[int, ...]
    budget: int
    depth: int
    routing: tuple[tuple[str, str], ...] = ()
    adjusting: Adjusting | None = None


class Growth(NamedTuple):
    """A slot has more or fewer pages: its whole new block table, in which pages keep their position."""

    slot: int
    pages: Int32[np.ndarray, "T"]


class Chunk(NamedTuple):
    """Parts of prompts that one prefill forward contains."""

    slots: Int32[np.ndarray, "P"]  # the slot of each part, each once
    tokens: Int32[np.ndarray, "P C"]  # the parts, padded
    counts: Int32[np.ndarray, "P"]  # tokens of each part; 0 is no part and leaves the slot unchanged
    ready: Bool[np.ndarray, "P"]  # whether each slot decodes from then on


class SlotCopy(NamedTuple):
    """Copies a slot's rings and states to a snapshot, or back."""

    after: int  # number of the batch's prefill forwards before it
    slot: int
    place: int  # the snapshot
    restores: bool  # whether the snapshot is copied to the slot; else the slot to the snapshot


class Batch(NamedTuple):
    """Everything that a runner does in one launch, in this order."""

    releases: tuple[int, ...] = ()  # slots that become free
    admissions: tuple[Admission, ...] = ()
    growths: tuple[Growth, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    live: tuple[int, ...] = ()  # slots of the rounds, each once, in rising order; their number has a program
    bucket: int = 1  # nodes of the trees, root included; 1 is plain decoding
    rounds: int = 0  # most rounds
    kind: Kind = Kind()  # optional parts of the rounds: those of all decoding slots
    copies: tuple[SlotCopy, ...] = ()  # in order, between prefill forwards

    @property
    def shape(self) -> Shape:
        """Live slots and nodes of the rounds."""
        return len(self.live), self.bucket

    @property
    def forwards(self) -> tuple[Shape, ...]:
        """Shapes of the prefill forwards."""
        return tuple(chunk.tokens.shape for chunk in self.chunks)


class BatchResult(NamedTuple):
    """What came back from a batch; by default from one without rounds."""

    batch: Batch
    seconds: float | None = None  # of the prefill forwards and the rounds; None if they were not timed
    tokens: Int32[np.ndarray, "R L D1"] = np.zeros((0, 0, 0), np.int32)  # committed ones, -1 as padding
    tree_sizes: Int32[np.ndarray, "R L"] = np.zeros((0, 0), np.int32)  # 0 for a slot that did not decode
    tree_depths: Int32[np.ndarray, "R L"] = np.zeros((0, 0), np.int32)  # of each tree's deepest node
    # Drafted tokens that the head expected trees of each bucket up to this one to have accepted, and those
    # that they would have had accepted; None for plain rounds.
    expected: Float32[np.ndarray, "R L K"] | None = None
    accepted: Float32[np.ndarray, "R L K"] | None = None
    # A `jetspec_jax.decode.logprobs.Logprobs` of the tokens, arrays ``[R, L, D1, ...]``; None if unwanted.
    logprobs: Any = None

    @property
    def rounds(self) -> int:
        """Number of rounds in which a slot decoded."""
        return int((self.tree_sizes > 0).any(axis=1).sum())
