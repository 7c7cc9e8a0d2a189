"""The trees of a run: their settings, checked against what the models can do, and their decoder."""

from dataclasses import dataclass

from jetspec_jax.arguments import check_integer, check_type
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
        """Checks each setting, by name; no head, no bound on the depth.

        Raises:
            TypeError: One is of a wrong type.
            ValueError: One is out of its range.
        """
        algorithm_of(self.algorithm)
        bucket_for(check_integer("budget", self.budget))
        check_integer("width", self.width, 1, target.vocab_size)
        if self.depth is not None:
            check_integer("depth", self.depth, 1, max_depth)
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
        TypeError: A setting is of a wrong type.
        ValueError: The head does not fit, or a setting is out of its range.
    """
    check_type("implementation", implementation, str | None, "a name or None")
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
