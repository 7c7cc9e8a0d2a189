"""Programs of an engine: their names, and the order in which they are compiled ahead of time."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jetspec_jax.engine.size import EngineSize
from jetspec_jax.sampling.params import SamplingParams

#: `Program.kind` of prefill forwards, and of log-probabilities of prompts; rounds have `str` of a `Kind`.
PREFILL, SCORES = "prompts", "scores"


class Kind(NamedTuple):
    """Optional parts of rounds: each kind has its own programs.

    Attributes:
        adjusts: The logits are adjusted.
        logprobs: Log-probabilities are returned.
        masked: The host makes token masks in each round.
    """

    adjusts: bool = False
    logprobs: bool = False
    masked: bool = False

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
    """A program that is compiled ahead of time.

    Attributes:
        kind: `PREFILL`, `SCORES`, or a key of `KINDS`.
        slots: Slots of a forward, one per prompt, or live slots of a round.
        size: Rows of each prompt, nodes of a tree with its root, or pages of a prompt that is scored.
    """

    kind: str
    slots: int
    size: int


def first_rounds(size: EngineSize, buckets: Sequence[int]) -> list[tuple[int, int]]:
    """Shapes of rounds that can serve any request: plain and with the largest trees, with all slots live."""
    nodes = [bucket for live, bucket in size.rounds(buckets) if live == size.slots]
    return [(size.slots, bucket) for bucket in sorted({nodes[0], nodes[-1]})]


def first_programs(size: EngineSize, buckets: Sequence[int]) -> list[Program]:
    """Programs that can serve any request without optional parts: `first_rounds`, and the largest chunk.

    Of chunks with equally many rows the one with the fewest prompts: a long prompt fills it. The ``buckets``
    are nodes of the trees, in rising order.
    """
    chunk = max(size.chunks, key=lambda shape: (shape[0] * shape[1], -shape[0]))
    return [Program(PREFILL, *chunk), *_named(Kind(), first_rounds(size, buckets))]


def in_order(size: EngineSize, buckets: Sequence[int], kinds: Sequence[Kind]) -> list[Program]:
    """Prefill forwards and rounds of some kinds, in the order of compiling.

    First come the programs that can serve any request, of every kind. Prefill forwards follow, as every
    request has a prompt. Then come the rounds by live slots, in rising order: most servers have few requests
    at a time, and where many run, the largest shape costs little more than the right one. For each number of
    live slots the largest trees come first, since they pay most where few requests share a round, then plain
    rounds, and then the other trees from large to small. Kinds without optional parts come before others.
    """
    kinds = sorted(kinds)
    first = [program for kind in kinds for program in _named(kind, first_rounds(size, buckets))]
    largest_chunk, *_ = first_programs(size, buckets)
    chunks = [Program(PREFILL, *chunk) for chunk in size.chunks]
    rest = [program for kind in kinds for program in _named(kind, _by_likelihood(size, buckets))]
    return list(dict.fromkeys([largest_chunk, *first, *chunks, *rest]))


def _by_likelihood(size: EngineSize, buckets: Sequence[int]) -> list[tuple[int, int]]:
    shapes = []
    for live, group in itertools.groupby(size.rounds(buckets), key=lambda shape: shape[0]):
        plain, *trees = [bucket for _, bucket in group]
        shapes += [(live, bucket) for bucket in (*trees[-1:], plain, *reversed(trees[:-1]))]
    return shapes


def _named(kind: Kind, shapes: Sequence[tuple[int, int]]) -> list[Program]:
    return [Program(str(kind), *shape) for shape in shapes]
