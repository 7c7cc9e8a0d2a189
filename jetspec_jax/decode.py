"""The round of speculation and the loop around it: pure functions of arrays that never leave the device.

`TreeDecoder` holds static settings only, `DecodeState` holds every array. A round drafts a tree, verifies it
in one forward of the target, accepts the path that the target itself would have taken, and commits it::

    proposer -> draft logits [B, D, V] -> tree [B, N] -> target over N nodes -> its choice at every node
             -> accepted path [B, D + 1] -> stores, proposer's state, next anchors [B]

Plain decoding is the same round with a tree of one node; a prompt chunk is a chain whose whole path is
accepted.

Shapes: B slots, N nodes (the bucket), D draft depth, C chunk, V vocabulary, P pages, T pages per slot.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32, UInt32

from jetspec_jax.cache import (
    Slots,
    Store,
    attend_over,
    causal_bits,
    commit,
    empty_stores,
    select_rows,
)
from jetspec_jax.config import ModelConfig
from jetspec_jax.models import Transformer, Weights, bind
from jetspec_jax.proposer import Proposer
from jetspec_jax.sampling import Sampling, choose
from jetspec_jax.tree import (
    TokenTree,
    accept,
    ancestor_bits,
    get_algorithm,
    grow_tree,
    root_tree,
    top_candidates,
)


class DecodeWeights(NamedTuple):
    """The parameters that a round reads.

    Attributes:
        target: The target's.
        proposer: The proposer's; None in plain decoding.
    """

    target: Weights
    proposer: Any = None


class SlotSettings(NamedTuple):
    """What a request brings to its slot; in `DecodeState` every field has a leading slot axis.

    Attributes:
        sampling: How its tokens are chosen.
        budget: Most nodes of its trees, root included.
        depth: Largest depth of its trees.
        remaining: Tokens that it may still emit.
        stop_bits: Packed set of the tokens that end it: bit t % 32 of word t // 32 for token t.
    """

    sampling: Sampling
    budget: Int[Array, "B"]
    depth: Int[Array, "B"]
    remaining: Int[Array, "B"]
    stop_bits: UInt32[Array, "B words"]


# Unchecked by the tests' typing hook: JAX rebuilds pytrees around leaves of any kind.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Every array of B slots. Nothing here depends on the bucket, so it can change between rounds.

    Attributes:
        stores: The target's committed tokens, one store per layer.
        proposer: The proposer's state; None in plain decoding.
        slots: Block tables, and the lengths of what the stores hold.
        anchors: The last committed token of each slot, not yet in the stores: the root of its next tree.
        active: Slots that decode; others are free, being prefilled, or finished.
        settings: What the slots' requests asked for.
    """

    stores: tuple[Store, ...]
    proposer: Any
    slots: Slots
    anchors: Int32[Array, "B"]
    active: Bool[Array, "B"]
    settings: SlotSettings


class RoundRecord(NamedTuple):
    """What a round did; `TreeDecoder.decode` stacks records along a leading axis of rounds.

    Attributes:
        tokens: Committed tokens of each slot (the accepted ones, then the bonus), -1 beyond.
        counts: How many they are: accepted drafted tokens plus one; 0 for a slot that did not decode.
        tree_sizes: Nodes of each slot's tree.
    """

    tokens: Int32[Array, "B D1"]
    counts: Int32[Array, "B"]
    tree_sizes: Int32[Array, "B"]


