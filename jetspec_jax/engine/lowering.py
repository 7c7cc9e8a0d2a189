"""Compiles an engine's programs for shapes and placements alone, without its arrays.

JAX keeps what it compiles so, and a later call with arrays of these shapes and placements uses it.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.prefill import prefill
from jetspec_jax.decode.scoring import lower_scoring
from jetspec_jax.decode.state import DecodeState, DecodeWeights
from jetspec_jax.decode.three_programs import compile_all
from jetspec_jax.device.mesh import WHOLE, abstract
from jetspec_jax.engine.programs import KINDS, PREFILL, SCORES, Kind, Program
from jetspec_jax.engine.tracing import TRACING
from jetspec_jax.sampling.adjust import Adjustments

#: Most rounds of a dispatch with log-probabilities: its records are large, and fetched whole.
LOGPROBS_ROUNDS = 32


class Lowering:
    """The shapes and placements of an engine's arrays, and how its programs are compiled for them.

    It keeps no arrays, so that a thread that compiles keeps no stores and no weights alive.
    """

    def __init__(
        self,
        decoders: Mapping[int, TreeDecoder],
        weights: DecodeWeights,
        state: DecodeState,
        dtype: jnp.dtype,
    ):
        """Keeps shapes, and the dtype of the stores."""
        self._dtype, self._decoders = dtype, dict(decoders)
        self._models = next(iter(decoders.values())).models
        self._weights: DecodeWeights = jax.tree.map(abstract, weights)
        self._state: DecodeState = jax.tree.map(abstract, state)

    def compile(self, program: Program) -> None:
        """Compiles a program; may be called in several threads at once."""
        kind = KINDS.get(program.kind, Kind())
        all_live = program.slots == self._state.active.shape[0]
        live = () if all_live else (jax.ShapeDtypeStruct((program.slots,), jnp.int32),)
        state = self._state
        if kind.adjusts:
            state = replace(state, adjust=abstract_adjustments(self._models, state.active.shape[0]))
        rounds = self._weights, state, *live
        if kind.masked:
            compile_all(decoder_for(self._decoders[program.size], kind), *rounds, tracing=TRACING)
            return
        with TRACING:
            if program.kind == PREFILL:
                lowered = self._prefill(program.slots, program.size)
            elif program.kind == SCORES:
                target = self._models.alone, self._weights.target
                lowered = lower_scoring(*target, program.size, self._dtype)
            else:
                lowered = decoder_for(self._decoders[program.size], kind).lower(*rounds)
        lowered.compile()

    def _prefill(self, prompts: int, size: int) -> jax.stages.Lowered:
        rows = jax.ShapeDtypeStruct
        each = rows((prompts,), jnp.int32)
        chunk = each, rows((prompts, size), jnp.int32), each, rows((prompts,), jnp.bool_)
        return prefill.lower(self._models, self._weights, self._state, *chunk)


def abstract_adjustments(models: Models, slots: int) -> Adjustments:
    """Shapes and placements of the logit adjustments of an engine's slots: see `TreeDecoder.adjustments`."""
    where = None if models.mesh is None else NamedSharding(models.mesh, WHOLE)
    arrays = jax.eval_shape(lambda: Adjustments.empty(slots, models.target.vocab_size))
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=where), arrays)


def decoder_for(decoder: TreeDecoder, kind: Kind) -> TreeDecoder:
    """The decoder with the optional parts of rounds of a kind."""
    most = min(decoder.max_rounds, LOGPROBS_ROUNDS) if kind.logprobs else decoder.max_rounds
    return replace(decoder, adjusts=kind.adjusts, logprobs=kind.logprobs, max_rounds=most)
