"""The trees of a run: their settings, checked against what the models can do, and their decoder."""

import functools
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from jetspec_jax.arguments import check_integer, check_type
from jetspec_jax.config import DraftHeadConfig, ModelConfig, check_head_fits
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.proposer import DraftHeadProposer, Proposer, selected_of
from jetspec_jax.tree import (
    DEFAULT_ALGORITHM,
    Algorithm,
    Breadth,
    algorithm_of,
    breadth_of,
    bucket_for,
    check_breadth,
    check_traceable,
)
from pallas_kernels.tree_attention import check_implementation

#: Nodes of a tree where nobody says how many.
DEFAULT_BUDGET = 128


@dataclass(frozen=True)
class TreeSettings:
    """The trees of a run, checked against what the models can do.

    Attributes:
        budget: Most nodes, root included; 1 is plain decoding.
        width: Most children of a node; None is all candidates.
        depth: Largest depth; None is all that the proposer drafts.
        algorithm: The tree algorithm: a name, or one with its options.
        candidates: Tokens of a draft row that are looked at; None is those of the head's selector, or else
            the width, or without one the algorithm's own number.
    """

    budget: int = DEFAULT_BUDGET
    width: int | None = None
    depth: int | None = None
    algorithm: str | Algorithm = DEFAULT_ALGORITHM
    candidates: int | None = None

    @property
    def breadth(self) -> Breadth:
        """Width and candidates, none left open."""
        return breadth_of(self.algorithm, self.width, self.candidates)

    def for_selected(self, selected: int | None) -> "TreeSettings":
        """The settings with the width and candidates that they have with a selector of so many candidates."""
        if selected is None or self.candidates is not None or self.budget == 1:
            return self
        width, candidates = breadth_of(self.algorithm, self.width, self.candidates, selected)
        return replace(self, width=width, candidates=candidates)

    def check(self, target: ModelConfig, max_depth: int | None) -> None:
        """Checks each setting, by name; no head, no bound on the depth.

        Raises:
            TypeError: One is of a wrong type.
            ValueError: One is out of its range.
        """
        algorithm_of(self.algorithm)
        bucket_for(check_integer("budget", self.budget))
        for name, value, most in (
            ("width", self.width, target.vocab_size),
            ("candidates", self.candidates, target.vocab_size),
            ("depth", self.depth, max_depth),
        ):
            if value is not None:
                check_integer(name, value, 1, most)
        check_breadth(self.breadth, target.vocab_size)
        if max_depth is not None:
            _check_once(self.algorithm, max_depth, self.breadth.width)


@functools.lru_cache(64)
def _check_once(algorithm: str | Algorithm, depth: int, width: int) -> None:
    """As `check_traceable`: a trace takes milliseconds, and every request is checked."""
    check_traceable(algorithm, depth=depth, width=width)


PLAIN = TreeSettings(budget=1, width=1)


def fastest_settings() -> TreeSettings:
    """What is fastest where nobody names a tree: plain decoding on a CPU, for which every node is work."""
    return PLAIN if jax.default_backend() == "cpu" else TreeSettings()


def serving_algorithm() -> str:
    """The algorithm of trees for many callers, where somebody has named trees but no algorithm.

    It is "auto", which draws fewer nodes the more requests decode. On a CPU every node costs, so that "auto"
    always decodes plainly. A caller who names trees there gets trees.
    """
    return DEFAULT_ALGORITHM if jax.default_backend() == "cpu" else "auto"


def make_decoder(
    target: ModelConfig,
    head: DraftHeadConfig | None,
    settings: TreeSettings,
    *,
    proposer: Proposer | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> TreeDecoder:
    """The decoder of an engine: its static settings, checked.

    Raises:
        TypeError: A setting is of a wrong type.
        ValueError: The head does not fit, or a setting is out of its range.
        NotImplementedError: The named implementation cannot run on the device.
    """
    check_type("implementation", implementation, str | None, "a name or None")
    check_implementation(implementation)
    if head is not None:
        if proposer is not None:
            raise ValueError("give a draft head or another proposer, not both")
        check_head_fits(head, target)
        proposer = DraftHeadProposer(head, implementation)
    if proposer is not None:
        settings = settings.for_selected(selected_of(proposer))
        settings.check(target, proposer.depth)
    if settings.budget == 1:
        settings = PLAIN  # whatever trees were meant: plain decoding is one program
    return TreeDecoder(
        target,
        # No tree of one node has a use for drafts: decode without the head and its context.
        None if settings.budget == 1 else proposer,
        bucket_for(settings.budget),
        settings.breadth.width,
        settings.algorithm,
        settings.breadth.candidates,
        implementation=implementation,
        mesh=mesh,
    )
