"""The round of speculation: three functions of arrays, and their composition.

::

    propose   proposer -> draft logits [B, D, V] -> candidates [B, D, K] -> token tree [B, N]
    verify    target over the tree's nodes -> logits [B, N, V], taps, stash
    settle    the target's choice at every node -> accepted path [B, D + 1]
              -> stores, proposer's state, next anchors [B], record

Plain decoding is the same round with a tree of one node.

Shapes: B slots, N nodes (the bucket), D draft depth, F tap size, V vocabulary.
"""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.stores import after_forward, commit
from jetspec_jax.decode.logprobs import Logprobs, logprobs_of
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.proposer import candidates_of, check_selected, scales_of, selected_of, taps_of
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord
from jetspec_jax.models import bind
from jetspec_jax.sampling.adjust import Adjustments, adjust
from jetspec_jax.sampling.allowed import contains, only_allowed
from jetspec_jax.sampling.choice import choose_tokens, gumbel_noise
from jetspec_jax.sampling.drafting import DraftScoring
from jetspec_jax.tree import (
    BUCKETS,
    DEFAULT_ALGORITHM,
    Algorithm,
    Breadth,
    Candidates,
    TokenTree,
    accept,
    algorithm_of,
    breadth_of,
    check_breadth,
    grow_tree,
    path_tokens,
    plan_of,
    reach_of,
    root_tree,
)
from pallas_kernels import shards


class Proposal(NamedTuple):
    """The trees that a round verifies.

    In plain decoding there are no candidates and no noise, which `Round.settle` reads too.
    """

    tree: TokenTree
    candidates: Candidates | None
    noise: Float32[Array, "B D1 V"] | None = None


class Verified(NamedTuple):
    """The result of the target's forward."""

    logits: Float[Array, "B N V"]
    taps: Float[Array, "B N F"]
    stash: tuple[Any, ...]


class Accepted(NamedTuple):
    """The accepted paths.

    Paths begin at the root; -1 is beyond. ``counts`` are the tokens to commit, 0 for a slot that does not
    decode. ``tokens`` are the target's choices at the nodes of the path, the last of which is the ``bonus``,
    the next anchor.
    """

    path: Int[Array, "B D1"]
    counts: Int[Array, "B"]
    tokens: Int[Array, "B D1"]
    bonus: Int[Array, "B"]
    choices: Int[Array, "B N"]


class Settled(NamedTuple):
    """The result of a round."""

    state: DecodeState
    record: RoundRecord
    accepted: Accepted


