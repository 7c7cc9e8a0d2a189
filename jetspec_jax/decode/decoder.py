"""The round of speculation: pure functions of arrays that never leave the device.

`TreeDecoder` holds static settings only, `DecodeState` holds every array. A round drafts a tree, verifies it
in one forward of the target, accepts the path that the target itself would have taken, and commits it::

    proposer -> draft logits [B, D, V] -> tree [B, N] -> target over N nodes -> its choice at every node
             -> accepted path [B, D + 1] -> stores, proposer's state, next anchors [B]

Plain decoding is the same round with a tree of one node; a prompt chunk is a chain whose whole path is
accepted.

Shapes: B slots, N nodes (the bucket), D draft depth, C chunk, V vocabulary, P pages, T pages per slot.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jetspec_jax.cache.block import Block
from jetspec_jax.cache.stores import NO_PAGE, Slots, attend_over, commit, empty_stores
from jetspec_jax.config import ModelConfig
from jetspec_jax.decode.loop import LATE_LOOP, PLAIN_LOOP, TREE_LOOP, TREE_OPTIONS
from jetspec_jax.decode.prefill import prefill
from jetspec_jax.decode.proposer import Proposer, taps_of
from jetspec_jax.decode.state import (
    DecodeState,
    DecodeWeights,
    RoundRecord,
    SlotSettings,
    insert,
    is_stop,
    join,
    release,
    split,
)
from jetspec_jax.decode.unseen import FEED_ROWS, empty_rows, feed
from jetspec_jax.models import bind
from jetspec_jax.models.layers import KV
from jetspec_jax.sampling.choice import choose
from jetspec_jax.sampling.params import Sampling
from jetspec_jax.tree import (
    BUCKETS,
    Algorithm,
    Auto,
    Candidates,
    Routing,
    TokenTree,
    accept,
    algorithm_of,
    grow_tree,
    plan_of,
    root_tree,
    top_candidates,
)


class Verified(NamedTuple):
    """What the target made of a block.

    Attributes:
        logits: Of every node.
        taps: Outputs of the tapped layers.
        stash: Per layer, the nodes' keys and values.
    """

    logits: Float[Array, "B N V"]
    taps: Float[Array, "B N F"]
    stash: tuple[KV, ...]


class Accepted(NamedTuple):
    """What a round takes over.

    Attributes:
        path: Nodes of the accepted path from the root on; -1 beyond.
        counts: Tokens to commit, as many as the path has nodes; 0 for a slot that does not decode.
        tokens: What the target chose at those nodes; -1 beyond.
        bonus: The last of them, the next anchor.
        choices: What the target chose at every node.
    """

    path: Int[Array, "B D1"]
    counts: Int[Array, "B"]
    tokens: Int[Array, "B D1"]
    bonus: Int[Array, "B"]
    choices: Int[Array, "B N"]


@dataclass(frozen=True)
class TreeDecoder:
    """The static settings of a decoder: hashable, equal by value, one compiled program each.

    The loop in a program of one's own::

        decoder = TreeDecoder(target.config, DraftHeadProposer(head.config), bucket=64)
        weights = DecodeWeights(target.weights, head.weights)
        state = decoder.empty_state(slots, num_pages=..., pages_per_slot=..., page_size=..., dtype=...)
        state = decoder.insert(state, slot, pages, SlotSettings.of(params, stop_ids, ...))
        state, first_token = decoder.prefill(weights, state, slot, tokens, count, is_last)
        state, records = decoder.decode(weights, state, rounds)

    All that take and return a state donate the one they are given, but for `round` and `feed`.

    Attributes:
        target: The target's geometry.
        proposer: Where draft logits come from; None only decodes plainly.
        bucket: Nodes of a tree, root included, as a static size; 1 is plain decoding.
        width: Most children of a node.
        algorithm: The tree algorithm: a name, or one with its options.
        max_rounds: Most rounds of one `decode`.
        implementation: Of tree attention; None picks the best.
        observes: Whether records tell what trees of each smaller bucket would have had accepted.
    """

    target: ModelConfig
    proposer: Proposer | None = None
    bucket: int = 1
    width: int = 7
    algorithm: str | Algorithm = "accum_logp"
    max_rounds: int = 256
    implementation: str | None = None
    observes: bool = False

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: A setting is out of its range.
        """
        if self.bucket not in BUCKETS:
            raise ValueError(f"bucket must be one of {BUCKETS}, not {self.bucket}")
        if self.bucket > 1 and self.proposer is None:
            raise ValueError(f"a bucket of {self.bucket} nodes needs a proposer to fill it")
        if not 1 <= self.width <= self.target.vocab_size:
            raise ValueError(f"width must lie in 1..{self.target.vocab_size}, not {self.width}")
        if self.max_rounds < 1:
            raise ValueError(f"max_rounds must be at least 1, not {self.max_rounds}")
        algorithm_of(self.algorithm)

    @property
    def depth(self) -> int:
        """D, the largest depth of this decoder's trees; 0 in plain decoding."""
        return self.proposer.depth if self.proposer is not None and self.bucket > 1 else 0

    @property
    def features(self) -> int:
        """F, what the proposer is shown of a token: the outputs of all layers that it taps."""
        return len(taps_of(self.proposer)) * self.target.hidden_size

    @property
    def auto(self) -> Auto | None:
        """The algorithm, where it chooses among the buckets up to this one."""
        algorithm = algorithm_of(self.algorithm)
        return algorithm if isinstance(algorithm, Auto) and self.bucket > 1 else None

    def empty_state(
        self,
        slots: int,
        *,
        num_pages: int,
        pages_per_slot: int,
        page_size: int,
        dtype: jnp.dtype,
        unseen_rows: int | None = None,
    ) -> DecodeState:
        """A state whose slots are all free.

        Args:
            slots: B.
            num_pages: P, pages in the pool that the slots share.
            pages_per_slot: T, so that a slot holds at most ``T * page_size`` tokens.
            page_size: Tokens in a page.
            dtype: Of the stores: the weights' dtype.
            unseen_rows: Room of a slot for committed tokens that wait for the proposer, at least. Every
                `prefill` needs room for its chunk, and every `decode` that feeds late for ``max_rounds``
                tokens, however few count; without `feed` in between they add up. None is ``max_rounds``.
        """
        proposer = self.proposer
        if unseen_rows is None:
            unseen_rows = self.max_rounds
        tables = jnp.full((slots, pages_per_slot), NO_PAGE, jnp.int32)
        free = Slots.of(tables, jnp.zeros(slots, jnp.int32))
        return DecodeState(
            stores=empty_stores(self.target, num_pages, page_size, dtype, free),
            proposer=None if proposer is None else proposer.empty_state(num_pages, page_size, dtype),
            slots=free,
            anchors=jnp.zeros(slots, jnp.int32),
            active=jnp.zeros(slots, bool),
            settings=SlotSettings(
                sampling=Sampling.greedy(slots),
                budget=jnp.ones(slots, jnp.int32),
                depth=jnp.zeros(slots, jnp.int32),
                remaining=jnp.zeros(slots, jnp.int32),
                stop_bits=jnp.zeros((slots, -(-self.target.vocab_size // 32)), jnp.uint32),
                routing=Routing.unsaid(slots),
            ),
            unseen=None if proposer is None else empty_rows(slots, unseen_rows, self.features, dtype),
        )

    def insert(
        self, state: DecodeState, slot: Int[ArrayLike, ""], pages: Int[ArrayLike, "T"], settings: SlotSettings
    ) -> DecodeState:
        """Hands a slot to a request: see `jetspec_jax.state.insert`. ``state`` is donated."""
        stores, state = split(state)
        return join(stores, insert(state, slot, pages, settings))

    def release(self, state: DecodeState, slot: Int[ArrayLike, ""]) -> DecodeState:
        """Frees a slot: see `jetspec_jax.state.release`. ``state`` is donated."""
        stores, state = split(state)
        return join(stores, release(state, slot))

    def prefill(
        self,
        weights: DecodeWeights,
        state: DecodeState,
        slot: Int[ArrayLike, ""],
        tokens: Int[ArrayLike, "C"],
        count: Int[ArrayLike, ""],
        is_last: Bool[ArrayLike, ""],
    ) -> tuple[DecodeState, Int[Array, ""]]:
        """Commits one chunk of a prompt: see `jetspec_jax.prefill.prefill`. ``state`` is donated."""
        seen = state.slots.lengths[slot]
        state, token = self.prefill_unfed(weights, state, slot, tokens, count, is_last)
        return self._feed_all(weights, state, slot, seen, np.shape(tokens)[0]), token

    def prefill_unfed(
        self,
        weights: DecodeWeights,
        state: DecodeState,
        slot: Int[ArrayLike, ""],
        tokens: Int[ArrayLike, "C"],
        count: Int[ArrayLike, ""],
        is_last: Bool[ArrayLike, ""],
    ) -> tuple[DecodeState, Int[Array, ""]]:
        """`prefill`, but the proposer sees nothing: `feed` it before it drafts for that slot.

        And before `prefill` or `decode` show it more: they begin behind what was committed before.
        """
        own, taps = state.proposer, taps_of(self.proposer)
        state, token = prefill(
            self.target, taps, self.implementation, *_unfed(weights, state), slot, tokens, count, is_last
        )
        return replace(state, proposer=own), token

    def feed(
        self,
        weights: DecodeWeights,
        state: DecodeState,
        slot: Int[ArrayLike, ""],
        seen: Int[ArrayLike, ""],
    ) -> DecodeState:
        """Shows the proposer the next tokens of a slot, of which it has seen ``seen``: at most `FEED_ROWS`.

        What it has not seen must be in the state still: at most ``unseen_rows`` tokens. ``state.proposer`` is
        donated.
        """
        if self.proposer is None:
            return state
        own = feed(
            self.proposer,
            weights.proposer,
            state.proposer,
            state.unseen,
            state.slots,
            slot,
            seen,
            features=self.features,
            dtype=state.stores[0].k.dtype,
        )
        return replace(state, proposer=own)

    def _feed_all(
        self,
        weights: DecodeWeights,
        state: DecodeState,
        slot: Int[ArrayLike, ""],
        seen: Int[ArrayLike, ""],
        most: int,
    ) -> DecodeState:
        """`feed` until all is shown that a slot has: at most so many tokens more."""
        for shown in range(0, most, FEED_ROWS):
            state = self.feed(weights, state, slot, jnp.int32(seen) + shown)
        return state

    def round(self, weights: DecodeWeights, state: DecodeState) -> tuple[DecodeState, RoundRecord]:
        """One round of speculation over all slots; those that are not active keep their state."""
        tree = self.build(state, self.draft(weights, state))
        output = self.verify(weights, state, tree)
        accepted = self.accept(state, tree, output.logits)
        return self.commit(weights, state, tree, output, accepted)

    def draft(self, weights: DecodeWeights, state: DecodeState) -> Candidates | None:
        """The best tokens of every draft row; None in plain decoding, which drafts nothing."""
        if self.proposer is None or self.bucket == 1:
            return None
        target = bind(self.target, weights.target)
        with jax.named_scope("draft"):
            logits = self.proposer.propose(
                weights.proposer, state.proposer, target, state.anchors, state.slots
            )
            return top_candidates(logits, self.width)

    def build(self, state: DecodeState, candidates: Candidates | None) -> TokenTree:
        """The round's tree below the anchors; without candidates the anchors alone."""
        if candidates is None:
            return root_tree(state.anchors, 1)
        with jax.named_scope("build"):
            algorithm = algorithm_of(self.algorithm)
            return grow_tree(
                candidates,
                state.anchors,
                plan_of(algorithm, candidates, state.settings.routing),
                state.settings.budget,
                state.settings.depth,
                num_nodes=self.bucket,
                one_by_one=algorithm.one_by_one,
            )

    def verify(self, weights: DecodeWeights, state: DecodeState, tree: TokenTree) -> Verified:
        """One forward of the target over all nodes, each behind its own ancestors."""
        target = bind(self.target, weights.target)
        with jax.named_scope("verify"):
            block = Block.of_tree(tree, max_depth=self.depth)
            attend = attend_over(state.stores, state.slots, block, implementation=self.implementation)
            positions = block.positions(state.slots.lengths)
            output = target(block.tokens, positions, attend, taps=taps_of(self.proposer))
            return Verified(target.logits(output.hidden), output.taps, output.stash)

    def accept(self, state: DecodeState, tree: TokenTree, logits: Float[Array, "B N V"]) -> Accepted:
        """The path that the target itself would have taken, and the tokens that it emits along it."""
        with jax.named_scope("accept"):
            choices = choose(
                logits,
                tree.depths,
                state.slots.lengths + 1,
                state.settings.sampling,
                max_depth=self.depth,
            )
            path, _, bonus = accept(tree, choices, max_depth=self.depth)
            # The choice at every node of the path is the next one's token, and at the last node the bonus.
            tokens = jnp.take_along_axis(choices, jnp.maximum(path, 0), axis=1)
            tokens = jnp.where((path >= 0) & state.active[:, None], tokens, -1)
            # Counted from the tokens, although plain decoding knows it is one: see `cache.commit`.
            count = jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)
            return Accepted(path, count, tokens, bonus, choices)

    def commit(
        self,
        weights: DecodeWeights,
        state: DecodeState,
        tree: TokenTree,
        output: Verified,
        accepted: Accepted,
    ) -> tuple[DecodeState, RoundRecord]:
        """Writes the accepted path into the stores and the proposer's state, and moves the slots on."""
        before = state.slots
        after, record = self.advance(state, tree, output, accepted)
        if self.proposer is None:
            return after, record
        with jax.named_scope("commit"):
            taps = jnp.take_along_axis(output.taps, jnp.maximum(accepted.path, 0)[:, :, None], axis=1)
            own = self.proposer.commit(weights.proposer, state.proposer, taps, before, accepted.counts)
        return replace(after, proposer=own), record

    def advance(
        self, state: DecodeState, tree: TokenTree, output: Verified, accepted: Accepted
    ) -> tuple[DecodeState, RoundRecord]:
        """`commit` but for the proposer's state."""
        path, count, tokens, bonus, _ = accepted
        with jax.named_scope("commit"):
            stores = commit(state.stores, output.stash, state.slots, count, path=path)
        remaining = state.settings.remaining - count
        stopped = jnp.any(is_stop(tokens, state.settings.stop_bits), axis=1)
        state = replace(
            state,
            stores=stores,
            # What overshoots a request's end has no page, and no later round of this loop may look for it.
            slots=state.slots._replace(
                lengths=state.slots.lengths + jnp.clip(state.settings.remaining, 0, count)
            ),
            anchors=jnp.where(state.active, bonus, state.anchors),
            active=state.active & ~stopped & (remaining > 0),
            settings=state.settings._replace(remaining=remaining),
        )
        sizes = jnp.where(count > 0, tree.num_nodes, 0)
        seen = (path, tree.scores) if self.observes else ()
        return state, RoundRecord.of(tokens, sizes, *seen)

    def decode(
        self, weights: DecodeWeights, state: DecodeState, rounds: Int[ArrayLike, ""]
    ) -> tuple[DecodeState, RoundRecord]:
        """Runs up to ``rounds`` rounds without returning to the host. ``state`` is donated.

        Args:
            weights: The parameters.
            state: The state.
            rounds: How many rounds, at most ``max_rounds``; fewer run when no slot is active any more.

        Returns:
            The state, and the records ``[max_rounds, B, ...]`` with counts of 0 for rounds that did not run.
        """
        if not self.feeds_late:
            return self._run(weights, state, rounds)
        before = [state.slots.lengths[slot] for slot in range(len(state.anchors))]
        state, records = self.decode_unfed(weights, state, rounds)
        # One token a round; a traced number is not known.
        most = self.max_rounds if isinstance(rounds, Tracer) else int(np.minimum(rounds, self.max_rounds))
        for slot, seen in enumerate(before):
            state = self._feed_all(weights, state, np.int32(slot), seen, most)
        return state, records

    @property
    def feeds_late(self) -> bool:
        """Whether the proposer sees a dispatch's tokens behind it, by a program of its own.

        While nobody drafts nobody needs them, and one pass over all of them is cheaper than one a round.
        """
        return self.bucket == 1 and self.proposer is not None

    def decode_unfed(
        self, weights: DecodeWeights, state: DecodeState, rounds: Int[ArrayLike, ""]
    ) -> tuple[DecodeState, RoundRecord]:
        """`decode` of a decoder that feeds late, but the proposer sees nothing: see `prefill_unfed`."""
        own = state.proposer
        state, records = self._run(*_unfed(weights, state), rounds)
        return replace(state, proposer=own), records

    def _run(
        self, weights: DecodeWeights, state: DecodeState, rounds: Int[ArrayLike, ""]
    ) -> tuple[DecodeState, RoundRecord]:
        # JAX takes compiler options of the outermost program alone: inside of another the loop is part of it.
        inside = isinstance(state.anchors, Tracer)
        program = self.program.__wrapped__ if inside else self.program
        return program(self, weights, state, rounds)

    @property
    def compiler_options(self) -> dict[str, bool]:
        """What XLA is told for programs of this bucket."""
        return {} if self.bucket == 1 else TREE_OPTIONS

    @property
    def program(self) -> Any:
        """The jitted function behind `decode`, with the decoder as its first argument: to compile ahead.

        Where the proposer is fed late, nothing of its own is given or returned.
        """
        return LATE_LOOP if self.feeds_late else PLAIN_LOOP if self.bucket == 1 else TREE_LOOP


def _unfed(weights: DecodeWeights, state: DecodeState) -> tuple[DecodeWeights, DecodeState]:
    """Without what is the proposer's."""
    return weights._replace(proposer=None), replace(state, proposer=None)
