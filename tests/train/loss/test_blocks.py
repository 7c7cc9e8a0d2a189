"""Training blocks: the anchors, what they learn, and agreement with decoding."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import draft_logits
from jetspec_jax.models import bind
from tests.decode.tiny import TINY, random_head, random_target
from tests.marks import wide
from train.loss.attention import CausalAttend
from train.loss.blocks import draft_blocks, lessons, sample_anchors

B, T, K = 2, 10, 4
# The last blocks begin at the last token that has one after it: most of their slots lie beyond the end.
ANCHORS = np.array([[0, 5, 5, T - 2], [5, T - 2, 5, 0]])
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size - 1, (B, T)).astype(np.int32)

draw_anchors = jax.jit(sample_anchors, static_argnums=2)


@pytest.fixture(scope="module", params=[True, wide(False)], ids=["causal", "bidirectional"])
def pair(request):
    return random_target(TINY, 0), random_head(TINY, 1, block_size=K, causal=request.param)


@pytest.fixture(scope="module")
def block_logits(pair):
    """Draft logits ``[B, A, D, V]`` of head weights, tokens and anchors, as training computes them."""
    target, head = pair

    def compute(weights, tokens, anchors, remat):
        module = bind(target.config, target.weights)
        positions = jnp.broadcast_to(jnp.arange(T)[None, :], tokens.shape)
        out = module(tokens, positions, CausalAttend(), taps=head.config.tap_layers)
        bound = bind(head.config, weights)
        hidden = draft_blocks(bound, module, tokens, out.taps, anchors, remat=remat)[:, :, 1:]
        b, a, d, m = hidden.shape
        return module.logits(hidden.reshape(b, a * d, m)).reshape(b, a, d, -1)

    return jax.jit(compute, static_argnums=3)


def test_a_block_gives_the_logits_of_decoding(pair, block_logits):
    trained = block_logits(pair[1].weights, TOKENS, ANCHORS, False)
    for (b, a), anchor in np.ndenumerate(ANCHORS):
        decoded = draft_logits(*pair, TOKENS[b : b + 1, : anchor + 1])
        np.testing.assert_allclose(trained[b, a], decoded[0], atol=1e-5, rtol=1e-5)


def test_a_block_depends_on_nothing_after_its_anchor_nor_on_other_blocks(pair, block_logits):
    anchors, moved = np.array([[5, 2, 1, 1], [5, 6, 1, 1]]), np.array([[5, 4, 8, 0], [5, 1, 8, 0]])
    other = TOKENS.copy()
    other[:, 6:] = 7
    weights = pair[1].weights
    given = block_logits(weights, TOKENS, anchors, False)[:, 0]
    np.testing.assert_allclose(given, block_logits(weights, other, moved, False)[:, 0], atol=1e-5)
    # The anchor itself, and any token before it, count.
    for place in (5, 4):
        changed = TOKENS.copy()
        changed[:, place] = (changed[:, place] + 1) % (TINY.vocab_size - 1)
        assert np.abs(given - block_logits(weights, changed, anchors, False)[:, 0]).max() > 1e-2


def test_computing_layers_again_changes_neither_values_nor_gradients(pair, block_logits):
    weighing = np.random.default_rng(1).normal(size=(*ANCHORS.shape, K - 1, TINY.vocab_size))

    @jax.jit
    def both(weights):
        def total(weights, remat):
            out = block_logits(weights, TOKENS, ANCHORS, remat)
            return jnp.sum(out * jnp.asarray(weighing, jnp.float32)), out

        run = jax.value_and_grad(total, has_aux=True)
        return run(weights, False), run(weights, True)

    plain, again = both(pair[1].weights)

    def close(x, y):
        # Summed in another order: relative to the largest element.
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * float(np.abs(x).max()))

    jax.tree.map(close, plain, again)


def test_the_lessons_of_the_docstring():
    # a b c D e F, capitals to learn; blocks of 4 slots at b and D.
    tokens, learn = jnp.arange(6)[None], jnp.array([[False, False, True, True, False, True]])
    task = lessons(tokens, learn, jnp.array([[1, 3]]), 4)
    np.testing.assert_array_equal(task.labels[0, 0], [2, 3, 4])
    np.testing.assert_array_equal(task.learn[0], [[True, True, False], [False, False, False]])
    np.testing.assert_array_equal(task.labels[0, 1, :2], [4, 5])
    np.testing.assert_array_equal(task.rows[0, 0], [1, 2, 3])
    np.testing.assert_array_equal(task.rows[0, 1, :2], [3, 4])


def test_lessons_against_loops():
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 50, (3, T))
    learn = rng.random((3, T)) < 0.7
    anchors = np.stack([np.arange(T - 1)] * 3)
    task = lessons(jnp.asarray(tokens), jnp.asarray(learn), jnp.asarray(anchors), K)
    for (b, a), anchor in np.ndenumerate(anchors):
        for k in range(1, K):
            place = anchor + k
            inside = place < T
            assert task.learn[b, a, k - 1] == (inside and learn[b, anchor + 1 : place + 1].all())
            if inside:
                # The row before a token predicts it.
                assert (task.rows[b, a, k - 1], task.labels[b, a, k - 1]) == (place - 1, tokens[b, place])
    assert (task.rows < T).all()


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=2, max_size=2), st.data()
)
def test_anchors_stand_before_what_is_learnt_evenly_and_in_order(learn, data):
    learn, count = np.array(learn), data.draw(st.sampled_from([1, 5, 24]))
    key = jax.random.key(data.draw(st.integers(0, 1000)))
    anchors = np.asarray(draw_anchors(key, jnp.asarray(learn), count))
    np.testing.assert_array_equal(anchors, draw_anchors(key, jnp.asarray(learn), count))
    for own, row in zip(anchors, learn, strict=True):
        before = np.flatnonzero(row[1:])
        if not len(before):
            assert (own == 0).all()
            continue
        assert set(own) <= set(before)
        assert (np.diff(own) >= 0).all()
        # One from each equal part: as each part holds number / count places, a place has its fair share of
        # the anchors, and one more at either end.
        share = np.bincount(np.searchsorted(before, own), minlength=len(before))
        fair = count / len(before)
        assert share.max() <= np.ceil(fair) + 1
        assert share.min() >= np.floor(fair) - 1


def test_every_place_is_an_anchor_as_often_as_any_other():
    learn = jnp.array([[False, True, True, False, True, True, True, False]])
    keys = jax.random.split(jax.random.key(0), 1200)
    anchors = np.asarray(jax.vmap(lambda key: draw_anchors(key, learn, 3))(keys)).reshape(-1)
    places, counts = np.unique(anchors, return_counts=True)
    np.testing.assert_array_equal(places, [0, 1, 3, 4, 5])
    # 720 of each; 5 deviations of a binomial count are 120 at most.
    np.testing.assert_allclose(counts, 720, atol=120)