@dataclass(frozen=True)
class TreeDecoder:
    """The static settings of a decoder: hashable, equal by value, one compiled program each.

    Attributes:
        target: The target's geometry.
        proposer: Where draft logits come from; None only decodes plainly.
        bucket: Nodes of a tree, root included, as a static size; 1 is plain decoding.
        width: Most children of a node.
        algorithm: Name of the tree algorithm.
        max_rounds: Most rounds of one `decode`.
        implementation: Of tree attention; None picks the best.
    """

    target: ModelConfig
    proposer: Proposer | None = None
    bucket: int = 1
    width: int = 7
    algorithm: str = "accum_logp"
    max_rounds: int = 32
    implementation: str | None = None

    @property
    def depth(self) -> int:
        """D, the largest depth of this decoder's trees; 0 in plain decoding."""
        return self.proposer.depth if self.proposer is not None and self.bucket > 1 else 0

    def empty_state(
        self, slots: int, *, num_pages: int, pages_per_slot: int, page_size: int, dtype: jnp.dtype
    ) -> DecodeState:
        """A state whose slots are all free.

        Args:
            slots: B.
            num_pages: P, pages in the pool that the slots share.
            pages_per_slot: T, so that a slot holds at most ``T * page_size`` tokens.
            page_size: Tokens in a page.
            dtype: Of the stores: the weights' dtype.
        """
        proposer = self.proposer
        return DecodeState(
            stores=empty_stores(self.target, num_pages, page_size, dtype),
            proposer=None if proposer is None else proposer.empty_state(num_pages, page_size, dtype),
            slots=Slots(jnp.full((slots, pages_per_slot), num_pages, jnp.int32), jnp.zeros(slots, jnp.int32)),
            anchors=jnp.zeros(slots, jnp.int32),
            active=jnp.zeros(slots, bool),
            settings=SlotSettings(
                sampling=Sampling.greedy(slots),
                budget=jnp.ones(slots, jnp.int32),
                depth=jnp.zeros(slots, jnp.int32),
                remaining=jnp.zeros(slots, jnp.int32),
                stop_bits=jnp.zeros((slots, -(-self.target.vocab_size // 32)), jnp.uint32),
            ),
        )

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def insert(
        self,
        state: DecodeState,
        slot: Int[Array, ""],
        pages: Int[Array, "T"],
        settings: SlotSettings,
    ) -> DecodeState:
        """Hands a free slot to a request; the other slots keep their state. ``state`` is donated.

        Args:
            state: The state.
            slot: Which slot.
            pages: The request's pages, padded with P.
            settings: The request's settings, without the slot axis.
        """
        return replace(
            state,
            slots=Slots(state.slots.block_tables.at[slot].set(pages), state.slots.lengths.at[slot].set(0)),
            active=state.active.at[slot].set(False),
            settings=jax.tree.map(lambda all_, own: all_.at[slot].set(own), state.settings, settings),
        )

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def prefill(
        self,
        weights: DecodeWeights,
        state: DecodeState,
        slot: Int[Array, ""],
        tokens: Int[Array, "C"],
        count: Int[Array, ""],
        is_last: Bool[Array, ""],
    ) -> tuple[DecodeState, Int[Array, ""]]:
        """Commits one chunk of a prompt to a slot while the others keep their state. ``state`` is donated.

        Every token of the chunk enters the target's stores and the proposer's state. After the last chunk the
        target's choice becomes the slot's anchor and the slot decodes, unless that token already ends it.

        Args:
            weights: The parameters.
            state: The state.
            slot: Which slot.
            tokens: The chunk; what lies behind ``count`` is padding.
            count: Tokens of the chunk, at least 1.
            is_last: Whether the prompt ends here.

        Returns:
            The state, and the first generated token (meaningful after the last chunk).
        """
        target = bind(self.target, weights.target)
        own = jax.tree.map(lambda x: x[slot][None], state.slots)
        settings = jax.tree.map(lambda x: x[slot][None], state.settings)
        chunk = tokens.shape[0]
        depths = jnp.arange(chunk, dtype=jnp.int32)[None, :]
        attend = attend_over(
            state.stores, own, causal_bits(1, chunk), depths, implementation=self.implementation
        )
        output = target(tokens[None], own.lengths[:, None] + depths, attend, taps=self._taps)
        count = count[None]
        proposer_state = state.proposer
        if self.proposer is not None:
            proposer_state = self.proposer.commit(weights.proposer, state.proposer, output.taps, own, count)
        last_row = jnp.take_along_axis(output.hidden, count[:, None, None] - 1, axis=1)
        choice = choose(
            target.logits(last_row),
            jnp.zeros((1, 1), jnp.int32),
            own.lengths + count,
            settings.sampling,
            max_depth=0,
        )
        finished = _is_stop(choice, settings.stop_bits)[0, 0] | (settings.remaining[0] <= 1)
        anchor = choice[0, 0]
        state = replace(
            state,
            stores=commit(state.stores, output.stash, own, count),
            proposer=proposer_state,
            slots=state.slots._replace(lengths=state.slots.lengths.at[slot].add(count[0])),
            anchors=state.anchors.at[slot].set(anchor),
            active=state.active.at[slot].set(is_last & ~finished),
            settings=state.settings._replace(
                remaining=state.settings.remaining.at[slot].add(-is_last.astype(jnp.int32))
            ),
        )
        return state, anchor

    def round(self, weights: DecodeWeights, state: DecodeState) -> tuple[DecodeState, RoundRecord]:
        """One round of speculation over all slots; those that are not active keep their state."""
        target = bind(self.target, weights.target)
        tree = self._draft(weights, state, target)
        attend = attend_over(
            state.stores,
            state.slots,
            ancestor_bits(tree.parents),
            tree.depths,
            implementation=self.implementation,
        )
        # Siblings share their position: it is their depth, not their index, that counts.
        positions = state.slots.lengths[:, None] + tree.depths
        output = target(tree.tokens, positions, attend, taps=self._taps)
        choices = choose(
            target.logits(output.hidden),
            tree.depths,
            state.slots.lengths + 1,
            state.settings.sampling,
            max_depth=self.depth,
        )
        path, length, bonus = accept(tree, choices, max_depth=self.depth)
        count = jnp.where(state.active, length + 1, 0)
        # The choice at every node of the path is the next one's token, and at the last node the bonus.
        tokens = jnp.take_along_axis(choices, jnp.maximum(path, 0), axis=1)
        tokens = jnp.where(jnp.arange(self.depth + 1)[None, :] < count[:, None], tokens, -1)

        proposer_state = state.proposer
        if self.proposer is not None:
            taps = jnp.take_along_axis(output.taps, jnp.maximum(path, 0)[:, :, None], axis=1)
            proposer_state = self.proposer.commit(weights.proposer, state.proposer, taps, state.slots, count)
        remaining = state.settings.remaining - count
        stopped = jnp.any(_is_stop(tokens, state.settings.stop_bits), axis=1)
        state = replace(
            state,
            stores=commit(state.stores, select_rows(output.stash, path), state.slots, count),
            proposer=proposer_state,
            slots=state.slots._replace(lengths=state.slots.lengths + count),
            anchors=jnp.where(state.active, bonus, state.anchors),
            active=state.active & ~stopped & (remaining > 0),
            settings=state.settings._replace(remaining=remaining),
        )
        sizes = jnp.where(count > 0, tree.num_nodes, 0)
        return state, RoundRecord(tokens, count, sizes)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def decode(
        self, weights: DecodeWeights, state: DecodeState, rounds: Int[Array, ""]
    ) -> tuple[DecodeState, RoundRecord]:
        """Runs up to ``rounds`` rounds without returning to the host. ``state`` is donated.

        Args:
            weights: The parameters.
            state: The state.
            rounds: How many rounds, at most ``max_rounds``; fewer run when no slot is active any more.

        Returns:
            The state, and the records ``[max_rounds, ...]`` with counts of 0 for rounds that did not run.
        """
        batch = state.anchors.shape[0]
        records = RoundRecord(
            tokens=jnp.full((self.max_rounds, batch, self.depth + 1), -1, jnp.int32),
            counts=jnp.zeros((self.max_rounds, batch), jnp.int32),
            tree_sizes=jnp.zeros((self.max_rounds, batch), jnp.int32),
        )

        def goes_on(carry: tuple[Array, DecodeState, RoundRecord]) -> Array:
            done, state, _ = carry
            return (done < jnp.minimum(rounds, self.max_rounds)) & jnp.any(state.active)

        def step(
            carry: tuple[Array, DecodeState, RoundRecord],
        ) -> tuple[Array, DecodeState, RoundRecord]:
            done, state, records = carry
            state, record = self.round(weights, state)
            records = jax.tree.map(lambda all_, one: all_.at[done].set(one), records, record)
            return done + 1, state, records

        _, state, records = jax.lax.while_loop(goes_on, step, (jnp.int32(0), state, records))
        return state, records

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def release(self, state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
        """Frees a slot: it no longer decodes and no longer names a page. ``state`` is donated."""
        num_pages = state.stores[0].k.shape[0]
        return replace(
            state,
            slots=Slots(
                state.slots.block_tables.at[slot].set(num_pages),
                state.slots.lengths.at[slot].set(0),
            ),
            active=state.active.at[slot].set(False),
            # A greedy slot: what it sampled by must not keep the batch from its greedy path.
            settings=state.settings._replace(
                sampling=state.settings.sampling._replace(
                    temperature=state.settings.sampling.temperature.at[slot].set(0.0)
                )
            ),
        )

    @property
    def _taps(self) -> tuple[int, ...]:
        return () if self.proposer is None else self.proposer.taps

    def _draft(self, weights: DecodeWeights, state: DecodeState, target: Transformer) -> TokenTree:
        """The round's tree; in bucket 1 the anchor alone."""
        if self.proposer is None or self.bucket == 1:
            return root_tree(state.anchors, 1)
        logits = self.proposer.propose(weights.proposer, state.proposer, target, state.anchors, state.slots)
        candidates = top_candidates(logits, self.width)
        return grow_tree(
            candidates,
            state.anchors,
            get_algorithm(self.algorithm)(candidates),
            state.settings.budget,
            state.settings.depth,
            num_nodes=self.bucket,
        )


def _is_stop(tokens: Int[Array, "B K"], stop_bits: UInt32[Array, "B words"]) -> Bool[Array, "B K"]:
    """Which tokens end their slot; -1 is no token."""
    words = jnp.take_along_axis(stop_bits, jnp.maximum(tokens, 0) // 32, axis=1)
    bits = (words >> (jnp.maximum(tokens, 0) % 32).astype(jnp.uint32)) & 1
    return (bits == 1) & (tokens >= 0)
