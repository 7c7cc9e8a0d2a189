"""How a choice is computed: thresholds instead of a sort, the argmax, and what is not stored on the way."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetspec_jax.sampling.choice import choose, perturb
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.slots import Sampling
from pallas_kernels.token_filter.reference import _float_at, _threshold

pytestmark = pytest.mark.usefixtures("quick_compiles")

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]

jitted_choose = jax.jit(choose, static_argnames="max_depth")
jitted_perturb = jax.jit(perturb, static_argnames="max_depth")


def batch_of(params):
    return jax.tree.map(lambda *own: jnp.asarray(np.stack(own)), *map(Sampling.of, params))


def kept(rows, params):
    """Which tokens the filters keep: what is not -inf in the perturbed logits."""
    batch, nodes, _ = rows.shape
    depths, positions = jnp.zeros((batch, nodes), jnp.int32), jnp.zeros(batch, jnp.int32)
    noisy = jitted_perturb(jnp.asarray(rows), depths, positions, batch_of(params), max_depth=0)
    assert noisy.dtype == jnp.float32
    return np.isfinite(np.asarray(noisy))


def oracle(row, params, slack=0.0):
    """The same by sorting, in float64; ``slack`` widens top-p and min-p, or narrows them."""
    scaled = np.asarray(row, np.float64) / np.float32(params.temperature)
    mask = np.ones(scaled.size, bool)
    descending = -np.sort(-scaled)
    if params.top_k is not None:
        mask &= scaled >= descending[min(params.top_k, scaled.size) - 1]
    if params.top_p is not None and params.top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        probability = np.where(mask, np.exp(scaled - descending[0]), 0)[order]
        before = np.cumsum(probability) - probability
        # What ties with an earlier token has before it what that one has.
        before = before[np.searchsorted(-descending, -descending, side="left")]
        enough = before < np.float32(params.top_p) * (1 + slack) * probability.sum()
        mask &= scaled >= descending[: max(1, enough.sum())][-1]
    if params.min_p is not None and params.min_p > 0:
        mask &= scaled >= descending[0] + np.log(np.float64(np.float32(params.min_p))) - 10 * slack
    return mask | (scaled == descending[0])


def random_rows(rng, kind, shape):
    if kind == "ties":
        return rng.integers(-3, 4, shape).astype(np.float64)
    if kind == "negative":
        return -np.exp(rng.normal(0, 2, shape))
    if kind == "masked":
        return np.where(rng.random(shape) < 0.5, -np.inf, rng.normal(0, 2, shape))
    return rng.normal(0, 3 if kind == "flat" else 30, shape)


def random_params(rng, vocab):
    draw = rng.integers(0, 4, 3)
    top_k = [None, 1, int(rng.integers(1, vocab + 1)), vocab + 5][draw[0]]
    top_p = [None, 1.0, float(rng.uniform(0.01, 0.999)), 1e-300][draw[1]]
    min_p = [None, 0.0, float(rng.uniform(0.001, 1)), 1.0][draw[2]]
    return SamplingParams(
        temperature=float(rng.choice([0.3, 1.0, 1.7])), seed=1, top_k=top_k, top_p=top_p, min_p=min_p
    )


# 4099 is prime, 12288 three chunks of a reduction.
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("vocab", [1, 50, 4099, 12288])
def test_filters_are_those_of_a_sort(vocab, dtype):
    rng = np.random.default_rng(vocab)
    cases = sharp = 0
    for kind in ("flat", "steep", "ties", "negative", "masked"):
        for _ in range(3 if vocab < 100 else 1):
            rows = random_rows(rng, kind, (8, 3, vocab)).astype(dtype)
            rows[:, :, rng.integers(vocab)] = 1.0  # one at least is not masked
            params = [random_params(rng, vocab) for _ in range(8)]
            got = kept(rows, params)
            for b, own in enumerate(params):
                for n in range(3):
                    # A float32 sum may place a token at the very edge on either side of it.
                    least, most = (oracle(rows[b, n], own, slack) for slack in (-1e-5, 1e-5))
                    finite = np.isfinite(rows[b, n].astype(np.float64))
                    assert not (least & finite & ~got[b, n]).any(), (kind, own)
                    assert not (got[b, n] & ~most).any(), (kind, own)
                    cases, sharp = cases + 1, sharp + (least == most).all()
    assert sharp > 0.8 * cases


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_ties_at_the_edge_stay_together(dtype):
    row = np.array([1, 3, -0.0, 3, 0, 2, 0, -1], np.float64)
    expected = {1: 3, 2: 3, 3: 2, 4: 1, 5: 0, 6: 0, 7: 0, 8: -1, 9: -1}
    params = [SamplingParams(temperature=1.0, seed=1, top_k=k) for k in expected]
    rows = np.broadcast_to(row, (len(params), 1, row.size)).astype(dtype)
    for mask, least in zip(kept(rows, params), expected.values(), strict=True):
        assert (mask[0] == (row >= least)).all()


def test_top_p_counts_what_lies_before():
    # Probabilities 1/2, 1/4, 1/8, 1/8, exact in float32: a token stays while less than top_p lies before it.
    row = np.log(np.array([4, 1, 2, 1], np.float64))
    tops = {0.01: 1, 0.5: 1, 0.51: 2, 0.75: 2, 0.76: 4, 0.875: 4, 0.999: 4, 1.0: 4}
    params = [SamplingParams(temperature=1.0, seed=1, top_p=p) for p in tops]
    rows = np.broadcast_to(row, (len(params), 1, 4)).astype(np.float32)
    counts = kept(rows, params).sum((1, 2))
    # At 1/2 and 3/4 float32 may see a little less than that before the next.
    exact = [p not in (0.5, 0.75) for p in tops]
    assert (counts[exact] == np.array(list(tops.values()))[exact]).all()
    # After top-k the rest is renormalised: of 2/3 and 1/3.
    both = [SamplingParams(temperature=1.0, seed=1, top_k=2, top_p=p) for p in (0.6, 0.7)]
    assert kept(rows[:2], both).sum((1, 2)).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_threshold_by_hand(dtype):
    logits = jnp.asarray([[[5, 3, 3, 1]]], dtype)
    goals = {1: 5, 2: 3, 3: 3, 4: 1, 5: -np.inf}
    ones = functools.partial(jnp.ones, (1, 1, 1), jnp.int32)
    found = [float(_threshold(logits, ones, jnp.array([[goal]]))[0, 0]) for goal in goals]
    assert found == list(goals.values())


def test_floats_in_order():
    ranks = jnp.array([[0x007F, 0x407F, 0x7FFF, 0x8000, 0xBF80, 0xFF80]], jnp.uint32)
    values = _float_at(ranks, jnp.dtype(jnp.bfloat16))
    bits = np.asarray(values).view(np.uint16)
    assert bits[0].tolist() == [0xFF80, 0xBF80, 0x8000, 0x0000, 0x3F80, 0x7F80]
    assert values[0].tolist() == [-np.inf, -1, -0.0, 0, 1, np.inf]
    for dtype in DTYPES:
        size = 8 * np.dtype(dtype).itemsize
        ranks = np.linspace(0, 2**size - 1, 4096).astype(np.uint32)[None]
        ordered = np.asarray(_float_at(jnp.asarray(ranks), jnp.dtype(dtype)), np.float64)[0]
        assert (ordered[1:] >= ordered[:-1]).all()
        assert (ordered[0], ordered[-1]) == (-np.inf, np.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("vocab", [1, 7, 4099, 12288])
def test_the_first_of_equal_ones(vocab, dtype):
    rng = np.random.default_rng(vocab)
    rows = rng.integers(0, 4, (2, 16, vocab)).astype(dtype)
    rows[0, 0] = -np.inf
    rows[1, 3, -1] = 9
    depths, positions = jnp.zeros((2, 16), jnp.int32), jnp.zeros(2, jnp.int32)
    got = jitted_choose(jnp.asarray(rows), depths, positions, Sampling.greedy(2), max_depth=0)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, rows.astype(np.float32).argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda dtype: np.dtype(dtype).name)
def test_a_slot_is_alone(dtype):
    """What a slot gets does not depend on its neighbours, greedy or not, nor on how many nodes there are."""
    rng = np.random.default_rng(8)
    vocab = 500
    rows = jnp.asarray(rng.normal(0, 2, (6, 4, vocab)), dtype)
    depths = jnp.asarray(rng.integers(0, 3, (6, 4)), jnp.int32)
    positions = jnp.asarray(rng.integers(0, 99, 6), jnp.int32)
    for _ in range(4):
        params = [SamplingParams() if rng.random() < 0.3 else random_params(rng, vocab) for _ in range(6)]
        settings = batch_of(params)
        together = np.asarray(jitted_choose(rows, depths, positions, settings, max_depth=2))
        for b, own in enumerate(params):
            one = jax.tree.map(lambda x, b=b: x[b][None], (rows, depths, positions, settings))
            alone = np.asarray(jitted_choose(*one, max_depth=2))
            np.testing.assert_array_equal(together[b], alone[0])
            single = jitted_choose(one[0][:, 1:2], one[1][:, 1:2], *one[2:], max_depth=2)
            assert single[0, 0] == together[b, 1]
            if own.temperature == 0:
                np.testing.assert_array_equal(together[b], np.asarray(rows[b], np.float32).argmax(-1))


def test_seeded_texts_stay():
    """Pinned: a change of the noise would change every seeded text."""
    vocab = 5000
    row = (3 * np.sin(np.arange(vocab, dtype=np.float64) ** 1.5)).astype(np.float32)
    depths = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32)[None, :], (3, 4))
    positions = jnp.array([10, 1000, 10], jnp.int32)
    settings = batch_of(
        [
            SamplingParams(temperature=1.0, seed=7),
            SamplingParams(temperature=0.7, seed=2**40 + 3),
            SamplingParams(temperature=1.3, seed=7, top_k=50, top_p=0.9, min_p=0.01),
        ]
    )
    rows = jnp.broadcast_to(jnp.asarray(row)[None, None, :], (3, 4, vocab))
    got = jitted_choose(rows, depths, positions, settings, max_depth=3)
    assert got.tolist() == [[4686, 1803, 2631, 129], [2288, 1328, 486, 3204], [826, 4184, 2265, 2098]]
    noise = jitted_perturb(jnp.zeros_like(rows), depths, positions, settings, max_depth=3)
    np.testing.assert_allclose(noise[0, 0, :3], [-1.0817953, -0.1496982, -0.6776565], rtol=1e-5)
    np.testing.assert_allclose(noise[1, 3, :3], [1.3785822, 5.3196855, -0.5845414], rtol=1e-5)


def every_equation(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from every_equation(inner)


NODES, VOCAB = 64, 32_768


def arguments(dtype):
    shape = jax.ShapeDtypeStruct
    settings = jax.eval_shape(lambda: Sampling.greedy(1))
    return (
        shape((1, NODES, VOCAB), dtype),
        shape((1, NODES), jnp.int32),
        shape((1,), jnp.int32),
        settings,
    )


def test_nothing_as_large_as_the_logits_enters_a_loop_or_a_branch():
    jaxpr = jax.make_jaxpr(functools.partial(choose, max_depth=3))(*arguments(jnp.bfloat16)).jaxpr
    names = set()
    for equation in every_equation(jaxpr):
        names.add(equation.primitive.name)
        if equation.primitive.name in ("while", "scan", "cond"):
            large = [x.aval for x in (*equation.invars, *equation.outvars) if x.aval.size >= NODES * VOCAB]
            assert all(aval.dtype == jnp.bfloat16 for aval in large), large
    assert {"cond", "reduce"} <= names
    assert not names & {"sort", "top_k", "cumsum"}
