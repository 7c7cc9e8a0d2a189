"""Tree settings, their checks against the models, and the decoder for them."""

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

#: The default budget of trees.
DEFAULT_BUDGET = 128


@dataclass(frozen=True)
class TreeSettings:
    """The settings of trees.

    Attributes:
        budget: Most nodes, root included; 1 is plain decoding.
        width: Most children of a node; None means the candidates, or without them the algorithm's default.
        depth: Largest depth; None means the proposer's depth.
        algorithm: The tree algorithm: a name, or an algorithm with its options.
        candidates: Candidates per draft row; None means the width, or without a width the algorithm's
            default. With a selector it is at least that default, and the number of the selector's training.
    """

    budget: int = DEFAULT_BUDGET
    width: int | None = None
    depth: int | None = None
    algorithm: str | Algorithm = DEFAULT_ALGORITHM
    candidates: int | None = None

    @property
    def breadth(self) -> Breadth:
        """Width and candidates, with defaults resolved."""
        return breadth_of(self.algorithm, self.width, self.candidates)

    def for_selected(self, selected: int | None) -> "TreeSettings":
        """The settings with width and candidates resolved for a selector of ``selected`` candidates."""
        if selected is None or self.candidates is not None or self.budget == 1:
            return self
        width, candidates = breadth_of(self.algorithm, self.width, self.candidates, selected)
        return replace(self, width=width, candidates=candidates)

    def check(self, target: ModelConfig, max_depth: int | None) -> None:
        """Checks all settings; ``max_depth`` is the proposer's depth, or None without a proposer."""
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
    """A cached `check_traceable`: tracing takes milliseconds, and every request is checked."""
    check_traceable(algorithm, depth=depth, width=width)


PLAIN = TreeSettings(budget=1, width=1)


def fastest_settings() -> TreeSettings:
    """The default settings: plain decoding on a CPU, where every node costs time, and trees elsewhere."""
    return PLAIN if jax.default_backend() == "cpu" else TreeSettings()


def serving_algorithm() -> str | None:
    """The default tree algorithm for serving; None is that of single calls.

    It is "auto", which uses fewer nodes the more requests decode. On a CPU, "auto" would always choose plain
    decoding, so the default there is that of single calls, and callers who set tree options get trees.
    """
    return None if jax.default_backend() == "cpu" else "auto"


def make_decoder(
    target: ModelConfig,
    head: DraftHeadConfig | None,
    settings: TreeSettings,
    *,
    proposer: Proposer | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> TreeDecoder:
    """The decoder for checked tree settings."""
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
        settings = PLAIN  # drops other tree options, so that plain decoding is one program
    return TreeDecoder(
        target,
        # Plain decoding does not need the head and its context.
        None if settings.budget == 1 else proposer,
        bucket_for(settings.budget),
        settings.breadth.width,
        settings.algorithm,
        settings.breadth.candidates,
        implementation=implementation,
        mesh=mesh,
    )
