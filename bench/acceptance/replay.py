"""Rounds replayed along texts that are known: what trees of any kind would have accepted, without decoding.

Every token is plain decoding's, whatever the tree, and a draft depends on the tokens before its anchor alone.
So one text and the drafts below each of its tokens tell the rounds of every algorithm, and the first nodes of
a large tree those of every smaller budget.

Shapes: A anchors, D draft depth, K candidates, C budgets, T tokens of a text.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from bench.common.pair import Pair
from bench.common.workload import Workload
from jetspec_jax import DraftHeadProposer, generate
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import empty_stores
from jetspec_jax.config import ModelConfig
from jetspec_jax.device.mesh import WHOLE, everywhere
from jetspec_jax.device.partition import is_split, own_part, parameter_specs
from jetspec_jax.models import bind
from jetspec_jax.tree import (
    Algorithm,
    Candidates,
    Hints,
    Routing,
    accept,
    bucket_for,
    grow_tree,
    plan_of,
    reach_of,
    top_candidates,
)

# Anchors that draft at the same time, and that grow trees at the same time.
DRAFTED, GROWN = 64, 512


class Text(NamedTuple):
    """A prompt and what plain decoding makes of it.

    Attributes:
        prompt: Tokens of the prompt.
        tokens: The target's own, beyond the request's end by the depth of a tree: a round may overshoot.
        length: Of these, the request's.
        routing: What is known of the prompt.
    """

    prompt: list[int]
    tokens: list[int]
    length: int
    routing: Hints | None


class Drafts(NamedTuple):
    """The drafts below each anchor of some texts, and what the target went on with.

    Attributes:
        candidates: The draft rows of every anchor, text after text.
        following: The target's own tokens after each anchor.
        routing: What is known of each anchor's prompt.
        counts: Tokens of each request. As many anchors are its own: the prompt's last token, and all of these
            but the last.
    """

    candidates: Candidates
    following: Int[np.ndarray, "A D"]
    routing: Routing
    counts: list[int]


def write_texts(pair: Pair, work: Workload, *, batch: int, implementation: str | None) -> list[Text]:
    """Decodes all prompts plainly.

    Raises:
        ValueError: A prompt leaves no room for its answer and the depth of a tree after it.
    """
    depth, ends = pair.head.config.depth, set(pair.target.eos_token_ids)
    most = [own.max_tokens or 0 for own in work.params]
    longer = [
        replace(own, max_tokens=count + depth, ignore_eos=True, stop_token_ids=None)
        for own, count in zip(work.params, most, strict=True)
    ]
    completions = generate(pair.target, work.ids, longer, max_slots=batch, implementation=implementation)
    texts = []
    columns = work.ids, work.params, most, work.routing, completions
    for ids, own, count, hints, completion in zip(*columns, strict=True):
        tokens = list(completion.token_ids)
        stops = {*(own.stop_token_ids or ()), *(() if own.ignore_eos else ends)}
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        texts.append(Text(list(ids), tokens, min(end, count), hints))
    return texts


def draft_along(pair: Pair, texts: Sequence[Text], count: int, *, implementation: str | None) -> Drafts:
    """The best ``count`` draft tokens of every row, below every token that may be an anchor."""
    proposer = DraftHeadProposer(pair.head.config, implementation)
    depth, most = proposer.depth, max(text.length for text in texts)
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    found, following = [], []
    for text in texts:
        ids = np.asarray([*text.prompt, *text.tokens], np.int32)
        padded = np.pad(ids, (0, -(-longest // PAGE_SIZE) * PAGE_SIZE - len(ids)))
        drafts = _drafts(
            pair.target.config,
            pair.target.mesh,
            proposer,
            pair.target.weights,
            pair.head.weights,
            padded,
            np.int32(len(text.prompt) - 1),
            anchors=most,
            count=count,
            implementation=implementation,
        )
        found.append(jax.tree.map(lambda rows, own=text.length: np.asarray(rows)[:own], drafts))
        places = len(text.prompt) + np.arange(text.length)[:, None] + np.arange(depth)[None, :]
        following.append(ids[places])
    counts = [text.length for text in texts]
    hints = [text.routing for text in texts for _ in range(text.length)]
    candidates = jax.tree.map(lambda *own: np.concatenate(own), *found)
    return Drafts(candidates, np.concatenate(following), Routing.of(hints, len(hints)), counts)


def accepted_along(
    drafts: Drafts, algorithm: Algorithm, candidates: int, budgets: Sequence[int]
) -> Int[np.ndarray, "A C"]:
    """Drafted tokens that a round at each anchor has accepted with each budget.

    Args:
        drafts: The drafts.
        algorithm: How trees grow; all candidates may be children of one node.
        candidates: Tokens of a row that are looked at.
        budgets: Nodes of the trees, root included.
    """
    rows = len(drafts.following)
    found = []
    for at in range(0, rows, GROWN):
        # The last part begins earlier: all are of one shape.
        part = slice(max(min(at, rows - GROWN), 0), at + GROWN)
        own = jax.tree.map(lambda array, part=part: array[part], drafts[:3])
        accepted = _accepted(*own, algorithm=algorithm, count=candidates, budgets=tuple(budgets))
        found.append(np.asarray(accepted)[at - part.start :])
    return np.concatenate(found)


def rounds_along(accepted: Int[np.ndarray, "A"], counts: Sequence[int]) -> list[list[int]]:
    """Tokens that each round of each text commits, the last of which may overshoot its end.

    Example: of a text of 6 tokens with 1, 0, 2, 0, 0, 0 accepted, the round at the prompt's last token
    commits 2 tokens, the one at the second of them 3, and the one after these the last.

    Args:
        accepted: Drafted tokens accepted at each anchor, text after text.
        counts: Anchors of each text.
    """
    texts, first = [], 0
    for count in counts:
        own, at = [], 0
        while at < count:
            own.append(1 + int(accepted[first + at]))
            at += own[-1]
        texts.append(own)
        first += count
    return texts


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("anchors", "count", "implementation"))
def _drafts(
    config: ModelConfig,
    mesh: Mesh | None,
    proposer: DraftHeadProposer,
    weights: Any,
    head_weights: Any,
    ids: Int[Array, "T"],
    first: Int[Array, ""],
    *,
    anchors: int,
    count: int,
    implementation: str | None,
) -> Candidates:
    """Candidates below so many tokens from ``first`` on: one forward shows the head the whole text."""

    def run(weights: Any, head_weights: Any, ids: Int[Array, "T"], first: Int[Array, ""]) -> Candidates:
        target, head = bind(config, weights), proposer.config
        block = Block.chain(ids[None])
        attend = attend_over(None, None, block, implementation=implementation)
        taps = target(block.tokens, block.depths, attend, taps=proposer.taps).taps
        pages = jnp.arange(ids.size // PAGE_SIZE, dtype=jnp.int32)[None, :]
        slots = Slots.of(pages, jnp.zeros(1, jnp.int32))
        own = own_part(head.layers, mesh if mesh and is_split(head, mesh) else None)
        state = empty_stores(own, pages.size, PAGE_SIZE, target.embed_tokens[...].dtype)
        state = proposer.commit(head_weights, state, taps, slots, jnp.full(1, ids.size, jnp.int32))

        def draft(positions: Int[Array, "R"]) -> Candidates:
            # All read the same pages, each the rows before its anchor alone.
            slots = Slots.of(jnp.broadcast_to(pages, (DRAFTED, pages.size)), positions)
            logits = proposer.propose(head_weights, state, target, ids[positions], slots)
            return top_candidates(logits, count)

        parts = -(-anchors // DRAFTED)
        positions = first + jnp.arange(parts * DRAFTED, dtype=jnp.int32).reshape(parts, DRAFTED)
        found = jax.lax.map(draft, jnp.minimum(positions, ids.size - 1))
        return jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:]), found)

    if mesh is not None:
        specs = parameter_specs(config, mesh), proposer.weight_specs(mesh), WHOLE, WHOLE
        run = everywhere(mesh, run, specs, WHOLE)
    return run(weights, head_weights, ids, first)


@functools.partial(jax.jit, static_argnames=("algorithm", "count", "budgets"))
def _accepted(
    candidates: Candidates,
    following: Int[Array, "A D"],
    routing: Routing,
    *,
    algorithm: Algorithm,
    count: int,
    budgets: tuple[int, ...],
) -> Int[Array, "A C"]:
    rows, depth = following.shape
    looked_at = candidates.best(count)
    tree = grow_tree(
        looked_at,
        jnp.zeros(rows, jnp.int32),
        plan_of(algorithm, looked_at, routing),
        jnp.full(rows, max(budgets), jnp.int32),
        jnp.full(rows, depth, jnp.int32),
        num_nodes=bucket_for(max(budgets)),
        one_by_one=algorithm.one_by_one,
    )
    # The choice at a node is the text's own token there; nobody asks where the path is another.
    choices = jnp.take_along_axis(
        jnp.pad(following, ((0, 0), (0, 1)), constant_values=-1), tree.depths, axis=1
    )
    path = accept(tree, choices, max_depth=depth).path
    return reach_of(tree.scores, path, budgets).accepted.astype(jnp.int32)
