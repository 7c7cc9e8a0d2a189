"""The round's three functions, launched apart or together, and what its programs do to the stores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import DecodeWeights, DraftHeadProposer, SamplingParams, SlotSettings, TreeDecoder, generate
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.engine.size import cut_prompts
from jetspec_jax.models import bind
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import TINY, random_head, random_target, with_windows
from tests.marks import wide

FLOAT32 = jnp.dtype(jnp.float32)
CONFIG = with_windows(TINY, 6, None)
CHUNK, PAGE, PAGES = 8, 4, 12
# One greedy slot and one that samples; the second prompt is longer than a chunk.
PROMPTS = [[5, 9, 2, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
PARAMS = [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=1.0, seed=7, top_p=0.9)]


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 3)


@pytest.fixture(scope="module")
def sequences(target):
    return [
        [*prompt, *generate(target, [prompt], own)[0].token_ids]
        for prompt, own in zip(PROMPTS, PARAMS, strict=True)
    ]


class Notes(OracleProposer):
    """An oracle that writes down what it is shown, by slot and position."""

    def empty_state(self, num_pages, page_size, dtype):
        return jnp.full((len(PROMPTS), PAGES * PAGE, 2 * CONFIG.hidden_size), jnp.nan)

    def commit(self, weights, state, taps, slots, count):
        rows = jnp.arange(taps.shape[1])[None, :]
        at = jnp.where(rows < count[:, None], slots.lengths[:, None] + rows, state.shape[1])
        return state.at[slots.numbers[:, None], at].set(taps, mode="drop")


ORACLE = Notes(CONFIG.vocab_size, taps=(0, 1))


def begin(decoder, weights, stops=((), ())):
    """Both slots after their prompts, with the tokens that end each."""
    state = decoder.empty_state(
        len(PROMPTS), num_pages=2 * PAGES, pages_per_slot=PAGES, page_size=PAGE, dtype=FLOAT32
    )
    pages = np.random.default_rng(0).permutation(2 * PAGES).astype(np.int32).reshape(2, PAGES)
    for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        settings = SlotSettings.of(
            params, stops[slot], vocab_size=CONFIG.vocab_size, budget=decoder.bucket, depth=decoder.depth
        )
        begins = np.int32(prompt[-1]), np.int32(0), np.bool_(False)
        state = decoder.insert(state, np.int32(slot), pages[slot], settings, *begins)
    left = {slot: np.array(prompt[:-1], np.int32) for slot, prompt in enumerate(PROMPTS)}
    for chunk in cut_prompts(left, [(1, CHUNK), (2, CHUNK)], len(PROMPTS)):
        state = decoder.prefill(weights, state, *chunk)
    return state


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("kind", [wide("plain"), "plain beside a head", wide("head"), "oracle"])
def test_a_round_launched_apart(target, sequences, kind):
    """Three programs give the state and the record of the one that they make together, bit for bit."""
    head = random_head(CONFIG, 4)
    proposer, own = {
        "plain": (None, None),
        "oracle": (ORACLE, plant(sequences, 64)),
    }.get(kind, (DraftHeadProposer(head.config), head.weights))
    bucket = 1 if kind.startswith("plain") else 16
    decoder = TreeDecoder(CONFIG, proposer, bucket, width=3, observes=(16,) if bucket > 1 else ())
    weights = DecodeWeights(target.weights, own)
    together = apart = begin(decoder, weights)
    whole, *parts = map(jax.jit, (decoder.round, decoder.propose, decoder.verify, decoder.settle))
    deepest = 0
    for _ in range(3):
        together, record = whole(weights, together)
        propose, verify, settle = parts
        tree = propose(weights, apart).tree
        settled = settle(weights, apart, tree, verify(weights, apart, tree))
        apart = settled.state
        assert_equal(settled.record, record._replace(nan_drafts=None))
        assert_equal(apart, together)
        assert_equal(record.counts, settled.accepted.counts)
        deepest = max(deepest, record.counts.max())
    assert (record.reach is None) == (bucket == 1)
    assert deepest > 3 if kind == "oracle" else deepest >= 1


@pytest.mark.parametrize("bucket", [1, 16])
def test_the_proposer_is_shown_every_committed_token_once_and_in_order(target, sequences, bucket):
    """Of prompts, of plain rounds and of deep paths: what the target's taps are in one forward over them."""
    # Trees that reach less: none goes beyond its request's end here.
    decoder = TreeDecoder(CONFIG, ORACLE, bucket, width=3, algorithm="accum_logp")
    weights = DecodeWeights(target.weights, plant(sequences, 64))
    state, _ = decoder.decode(weights, begin(decoder, weights), np.int32(5))

    @jax.jit
    def forward(weights, ids):
        block = Block.chain(ids)
        attend = attend_over(None, None, block)
        return bind(CONFIG, weights)(ids, block.depths, attend, taps=ORACLE.taps).taps

    assert (state.slots.lengths > np.array([3, 9]) + 3).all()
    for tokens, length, shown in zip(sequences, state.slots.lengths.tolist(), state.proposer, strict=True):
        taps = forward(target.weights, jnp.asarray([[*tokens, *[0] * 48][:48]]))[0, :length]
        np.testing.assert_allclose(shown[:length], taps, atol=1e-4)
        assert np.isnan(shown[length:]).all()


def test_a_stop_token_inside_a_path_ends_its_slot(target, sequences):
    """On the device: no later round decodes the slot, and the other goes on as before."""
    decoder = TreeDecoder(CONFIG, ORACLE, 16, width=3, algorithm="accum_logp")
    weights = DecodeWeights(target.weights, plant(sequences, 64))
    _, endless = decoder.decode(weights, begin(decoder, weights), np.int32(3))
    *inside, last = endless.tokens[0, 0, : endless.counts[0, 0]].tolist()
    stop = next(token for token in inside if token != last)
    state, records = decoder.decode(weights, begin(decoder, weights, ((stop,), ())), np.int32(3))
    assert state.active.tolist() == [False, True]
    np.testing.assert_array_equal(records.counts[:3, 0], [len(inside) + 1, 0, 0])
    np.testing.assert_array_equal(records.tokens[:, 1], endless.tokens[:, 1])
