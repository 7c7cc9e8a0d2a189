"""Replays rounds along known texts: what any tree would have accepted, without decoding with it.

Every token is plain decoding's, whatever the tree, and a draft depends only on the tokens before its anchor.
So one text and the drafts at each of its tokens determine the rounds of every algorithm. The first nodes of a
large tree are the tree of every smaller budget.

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
from jetspec_jax.decode.proposer import candidates_of
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
)

# Anchors that draft at once, and anchors that grow trees at once.
DRAFTED, GROWN = 64, 512


class Text(NamedTuple):
    """A prompt and plain decoding's continuation.

    Attributes:
        prompt: Tokens of the prompt.
        tokens: The target's tokens, beyond the request's end by the depth of a tree: a round may overshoot.
        length: The request's tokens among ``tokens``.
        routing: The prompt's routing hints.
    """

    prompt: list[int]
    tokens: list[int]
    length: int
    routing: Hints | None


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


def write_texts(pair: Pair, work: Workload, *, batch: int, implementation: str | None) -> list[Text]:
    """Decodes all prompts by plain decoding.

    Raises:
        ValueError: A prompt, its answer and the depth of a tree do not fit into the context.
    """
    depth, ends = pair.head.config.depth, set(pair.target.eos_token_ids)
    most = [params.max_tokens or 0 for params in work.params]
    longer = [
        replace(params, max_tokens=count + depth, ignore_eos=True, stop_token_ids=None)
        for params, count in zip(work.params, most, strict=True)
    ]
    completions = generate(pair.target, work.ids, longer, max_slots=batch, implementation=implementation)
    texts = []
    columns = work.ids, work.params, most, work.routing, completions
    for ids, params, count, hints, completion in zip(*columns, strict=True):
        tokens = list(completion.token_ids)
        stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else ends)}
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        texts.append(Text(list(ids), tokens, min(end, count), hints))
    return texts


def draft_along(pair: Pair, texts: Sequence[Text], count: int, *, implementation: str | None) -> Drafts:
    """The ``count`` best draft tokens of every row, at every token that can be an anchor.

    Args:
        pair: The models.
        texts: The texts.
        count: Candidates per draft row.
        implementation: Of tree attention; None picks the best.
    """
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
        found.append(jax.tree.map(lambda rows, length=text.length: np.asarray(rows)[:length], drafts))
        places = len(text.prompt) + np.arange(text.length)[:, None] + np.arange(depth)[None, :]
        following.append(ids[places])
    counts = [text.length for text in texts]
    hints = [text.routing for text in texts for _ in range(text.length)]
    candidates = jax.tree.map(lambda *rows: np.concatenate(rows), *found)
    return Drafts(candidates, np.concatenate(following), Routing.of(hints, len(hints)), counts)


def accepted_along(
    drafts: Drafts, algorithm: Algorithm, candidates: int, budgets: Sequence[int]
) -> Int[np.ndarray, "A C"]:
    """The number of drafted tokens that a round at each anchor accepts with each budget.

    Args:
        drafts: The drafts.
        algorithm: The tree algorithm; all candidates may be children of one node.
        candidates: Candidates per draft row.
        budgets: Nodes of the trees, root included.
    """
    rows = len(drafts.following)
    found = []
    for at in range(0, rows, GROWN):
        # The last part begins earlier, so that all parts have one shape.
        part = slice(max(min(at, rows - GROWN), 0), at + GROWN)
        rows_of_part = jax.tree.map(lambda array, part=part: array[part], drafts[:3])
        accepted = _accepted(*rows_of_part, algorithm=algorithm, count=candidates, budgets=tuple(budgets))
        found.append(np.asarray(accepted)[at - part.start :])
    return np.concatenate(found)


def rounds_along(accepted: Int[np.ndarray, "A"], counts: Sequence[int]) -> list[list[int]]:
    """The number of tokens that each round of each text commits; the last round may overshoot the text's end.

    Example: a text has 6 tokens, and 1, 0, 2, 0, 0, 0 drafted tokens are accepted at its anchors. The round
    at the prompt's last token commits 2 tokens, the next round 3, and the last round 1.

    Args:
        accepted: Accepted drafted tokens at each anchor, text after text.
        counts: Anchors of each text.
    """
    texts, first = [], 0
    for count in counts:
        rounds, at = [], 0
        while at < count:
            rounds.append(1 + int(accepted[first + at]))
            at += rounds[-1]
        texts.append(rounds)
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
    """Candidates at ``anchors`` tokens from ``first`` on; one forward fills the head's context."""

    def run(weights: Any, head_weights: Any, ids: Int[Array, "T"], first: Int[Array, ""]) -> Candidates:
        target, head = bind(config, weights), proposer.config
        block = Block.chain(ids[None])
        attend = attend_over(None, None, block, implementation=implementation)
        output = target(block.tokens, block.depths, attend, taps=proposer.taps)
        pages = jnp.arange(ids.size // PAGE_SIZE, dtype=jnp.int32)[None, :]
        slots = Slots.of(pages, jnp.zeros(1, jnp.int32))
        local = own_part(head.layers, mesh if mesh and is_split(head, mesh) else None)
        state = empty_stores(local, pages.size, PAGE_SIZE, target.embed_tokens[...].dtype)
        state = proposer.commit(head_weights, state, output.taps, slots, jnp.full(1, ids.size, jnp.int32))

        def draft(positions: Int[Array, "R"]) -> Candidates:
            # All slots read the same pages, each only the rows before its anchor.
            slots = Slots.of(jnp.broadcast_to(pages, (DRAFTED, pages.size)), positions)
            return candidates_of(proposer, head_weights, state, target, ids[positions], slots, count)

        parts = -(-anchors // DRAFTED)
        positions = first + jnp.arange(parts * DRAFTED, dtype=jnp.int32).reshape(parts, DRAFTED)
        positions = jnp.minimum(positions, ids.size - 1)
        found = jax.lax.map(draft, positions)
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
    # Pairs are probabilities among all candidates that were drafted.
    assert candidates.pairs is None or candidates.tokens.shape[2] == count, "pairs of other candidates"
    best = candidates.best(count)
    tree = grow_tree(
        best if candidates.pairs is None else candidates,
        jnp.zeros(rows, jnp.int32),
        plan_of(algorithm, best, routing),
        jnp.full(rows, max(budgets), jnp.int32),
        jnp.full(rows, depth, jnp.int32),
        num_nodes=bucket_for(max(budgets)),
        one_by_one=algorithm.one_by_one,
    )
    # On the text's path a node's choice is the text's next token. Choices elsewhere are never read.
    choices = jnp.take_along_axis(
        jnp.pad(following, ((0, 0), (0, 1)), constant_values=-1), tree.depths, axis=1
    )
    path = accept(tree, choices, max_depth=depth).path
    return reach_of(tree.scores, path, budgets).accepted.astype(jnp.int32)
