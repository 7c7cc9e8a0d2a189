"""Log-probabilities of a prompt's tokens, from a second forward with separate stores.

Prefill computes no logits, and skips tokens that are cached. Few requests ask for these log-probabilities, so
only they pay for them. Shapes: C tokens of a chunk, T prompt tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.cache.stores import after_forward, chain_path, commit
from jetspec_jax.decode.logprobs import Logprobs, logprobs_of
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.state import DecodeState, DecodeWeights
from jetspec_jax.device.mesh import abstract, on_all_devices
from jetspec_jax.models import Weights, bind

#: Tokens of a chunk, all of which get logits.
SCORED_CHUNK = 64


def scored_pages(length: int) -> int:
    """Pages for a prompt of ``length`` tokens: a power of two, so that few programs serve all lengths."""
    return 1 << (-(-length // PAGE_SIZE) - 1).bit_length()


def empty_scoring_state(models: Models, length: int, dtype: jnp.dtype) -> DecodeState:
    """A state of the target with one slot for a prompt of ``length`` tokens."""
    pages = scored_pages(length)
    sizes = {"num_pages": pages, "pages_per_slot": pages, "page_size": PAGE_SIZE, "dtype": dtype}
    state = models.empty_state(1, **sizes)
    table = on_all_devices(models.mesh, np.arange(pages, dtype=np.int32)[None])
    return dataclasses.replace(state, slots=state.slots._replace(block_tables=table))


def score_prompt(
    models: Models, weights: Weights, prompt: Int32[np.ndarray, "T"], dtype: jnp.dtype
) -> list[Logprobs]:
    """Log-probabilities of a prompt's tokens except the first, in chunks; does not wait for the device.

    The models have no proposer; the prompt has at least two tokens. Returns ``[1, C, ...]`` for each chunk,
    the last one padded.
    """
    context, found = prompt[:-1], []
    state = empty_scoring_state(models, len(context), dtype)
    for start in range(0, len(context), SCORED_CHUNK):
        count = min(SCORED_CHUNK, len(context) - start)
        rows = np.zeros((2, SCORED_CHUNK), np.int32)
        rows[:, :count] = prompt[start : start + count], prompt[start + 1 : start + 1 + count]
        state, rows_logprobs = score_chunk(models, DecodeWeights(weights), state, *rows, np.int32(count))
        found.append(rows_logprobs)
    return found


def lower_scoring(models: Models, weights: Weights, pages: int, dtype: jnp.dtype) -> jax.stages.Lowered:
    """The program of `score_prompt` for prompts of ``pages`` pages, lowered.

    ``weights`` may be shapes; ``pages`` is a result of `scored_pages`.
    """
    # Arrays, not only their shapes: so the programs that make them are compiled too.
    state = jax.tree.map(abstract, empty_scoring_state(models, pages * PAGE_SIZE, dtype))
    tokens = jax.ShapeDtypeStruct((SCORED_CHUNK,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return score_chunk.lower(models, DecodeWeights(weights), state, tokens, tokens, count)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def score_chunk(
    models: Models,
    weights: DecodeWeights,
    state: DecodeState,
    tokens: Int[Array, "C"],
    following: Int[Array, "C"],
    count: Int[Array, ""],
) -> tuple[DecodeState, Logprobs]:
    """Commits a chunk; returns the log-probabilities of the tokens that follow each of its tokens."""

    def run(
        weights: DecodeWeights,
        state: DecodeState,
        tokens: Int[Array, "C"],
        following: Int[Array, "C"],
        count: Int[Array, ""],
    ) -> tuple[DecodeState, Logprobs]:
        target, counts = bind(models.target, weights.target), count[None]
        block = Block.chain(tokens[None], num_nodes=counts)
        attend = attend_over(state.stores, state.slots, block, implementation=models.implementation)
        output = target(block.tokens, block.positions(state.slots.lengths), attend)
        logprobs = logprobs_of(target.logits(output.hidden), following[None], models.target.vocab_size)
        written = after_forward(counts, logprobs.tokens.reshape(1, -1))
        path = chain_path(*block.tokens.shape)
        return dataclasses.replace(
            state,
            stores=commit(state.stores, state.slots, output.stash, path, written),
            slots=state.slots._replace(lengths=state.slots.lengths + counts),
        ), logprobs

    return models.on_mesh(run)(weights, state, tokens, following, count)
