"""The joint law of the first three tokens over 20,000 seeds is the target's, though drafts know the noise.

All seeds count: the tokens of accepted drafts alone have another law.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import DecodeWeights, SamplingParams, SlotSettings, TreeDecoder
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.models import bind
from jetspec_jax.sampling.adjust import Adjustments
from tests.decode.oracle import OracleProposer
from tests.decode.tiny import TINY, random_target, with_windows
from tests.marks import wide

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("optimised")]

CONFIG = with_windows(TINY, None)
V, PROMPT, TOKENS, SEEDS, BATCH = CONFIG.vocab_size, 5, 3, 20_000, 2_000
# Edges of the classes of tokens, by their rank given the tokens before: the likeliest, the next, two, ...
RANKS = np.array([0, 1, 2, 4, 8, 16])
KINDS = {
    "sampled": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.7, top_k=12),
    "penalty": SamplingParams(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.3),
    "several": SamplingParams(temperature=1.0, n=4),
}


@dataclass(frozen=True)
class Marginals(OracleProposer):
    """Drafts the law of each of the first tokens alone, whatever the tokens before: its weights."""

    depth: int = TOKENS

    def propose(self, weights, state, target, anchors, slots, depth=None):
        return jnp.broadcast_to(weights[None, :depth], (len(anchors), *weights[:depth].shape))


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 2, std=0.2)


@pytest.fixture(scope="module")
def rows(target):
    """The target's logits after the prompt, after each first token, and after each two tokens."""

    @jax.jit
    def last(ids):
        block = Block.chain(ids)
        model = bind(CONFIG, target.weights)
        output = model(ids, block.depths, attend_over(None, None, block))
        return model.logits(output.hidden[:, -1:])[:, 0]

    firsts, pairs = np.arange(V)[:, None], np.stack(np.divmod(np.arange(V * V), V), axis=1)
    prefixes = np.zeros((1, 0), int), firsts, pairs
    return [
        np.asarray(last(np.insert(ids, 0, PROMPT, axis=1).astype(np.int32)), np.float64) for ids in prefixes
    ]


def law(rows, params):
    """The probability of every three tokens, from logits that are adjusted and filtered in NumPy."""
    joint = np.ones(1)
    for length, logits in enumerate(rows):
        before = np.stack(np.unravel_index(np.arange(len(logits)), (V,) * length), axis=1) if length else None
        logits = logits.copy()
        present = np.zeros(logits.shape, bool)
        if length:
            np.put_along_axis(present, before, True, axis=1)
        seen = present | (np.arange(V) == PROMPT)
        repeated = np.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
        logits = np.where(seen, repeated, logits) - params.presence_penalty * present
        if params.top_k:
            least = -np.sort(-logits, axis=1)[:, params.top_k - 1 : params.top_k]
            logits = np.where(logits >= least, logits, -np.inf)
        probs = np.exp((logits - logits.max(1, keepdims=True)) / params.temperature)
        joint = (joint[:, None] * probs / probs.sum(1, keepdims=True)).ravel()
    return joint.reshape((V,) * TOKENS)


def decoded(target, marginals, params, seeds):
    """The first three tokens of every seed, and which of them were nodes of a tree."""
    decoder = TreeDecoder(CONFIG, Marginals(V), 32, candidates=16, max_rounds=TOKENS)
    adjusts = params.presence_penalty != 0
    decoder = dataclasses.replace(decoder, adjusts=adjusts)
    weights = DecodeWeights(target.weights, marginals)
    sizes = {"num_pages": BATCH, "pages_per_slot": 1, "page_size": 16, "dtype": jnp.dtype(jnp.float32)}
    empty = decoder.empty_state(BATCH, **sizes)
    one = dataclasses.replace(params, seed=0, max_tokens=TOKENS, n=1)
    settings = SlotSettings.of(one, (), vocab_size=V, budget=decoder.bucket, depth=decoder.depth)
    settings = jax.tree.map(
        lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (BATCH, *np.shape(leaf))), settings
    )
    adjust = None
    if adjusts:
        of_one = Adjustments.of(one, vocab_size=V, prompt=[PROMPT])
        adjust = jax.tree.map(
            lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (BATCH, *np.shape(leaf))), of_one
        )

    @jax.jit
    def run(keys):
        state = dataclasses.replace(
            empty,
            slots=empty.slots._replace(block_tables=jnp.arange(BATCH, dtype=jnp.int32)[:, None]),
            room=jnp.full(BATCH, 16, jnp.int32),
            anchors=jnp.full(BATCH, PROMPT, jnp.int32),
            active=jnp.ones(BATCH, bool),
            settings=settings._replace(sampling=settings.sampling._replace(key=keys)),
            adjust=adjust,
        )
        return decoder.decode(weights, state, jnp.int32(TOKENS))[1].tokens

    found, nodes = [], []
    for part in seeds.reshape(-1, BATCH):
        keys = np.stack([part >> np.uint64(32), part & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
        tokens = np.moveaxis(np.asarray(run(keys)), 0, 1)  # [B, rounds, D + 1]
        # The last token of a round is the bonus, the others were nodes.
        counts = (tokens >= 0).sum(axis=2, keepdims=True)
        node = np.arange(tokens.shape[2]) < counts - 1
        for of_slot, of_nodes in zip(tokens, node, strict=True):
            committed = of_slot >= 0
            found.append(of_slot[committed][:TOKENS])
            nodes.append(of_nodes[committed][:TOKENS])
    return np.stack(found), np.stack(nodes)


def classes(joint):
    """The class of every three tokens, by the rank of each given the tokens before."""
    first, second = joint.sum((1, 2)), joint.sum(2)
    kinds = [
        np.searchsorted(RANKS, np.argsort(np.argsort(-p, axis=-1)), side="right") - 1
        for p in (first, second, joint)
    ]
    size = len(RANKS)
    return (kinds[0][:, None, None] * size + kinds[1][:, :, None]) * size + kinds[2]


def surprise(tokens, joint):
    """Chi-square over the classes, in standard deviations above its mean."""
    kind = classes(joint)
    expected = len(tokens) * np.bincount(kind.ravel(), joint.ravel(), minlength=len(RANKS) ** TOKENS)
    observed = np.bincount(kind[tuple(tokens.T)], minlength=expected.size)
    enough = expected >= 5
    expected = np.append(expected[enough], expected[~enough].sum())
    observed = np.append(observed[enough], observed[~enough].sum())
    freedom = len(expected) - 1
    assert freedom > 50
    chi_square = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    return (chi_square - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("kind", ["sampled", *map(wide, ["top-k", "penalty", "several"])])
def test_all_seeds_have_the_target_s_law(target, rows, kind):
    params, seeds = KINDS[kind], np.arange(SEEDS, dtype=np.uint64)
    if params.n > 1:
        of_each = [dataclasses.replace(params, seed=seed).each() for seed in range(SEEDS // params.n)]
        seeds = np.array([one.seed for each in of_each for one in each], np.uint64)
    joint, free = law(rows, params), law(rows, SamplingParams(temperature=1.0))
    marginals = np.log([free.sum((1, 2)), free.sum((0, 2)), free.sum((0, 1))])
    tokens, nodes = decoded(target, jnp.asarray(marginals, jnp.float32), params, seeds)
    assert np.all(joint[tuple(tokens.T)] > 0)
    assert abs(surprise(tokens, joint)) < 4
    assert np.mean(nodes[:, 1:]) >= 0.5, np.mean(nodes, axis=0)
    # The test can fail: the seeds whose tokens were all accepted drafts have another law.
    assert surprise(tokens[nodes.all(axis=1)], joint) > 10
