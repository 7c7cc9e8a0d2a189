"""The trees of a run: their settings, checked against what the models can do, and their decoder."""

from dataclasses import dataclass

import numpy as np

from jetspec_jax.config import DraftHeadConfig, ModelConfig, check_head_fits
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.proposer import DraftHeadProposer, Proposer
from jetspec_jax.tree import Algorithm, algorithm_of, bucket_for, check_traceable


@dataclass(frozen=True)
class TreeSettings:
    """The trees of a run, checked against what the models can do.

    Attributes:
        budget: Most nodes, root included; 1 is plain decoding.
        width: Most children of a node.
        depth: Largest depth; None is all that the proposer drafts.
        algorithm: The tree algorithm: a name, or one with its options.
    """

    budget: int = 128
    width: int = 7
    depth: int | None = None
    algorithm: str | Algorithm = "accum_logp"

    def check(self, target: ModelConfig, max_depth: int | None) -> None:
        """Raises ValueError naming the setting that is out of range; no head, no bound on the depth."""
        algorithm_of(self.algorithm)
        for name, value, most in (
            ("budget", self.budget, None),
            ("width", self.width, target.vocab_size),
            ("depth", self.depth, max_depth),
        ):
            if value is None and name == "depth":
                continue
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise ValueError(f"{name} must be an integer, not {value!r}")
            if most is not None and not 1 <= value <= most:
                raise ValueError(f"{name} must lie in 1..{most}, not {value}")
        bucket_for(self.budget)
        if max_depth is not None:
            check_traceable(self.algorithm, depth=max_depth, width=self.width)


PLAIN = TreeSettings(budget=1, width=1)


def make_decoder(
    target: ModelConfig,
    head: DraftHeadConfig | None,
    settings: TreeSettings,
    *,
    proposer: Proposer | None = None,
    implementation: str | None = None,
) -> TreeDecoder:
    """The decoder of an engine: its static settings, checked.

    Raises:
        ValueError: The head does not fit, or a setting is out of its range.
    """
    if head is not None:
        if proposer is not None:
            raise ValueError("give a draft head or another proposer, not both")
        check_head_fits(head, target)
        proposer = DraftHeadProposer(head, implementation)
    if proposer is not None:
        settings.check(target, proposer.depth)
    if settings.budget == 1:
        settings = PLAIN  # whatever trees were meant: plain decoding is one program
    return TreeDecoder(
        target,
        # No tree of one node has a use for drafts: decode without the head and its context.
        None if settings.budget == 1 else proposer,
        bucket_for(settings.budget),
        settings.width,
        settings.algorithm,
        implementation=implementation,
    )
