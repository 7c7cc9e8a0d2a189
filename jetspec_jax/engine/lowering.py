"""Compiles an engine's programs for shapes and placements alone, without its arrays.

JAX keeps what it compiles so, and a later call with arrays of these shapes and placements uses it.
"""

import atexit
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.prefill import prefill
from jetspec_jax.decode.scoring import lower_scoring
from jetspec_jax.decode.state import DecodeState, DecodeWeights
from jetspec_jax.decode.three_programs import compile_all
from jetspec_jax.device.mesh import abstract
from jetspec_jax.engine.compiler import end_all
from jetspec_jax.engine.programs import KINDS, PREFILL, SCORES, Kind, Program
from jetspec_jax.engine.round_kinds import decoder_for
from jetspec_jax.engine.tracing import TRACING

# JAX is already imported, so its own exit functions run after this one.
atexit.register(end_all)


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
        self._dtype = dtype
        self.update(decoders, weights, state)

    def update(self, decoders: Mapping[int, TreeDecoder], weights: DecodeWeights, state: DecodeState) -> None:
        """Replaces decoders and shapes, for programs that are compiled from now on."""
        self._decoders, self._models = dict(decoders), next(iter(decoders.values())).models
        self._weights: DecodeWeights = jax.tree.map(abstract, weights)
        self._state: DecodeState = jax.tree.map(abstract, state)

    def compile(self, program: Program) -> None:
        """Compiles a program; may be called in several threads at once."""
        kind = KINDS.get(program.kind, Kind())
        all_live = program.slots == self._state.active.shape[0]
        live = () if all_live else (jax.ShapeDtypeStruct((program.slots,), jnp.int32),)
        rounds = self._weights, self._state, *live
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
        rows, state = jax.ShapeDtypeStruct, replace(self._state, adjust=None)
        each = rows((prompts,), jnp.int32)
        chunk = each, rows((prompts, size), jnp.int32), each, rows((prompts,), jnp.bool_)
        return prefill.lower(self._models, self._weights, state, *chunk)
