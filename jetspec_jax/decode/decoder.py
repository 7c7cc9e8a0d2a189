"""The decoder: slots, prefill, and dispatches of many rounds, for the engine and for custom loops.

Shapes: B slots, L live slots, N nodes (the bucket), D draft depth, C tokens of a chunk, T pages per slot;
P pages of the pool, or prompts of a prefill.
"""

import functools
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
    """The static settings of a decoder, with methods that run its programs; see also `Round`.

    A custom loop::

        decoder = TreeDecoder(target.config, DraftHeadProposer(head.config), bucket=64)
        weights = DecodeWeights(target.weights, head.weights)
        state = decoder.empty_state(slots, num_pages=..., pages_per_slot=..., page_size=..., dtype=...)
        settings = SlotSettings.of(params, stop_ids, ...)
        state = decoder.insert(state, slot, pages, settings, prompt[-1], length, active)
        state = decoder.prefill(weights, state, slots, tokens, counts, ready)
        state, records = decoder.decode(weights, state, rounds, live)

    Methods that take and return a state donate it, except those of `Round`.

    Attributes:
        max_rounds: Most rounds of one `decode`. With 1, every `decode` runs one round, and its launch waits
            for nothing; that of a loop, which may end early, waits until its rounds are over.

    Raises:
        ValueError: A setting is out of range, or the proposer does not fit the target or the mesh.
        TypeError: A setting has a wrong type.
    """

    _: KW_ONLY
    max_rounds: int = 256

    def __post_init__(self) -> None:
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
    ) -> DecodeState:
        """As `Models.empty_state`, with arrays for adjustments if the decoder has them."""
        sizes = {"num_pages": num_pages, "pages_per_slot": pages_per_slot, "page_size": page_size}
        state = super().empty_state(slots, **sizes, dtype=dtype)
        return replace(state, adjust=self.adjustments(slots)) if self.adjusts else state

    def adjustments(self, slots: int) -> Adjustments:
        """Empty logit adjustments of all slots."""
        where = None if self.mesh is None else NamedSharding(self.mesh, WHOLE)
        return _adjustments_program(slots, self.target.vocab_size, where)()

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
        """Assigns a slot to a request: see `jetspec_jax.decode.state.insert`. ``state`` is donated."""
        kept, state = _split_off(state)
        state = _rejoin(kept, insert(state, slot, pages, settings, anchor, length, active))
        return self.adjust(state, slot, None)

    def adjust(
        self, state: DecodeState, slot: Int[ArrayLike, ""], adjustments: Adjustments | None
    ) -> DecodeState:
        """Sets the logit adjustments of a slot's request. ``state`` is donated.

        Args:
            state: The state.
            slot: The slot, after `insert`.
            adjustments: The adjustments without the slot axis; None means none.

        Raises:
            ValueError: There are adjustments, and the state has no arrays for them.
        """
        if state.adjust is None:
            if adjustments is not None:
                raise ValueError("this state was made by a decoder without adjustments of logits")
            return state
        if adjustments is None:
            return replace(state, adjust=forget_adjustments(state.adjust, slot))
        return replace(state, adjust=put_adjustments(state.adjust, slot, adjustments))

    def grow(
        self, state: DecodeState, slots: Int[ArrayLike, "L"], pages: Int[ArrayLike, "L T"]
    ) -> DecodeState:
        """Adds pages to slots: see `jetspec_jax.decode.state.grow`. ``state`` is donated."""
        kept, state = _split_off(state)
        return _rejoin(kept, grow(state, slots, pages))

    def release(self, state: DecodeState, slot: Int[ArrayLike, ""]) -> DecodeState:
        """Frees a slot: see `jetspec_jax.decode.state.release`. ``state`` is donated."""
        kept, state = _split_off(state)
        return _rejoin(kept, release(state, slot))

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
            rounds: Number of rounds, at most ``max_rounds``; the loop ends early if no slot decodes. Ignored
                if ``max_rounds`` is 1. A slot pauses if its next round could commit more tokens than its
                pages hold, until `grow`.
            live: The slots that may decode, unique and in any order; other slots keep their state and cost
                nothing. Each number of live slots is a separate program. None means all B.

        Returns:
            The state, and the records ``[max_rounds, L, ...]`` of the live slots in their order, with no
            tokens for rounds that did not run.
        """
        # JAX applies compiler options only to the outermost program, so inside another one they are dropped.
        inside = isinstance(state.anchors, Tracer)
        program = self.program.__wrapped__ if inside else self.program
        selection = () if live is None else (live,)
        if self.adjusts:
            return program(self, weights, state, rounds, *selection)
        # Without adjustments, the program without their arrays runs.
        kept = state.adjust
        state, records = program(self, weights, replace(state, adjust=None), rounds, *selection)
        return replace(state, adjust=kept), records

    def lower(self, weights: DecodeWeights, state: DecodeState, *live: Any) -> jax.stages.Lowered:
        """The program of `decode`, lowered for arguments of which only shapes and placements matter."""
        state = state if self.adjusts else replace(state, adjust=None)
        return self.program.lower(self, weights, state, jax.ShapeDtypeStruct((), jnp.int32), *live)

    @property
    def program(self) -> Any:
        """The jitted function of `decode`, with the decoder as its first argument; for ahead-of-time use."""
        return jit_rounds(_decode, self.bucket, self.mesh)


@functools.cache
def _adjustments_program(slots: int, vocab_size: int, where: NamedSharding | None) -> Any:
    return jax.jit(functools.partial(Adjustments.empty, slots, vocab_size), out_shardings=where)


def _split_off(state: DecodeState) -> tuple[tuple[Stores, Adjustments | None], DecodeState]:
    """The arrays that programs for slots do not need, and the state without them."""
    stores, state = split(state)
    return (stores, state.adjust), replace(state, adjust=None)


def _rejoin(kept: tuple[Stores, Adjustments | None], state: DecodeState) -> DecodeState:
    """The inverse of `_split_off`."""
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
        # Values that do not change are computed before the loop; XLA would recompute some in every round.
        if decoder.proposer is not None:
            weights = weights._replace(proposer=decoder.proposer.prepare(weights.proposer))

        def step(state: DecodeState) -> tuple[DecodeState, RoundRecord]:
            return decoder.round(weights, state)

        picked = pick(state, live[0]) if live else state
        picked, records = repeat_rounds(step, decoder.decodes, picked, rounds, most=decoder.max_rounds)
        return put(state, live[0], picked) if live else picked, records

    return decoder.on_mesh(dispatch)(weights, state, rounds, *(() if live is None else (live,)))
