"""Decoding as a caller's own program would run it: slots, prefill, and dispatches of many rounds.

Shapes: B slots, L live ones, N nodes (the bucket), D draft depth, C tokens of a chunk, T pages per slot;
P pages of the pool, or prompts of a prefill.
"""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import Array, ArrayLike, Bool, Int

from jetspec_jax.decode.loop import jit_rounds, repeat_rounds
from jetspec_jax.decode.prefill import prefill
from jetspec_jax.decode.round import Round
from jetspec_jax.decode.state import (
    DecodeState,
    DecodeWeights,
    RoundRecord,
    SlotSettings,
    Stores,
    forget_adjustments,
    grow,
    insert,
    join,
    pick,
    put,
    put_adjustments,
    release,
    split,
)
from jetspec_jax.device.mesh import WHOLE
from jetspec_jax.sampling.adjust import Adjustments


@dataclass(frozen=True)
class TreeDecoder(Round):
    """The static settings of a decoder, with the programs that they make: see also `Round`.

    The loop in a program of one's own::

        decoder = TreeDecoder(target.config, DraftHeadProposer(head.config), bucket=64)
        weights = DecodeWeights(target.weights, head.weights)
        state = decoder.empty_state(slots, num_pages=..., pages_per_slot=..., page_size=..., dtype=...)
        settings = SlotSettings.of(params, stop_ids, ...)
        state = decoder.insert(state, slot, pages, settings, prompt[-1], length, active)
        state = decoder.prefill(weights, state, slots, tokens, counts, ready)
        state, records = decoder.decode(weights, state, rounds, live)

    All that take and return a state donate the one they are given, but for those of a round.

    Attributes:
        max_rounds: Most rounds of one `decode`.
    """

    _: KW_ONLY
    max_rounds: int = 256

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: A setting is out of its range.
        """
        super().__post_init__()
        if self.max_rounds < 1:
            raise ValueError(f"max_rounds must be at least 1, not {self.max_rounds}")

    def empty_state(
        self,
        slots: int,
        *,
        num_pages: int,
        pages_per_slot: int,
        page_size: int,
        dtype: jnp.dtype,
        bad_words: tuple[int, int] = (0, 0),
    ) -> DecodeState:
        """As `Models.empty_state`; where the decoder adjusts logits, with room for that.

        Of ``bad_words`` there may be so many, and so long ones: see `jetspec_jax.sampling.adjust.room_for`.
        """
        sizes = {"num_pages": num_pages, "pages_per_slot": pages_per_slot, "page_size": page_size}
        state = super().empty_state(slots, **sizes, dtype=dtype)
        return replace(state, adjust=self.adjustments(slots, bad_words)) if self.adjusts else state

    def adjustments(
        self, slots: int, bad_words: tuple[int, int] = (0, 0), before: Adjustments | None = None
    ) -> Adjustments:
        """What slots want of the logits, which is nothing, or what they did before, with more room.

        Args:
            slots: B.
            bad_words: As for `empty_state`; no less room than before.
            before: What the slots wanted before.
        """
        where = None if self.mesh is None else NamedSharding(self.mesh, WHOLE)

        def make(before: Adjustments | None) -> Adjustments:
            if before is None:
                return Adjustments.empty(slots, self.target.vocab_size, bad_words)
            return before.with_room_for(bad_words)

        return jax.jit(make, out_shardings=where)(before)

    def insert(
        self,
        state: DecodeState,
        slot: Int[ArrayLike, ""],
        pages: Int[ArrayLike, "T"],
        settings: SlotSettings,
        anchor: Int[ArrayLike, ""],
        length: Int[ArrayLike, ""],
        active: Bool[ArrayLike, ""],
    ) -> DecodeState:
        """Hands a slot to a request: see `jetspec_jax.decode.state.insert`. ``state`` is donated."""
        kept, state = _apart(state)
        state = _together(kept, insert(state, slot, pages, settings, anchor, length, active))
        return self.adjust(state, slot, None)

    def adjust(self, state: DecodeState, slot: Int[ArrayLike, ""], own: Adjustments | None) -> DecodeState:
        """Says what the request that has got a slot wants of the logits. ``state`` is donated.

        Args:
            state: The state.
            slot: Which slot; `insert` has handed it over.
            own: What it wants, without the slot axis; None is nothing.

        Raises:
            ValueError: It wants something, and the state has no arrays for that.
        """
        if state.adjust is None:
            if own is not None:
                raise ValueError("no decoder that adjusts logits has made this state")
            return state
        if own is None:
            return replace(state, adjust=forget_adjustments(state.adjust, slot))
        return replace(state, adjust=put_adjustments(state.adjust, slot, own))

    def grow(
        self, state: DecodeState, slots: Int[ArrayLike, "L"], pages: Int[ArrayLike, "L T"]
    ) -> DecodeState:
        """Gives slots more pages: see `jetspec_jax.decode.state.grow`. ``state`` is donated."""
        kept, state = _apart(state)
        return _together(kept, grow(state, slots, pages))

    def release(self, state: DecodeState, slot: Int[ArrayLike, ""]) -> DecodeState:
        """Frees a slot: see `jetspec_jax.decode.state.release`. ``state`` is donated."""
        kept, state = _apart(state)
        return _together(kept, release(state, slot))

    def prefill(
        self,
        weights: DecodeWeights,
        state: DecodeState,
        slots: Int[ArrayLike, "P"],
        tokens: Int[ArrayLike, "P C"],
        counts: Int[ArrayLike, "P"],
        ready: Bool[ArrayLike, "P"],
    ) -> DecodeState:
        """Commits chunks of prompts: see `jetspec_jax.decode.prefill.prefill`. ``state`` is donated."""
        bare = replace(state, adjust=None)
        after = prefill(self.models, weights, bare, slots, tokens, counts, ready)
        return replace(after, adjust=state.adjust)

    def decode(
        self,
        weights: DecodeWeights,
        state: DecodeState,
        rounds: Int[ArrayLike, ""],
        live: Int[ArrayLike, "L"] | None = None,
    ) -> tuple[DecodeState, RoundRecord]:
        """Runs up to ``rounds`` rounds without returning to the host. ``state`` is donated.

        Args:
            weights: The parameters.
            state: The state.
            rounds: How many rounds, at most ``max_rounds``; fewer run when no slot decodes any more. One
                whose next round could commit more than its pages hold pauses until it gets more: see `grow`.
            live: The slots that may decode, each once and in any order; the others keep their state and cost
                nothing. Every number of them is a program. None is all B.

        Returns:
            The state, and the records ``[max_rounds, L, ...]`` of the live slots in their order, with no
            tokens for rounds that did not run.
        """
        # JAX takes compiler options of the outermost program alone: inside of another the loop is part of it.
        inside = isinstance(state.anchors, Tracer)
        program = self.program.__wrapped__ if inside else self.program
        own = () if live is None else (live,)
        if self.adjusts:
            return program(self, weights, state, rounds, *own)
        # A batch in which nobody wants anything of the logits runs the program that knows nothing of it.
        kept = state.adjust
        state, records = program(self, weights, replace(state, adjust=None), rounds, *own)
        return replace(state, adjust=kept), records

    @property
    def program(self) -> Any:
        """The jitted function behind `decode`, with the decoder as its first argument: to compile ahead."""
        return jit_rounds(_decode, self.bucket)


def _apart(state: DecodeState) -> tuple[tuple[Stores, Adjustments | None], DecodeState]:
    """What programs that hand slots over do not look at, and the state without it."""
    stores, state = split(state)
    return (stores, state.adjust), replace(state, adjust=None)


def _together(kept: tuple[Stores, Adjustments | None], state: DecodeState) -> DecodeState:
    """The inverse of `_apart`."""
    return replace(join(kept[0], state), adjust=kept[1])


def _decode(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    rounds: Int[ArrayLike, ""],
    live: Int[ArrayLike, "L"] | None = None,
) -> tuple[DecodeState, RoundRecord]:
    def dispatch(
        weights: DecodeWeights, state: DecodeState, rounds: Int[Array, ""], *live: Int[Array, "L"]
    ) -> tuple[DecodeState, RoundRecord]:
        # What no round changes is made before the loop: XLA would make some of it in every round.
        if decoder.proposer is not None:
            weights = weights._replace(proposer=decoder.proposer.prepare(weights.proposer))

        def step(state: DecodeState) -> tuple[DecodeState, RoundRecord]:
            return decoder.round(weights, state)

        own = pick(state, live[0]) if live else state
        own, records = repeat_rounds(step, decoder.decodes, own, rounds, most=decoder.max_rounds)
        return put(state, live[0], own) if live else own, records

    return decoder.on_mesh(dispatch)(weights, state, rounds, *(() if live is None else (live,)))
