"""Texts of a target, and a head's drafts at every token of them, as decoding would make them.

Every token is plain decoding's, whatever the tree, and a draft depends only on the tokens before its anchor
and on the request's noise, which its seed gives again. So one text has the drafts of any round.

Shapes: A anchors, D draft depth, K candidates, T tokens of a text.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jetspec_jax import DraftHeadProposer, Head, SamplingParams, Target, generate
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import empty_stores
from jetspec_jax.config import DraftScales, ModelConfig
from jetspec_jax.decode.proposer import candidates_of, scales_at
from jetspec_jax.device.mesh import WHOLE, everywhere
from jetspec_jax.device.partition import is_split, own_part, parameter_specs
from jetspec_jax.models import bind
from jetspec_jax.sampling.choice import gumbel_noise
from jetspec_jax.sampling.drafting import DraftScoring
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.tree import Candidates, Hints, Routing
from pallas_kernels import shards

# Anchors that draft at once.
DRAFTED = 64


class Text(NamedTuple):
    """A prompt and plain decoding's continuation.

    Attributes:
        tokens: The target's tokens, beyond the request's end by the depth of a tree: a round may overshoot.
        length: The request's tokens among ``tokens``.
        routing: The prompt's routing hints.
        params: The request's parameters, with its seed; logits are not adjusted.
    """

    prompt: list[int]
    tokens: list[int]
    length: int
    routing: Hints | None
    params: SamplingParams


class Drafts(NamedTuple):
    """The drafts at each anchor of some texts, and the target's continuations.

    Attributes:
        candidates: The draft rows of every anchor, text after text.
        following: The target's tokens after each anchor.
        routing: The routing hints of each anchor's prompt.
        counts: Tokens of each request, which are also its anchors: the prompt's last token, and all tokens
            except the last.
    """

    candidates: Candidates
    following: Int[np.ndarray, "A D"]
    routing: Routing
    counts: list[int]


def write_texts(
    target: Target,
    depth: int,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    routing: Sequence[Hints | None] | None = None,
    *,
    batch: int,
    implementation: str | None = None,
) -> list[Text]:
    """Decodes all prompts by plain decoding.

    Args:
        depth: Tokens beyond each request's end: the depth of a tree.
        params: Their parameters, with seeds.
        batch: The most prompts decoded at a time.
        implementation: Of tree attention; None picks the best.

    Raises:
        ValueError: A prompt, its answer and the depth of a tree do not fit into the context.
    """
    ends = set(target.eos_token_ids)
    most = [own.max_tokens or 0 for own in params]
    longer = [
        replace(own, max_tokens=count + depth, ignore_eos=True, stop_token_ids=None)
        for own, count in zip(params, most, strict=True)
    ]
    completions = generate(target, prompts, longer, max_slots=batch, implementation=implementation)
    texts = []
    columns = prompts, params, most, routing or [None] * len(most), completions
    for ids, own, count, hints, completion in zip(*columns, strict=True):
        tokens = list(completion.token_ids)
        stops = {*(own.stop_token_ids or ()), *(() if own.ignore_eos else ends)}
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        texts.append(Text(list(ids), tokens, min(end, count), hints, own))
    return texts


def draft_along(
    target: Target,
    head: Head,
    texts: Sequence[Text],
    count: int,
    *,
    scales: DraftScales | None = None,
    noise: bool = True,
    implementation: str | None = None,
) -> Drafts:
    """The ``count`` best draft tokens of every row, at every token that can be an anchor.

    Args:
        count: Candidates per draft row.
        scales: In place of the head's `draft_scales`; None means those of the head.
        noise: Whether rows are scored with the noise of the text's samples; else without it and scales.
        implementation: Of tree attention; None picks the best.
    """
    proposer = DraftHeadProposer(replace(head.config, draft_scales=None), implementation)
    ones = [1.0] * proposer.depth
    given = np.asarray((scales or head.config.draft_scales or ones) if noise else ones, np.float32)
    depth, most = proposer.depth, max(text.length for text in texts)
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    found, following = [], []
    for text in texts:
        ids = np.asarray([*text.prompt, *text.tokens], np.int32)
        padded = np.pad(ids, (0, -(-longest // PAGE_SIZE) * PAGE_SIZE - len(ids)))
        drafts = _drafts(
            target.config,
            target.mesh,
            proposer,
            target.weights,
            head.weights,
            padded,
            np.int32(len(text.prompt) - 1),
            Sampling.of(text.params if noise else replace(text.params, temperature=0.0)),
            given,
            anchors=most,
            count=count,
            implementation=implementation,
        )
        found.append(jax.tree.map(lambda rows, length=text.length: np.asarray(rows)[:length], drafts))
        places = len(text.prompt) + np.arange(text.length)[:, None] + np.arange(depth)[None, :]
        following.append(ids[places])
    counts = [text.length for text in texts]
    hints = [text.routing for text in texts for _ in range(text.length)]
    candidates = jax.tree.map(lambda *rows: np.concatenate(rows), *found)
    return Drafts(candidates, np.concatenate(following), Routing.of(hints, len(hints)), counts)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("anchors", "count", "implementation"))
def _drafts(
    config: ModelConfig,
    mesh: Mesh | None,
    proposer: DraftHeadProposer,
    weights: Any,
    head_weights: Any,
    ids: Int[Array, "T"],
    first: Int[Array, ""],
    sampling: Sampling,
    scales: Float[Array, "*bands D"],
    *,
    anchors: int,
    count: int,
    implementation: str | None,
) -> Candidates:
    """Candidates at ``anchors`` tokens from ``first`` on; one forward fills the head's context."""

    def run(weights, head_weights, ids, first, sampling, scales) -> Candidates:
        target, head = bind(config, weights), proposer.config
        block = Block.chain(ids[None])
        attend = attend_over(None, None, block, implementation=implementation)
        output = target(block.tokens, block.depths, attend, taps=proposer.taps)
        pages = jnp.arange(ids.size // PAGE_SIZE, dtype=jnp.int32)[None, :]
        slots = Slots.of(pages, jnp.zeros(1, jnp.int32))
        local = own_part(head.layers, mesh if mesh and is_split(head, mesh) else None)
        state = empty_stores(local, pages.size, PAGE_SIZE, target.embed_tokens[...].dtype)
        state = proposer.commit(head_weights, state, output.taps, slots, jnp.full(1, ids.size, jnp.int32))

        of_all = jax.tree.map(lambda value: jnp.broadcast_to(value, (DRAFTED, *value.shape)), sampling)
        depth, vocab = proposer.depth, config.vocab_size
        local = -(-vocab // shards.count())

        def draft(positions: Int[Array, "R"]) -> Candidates:
            # All slots read the same pages, each only the rows before its anchor.
            slots = Slots.of(jnp.broadcast_to(pages, (DRAFTED, pages.size)), positions)
            noise = gumbel_noise(of_all.key, positions + 1, depth, local=local, vocab_size=vocab)
            scoring = DraftScoring(of_all.temperature, noise, None, scales_at(scales, of_all.temperature))
            inputs = head_weights, state, target, ids[positions], slots
            return candidates_of(proposer, *inputs, count, depth, scoring)

        parts = -(-anchors // DRAFTED)
        positions = first + jnp.arange(parts * DRAFTED, dtype=jnp.int32).reshape(parts, DRAFTED)
        positions = jnp.minimum(positions, ids.size - 1)
        found = jax.lax.map(draft, positions)
        return jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:]), found)

    if mesh is not None:
        specs = parameter_specs(config, mesh), proposer.weight_specs(mesh), *[WHOLE] * 4
        run = everywhere(mesh, run, specs, WHOLE)
    return run(weights, head_weights, ids, first, sampling, scales)