@dataclass(frozen=True)
class Round(Models):
    """The static settings of a round, each combination a compiled program. The first are those of `Models`.

    Attributes:
        bucket: Static number of nodes of a tree, root included; 1 is plain decoding.
        width: Most children of a node; None is as for `breadth_of`.
        algorithm: The tree algorithm: a name, or an algorithm with its options.
        candidates: Candidates per draft row; None is as for `breadth_of`.
        observes: Tree sizes for which records have the acceptance that they would have had; sizes above the
            bucket are ignored.
        adjusts: Whether the logits of slots may be adjusted, for which the state has arrays.
        logprobs: Whether records have log-probabilities of the committed tokens.
    """

    bucket: int = 1
    width: int | None = None
    algorithm: str | Algorithm = DEFAULT_ALGORITHM
    candidates: int | None = None
    _: KW_ONLY
    observes: tuple[int, ...] = ()
    adjusts: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket not in BUCKETS:
            raise ValueError(f"bucket must be one of {BUCKETS}, not {self.bucket}")
        if self.bucket > 1 and self.proposer is None:
            raise ValueError(f"a bucket of {self.bucket} nodes needs a proposer to fill it")
        check_breadth(self.breadth, self.target.vocab_size)
        check_selected(self.proposer, self.breadth)

    @property
    def breadth(self) -> Breadth:
        """Width and candidates, with defaults resolved."""
        return breadth_of(self.algorithm, self.width, self.candidates, selected_of(self.proposer))

    @property
    def depth(self) -> int:
        """D, the largest depth of the trees; 0 in plain decoding."""
        return 0 if self.proposer is None else min(self.proposer.depth, self.bucket - 1)

    def decodes(self, state: DecodeState) -> Bool[Array, "B"]:
        """Slots that take part in the next round: active, and with room for all tokens it could commit.

        Tokens after a request's last one need no room. A slot without room keeps its state.
        """
        settings = state.settings
        deepest = jnp.minimum(jnp.minimum(settings.depth, settings.budget - 1), self.depth)
        most = jnp.minimum(deepest + 1, settings.remaining)
        return state.active & (state.slots.lengths + most <= state.room)

    def round(self, weights: DecodeWeights, state: DecodeState) -> tuple[DecodeState, RoundRecord]:
        """One round of speculation for all slots; slots that do not decode keep their state."""
        tree, candidates, noise = self.propose(weights, state)
        settled = self.settle(weights, state, tree, self.verify(weights, state, tree), noise=noise)
        record = settled.record
        if candidates is not None and candidates.nan is not None:
            record = record._replace(nan_drafts=candidates.nan & (record.tree_sizes > 0))
        return settled.state, record

    def propose(self, weights: DecodeWeights, state: DecodeState) -> Proposal:
        """Drafts, and builds the round's trees below the anchors."""
        if self.proposer is None or self.bucket == 1:
            return Proposal(root_tree(state.anchors, 1), None)
        target = bind(self.target, weights.target)
        with jax.named_scope("propose"):
            width, num_candidates = self.breadth
            inputs = weights.proposer, state.proposer, target
            noise = self._noise(state)
            candidates = candidates_of(
                self.proposer,
                *inputs,
                state.anchors,
                state.slots,
                num_candidates,
                self.depth,
                self._scoring(state, noise),
            )
            algorithm = algorithm_of(self.algorithm)
            tree = grow_tree(
                candidates,
                state.anchors,
                plan_of(algorithm, candidates.best(width), state.settings.routing),
                state.settings.budget,
                state.settings.depth,
                num_nodes=self.bucket,
                width=width,
                one_by_one=algorithm.one_by_one,
            )
            return Proposal(tree, candidates, noise)

    def _noise(self, state: DecodeState) -> Float32[Array, "B D1 V"]:
        """The noise of the token that a node of each depth emits."""
        vocab = self.target.vocab_size
        size = {"local": -(-vocab // shards.count()), "vocab_size": vocab}
        return gumbel_noise(state.settings.sampling.key, state.slots.lengths + 1, self.depth + 1, **size)

    def _scoring(self, state: DecodeState, noise: Float32[Array, "B D1 V"]) -> DraftScoring:
        """The noise and adjustments of draft rows: row d drafts the token that a node of depth d emits."""
        temperature = state.settings.sampling.temperature
        scales = scales_of(self.proposer, temperature, self.depth)
        return DraftScoring(
            temperature, noise[:, : self.depth], state.adjust if self.adjusts else None, scales
        )

    def verify(self, weights: DecodeWeights, state: DecodeState, tree: TokenTree) -> Verified:
        """One forward of the target over all nodes, each of which attends to its ancestors."""
        target = bind(self.target, weights.target)
        with jax.named_scope("verify"):
            block = Block.of_tree(tree, max_depth=self.depth)
            attend = attend_over(state.stores, state.slots, block, implementation=self.implementation)
            positions = block.positions(state.slots.lengths)
            output = target(block.tokens, positions, attend, taps=taps_of(self.proposer))
            return Verified(target.logits(output.hidden), output.taps, output.stash)

    def settle(
        self,
        weights: DecodeWeights,
        state: DecodeState,
        tree: TokenTree,
        verified: Verified,
        allowed: UInt32[Array, "B N words"] | None = None,
        noise: Float32[Array, "B D1 V"] | None = None,
    ) -> Settled:
        """Accepts the path that agrees with the target's choices, and commits it.

        The path's rows are written to the stores and the proposer's state, and the slots' lengths grow.
        ``allowed`` restricts the choices at each node to these packed sets, see `only_allowed`. ``noise`` is
        that of the proposal; None: it is made here.
        """
        with jax.named_scope("settle"):
            logits = verified.logits if allowed is None else only_allowed(verified.logits, allowed)
            accepted = self._accept(state, tree, logits, noise)
            accepted, logprobs = self._with_logprobs(accepted, verified.logits)
            path, count = accepted.path, accepted.counts
            stores = commit(state.stores, state.slots, verified.stash, path, count)
            proposer_state = state.proposer
            if self.proposer is not None:
                taps = jnp.take_along_axis(verified.taps, jnp.maximum(path, 0)[:, :, None], axis=1)
                proposer_state = self.proposer.commit(
                    weights.proposer, proposer_state, taps, state.slots, count
                )
            remaining = state.settings.remaining - count
            stopped = jnp.any(contains(state.settings.stop_bits, accepted.tokens), axis=1)
            after = replace(
                state,
                stores=stores,
                proposer=proposer_state,
                # Tokens after a request's end have no pages, so the length must not include them.
                slots=state.slots._replace(
                    lengths=state.slots.lengths + jnp.clip(state.settings.remaining, 0, count)
                ),
                anchors=jnp.where(self.decodes(state), accepted.bonus, state.anchors),
                active=state.active & ~stopped & (remaining > 0),
                settings=state.settings._replace(remaining=remaining),
                adjust=self._extended(state.adjust, accepted),
            )
            return Settled(after, self._record(tree, accepted, logprobs), accepted)

    def _accept(
        self,
        state: DecodeState,
        tree: TokenTree,
        logits: Float[Array, "B N V"],
        noise: Float32[Array, "B D1 V"] | None,
    ) -> Accepted:
        if self.adjusts:
            if state.adjust is None:
                raise ValueError("a decoder that adjusts logits needs a state from its own empty_state")
            logits = adjust(logits, path_tokens(tree, self.depth), tree.depths, state.adjust)
        choices = choose_tokens(
            logits,
            tree.depths,
            state.slots.lengths + 1,
            state.settings.sampling,
            max_depth=self.depth,
            vocab_size=self.target.vocab_size,
            noise=noise,
        )
        path, _, bonus = accept(tree, choices, max_depth=self.depth)
        taken = (path >= 0) & self.decodes(state)[:, None]
        # The choice at each node of the path is the token of the next node, and at the last node the bonus.
        tokens = jnp.where(taken, jnp.take_along_axis(choices, jnp.maximum(path, 0), axis=1), -1)
        counts = after_forward(jnp.sum(taken, axis=1, dtype=jnp.int32), choices)
        return Accepted(path, counts, tokens, bonus, choices)

    def _with_logprobs(
        self, accepted: Accepted, logits: Float[Array, "B N V"]
    ) -> tuple[Accepted, Logprobs | None]:
        """Adds the log-probabilities of the path's tokens, if the settings ask for them."""
        if not self.logprobs:
            return accepted, None
        rows = jnp.take_along_axis(logits, jnp.maximum(accepted.path, 0)[:, :, None], axis=1)
        logprobs = logprobs_of(rows, accepted.tokens, self.target.vocab_size)
        if self.mesh is not None:
            # Orders the collectives of the commit after those of the log-probabilities.
            likeliest = logprobs.tokens.reshape(len(accepted.counts), -1)
            accepted = accepted._replace(counts=after_forward(accepted.counts, likeliest))
        return accepted, logprobs

    def _extended(self, adjustments: Adjustments | None, accepted: Accepted) -> Adjustments | None:
        """The adjustments with the committed tokens added to their history."""
        if not self.adjusts or adjustments is None:
            return adjustments
        return adjustments._replace(history=adjustments.history.extended(accepted.tokens, accepted.counts))

    def _record(self, tree: TokenTree, accepted: Accepted, logprobs: Logprobs | None) -> RoundRecord:
        decodes = accepted.counts > 0
        reach = None
        if self.observes:
            budgets = [nodes for nodes in self.observes if nodes <= self.bucket]
            reach = reach_of(tree.scores, accepted.path, budgets)
            reach = jax.tree.map(lambda values: jnp.where(decodes[:, None], values, 0.0), reach)
        sizes = jnp.where(decodes, tree.num_nodes, 0)
        depths = jnp.where(decodes, jnp.max(tree.depths, axis=1), 0)
        return RoundRecord(accepted.tokens, sizes, depths, reach, logprobs)
