"""The target's choice at every node: filters, noise, the argmax, and what is not stored on the way."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetspec_jax.sampling.choice import choose_tokens
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.sampling.token_sets import NO_CHOICE
from tests.marks import wide
from tests.sampling.exact import FILTERS, batch_of, jitted_choose, jitted_perturb, keep

BFLOAT16 = ml_dtypes.bfloat16


def noise_of(seed, position, vocab):
    """The documented noise: Gumbel, from the seed's two halves and the position."""
    key = jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32))
    return np.asarray(jax.random.gumbel(jax.random.fold_in(key, position), (vocab,)))


@pytest.mark.parametrize(
    ("temperature", "dtype"), [(0.5, np.float32), (1.7, BFLOAT16), wide(1.0, np.float16)]
)
def test_filters_come_after_temperature_in_order(temperature, dtype):
    """The argmax of filtered logits plus noise, for all filters in one batch, at nodes of three depths."""
    rng, vocab = np.random.default_rng(1), 50
    rows = rng.normal(0, 2, (len(FILTERS), 6, vocab)).astype(dtype)
    depths = rng.integers(0, 3, (len(FILTERS), 6)).astype(np.int32)
    positions = np.arange(100, 100 + len(FILTERS), dtype=np.int32)
    params = [
        SamplingParams(temperature=temperature, seed=seed * 2**33 + 7, **own)
        for seed, own in enumerate(FILTERS)
    ]
    got = np.asarray(jitted_choose(rows, depths, positions, batch_of(params), max_depth=2))
    for b, own in enumerate(params):
        noise = np.stack([noise_of(own.seed, positions[b] + depth, vocab) for depth in range(3)])
        for n in range(6):
            scaled = rows[b, n].astype(np.float32) / np.float32(temperature)
            kept = keep(scaled, own.top_k, own.top_p, own.min_p)
            assert got[b, n] == np.where(kept, scaled + noise[depths[b, n]], -np.inf).argmax(), (own, n)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_no_numbers_have_no_choice(temperature):
    rows = np.zeros((1, 4, 8), np.float32)
    rows[0, 1] = np.nan
    rows[0, 2] = -np.inf
    rows[0, 3, 1:] = -np.inf
    params = batch_of([SamplingParams(temperature=temperature, seed=1)])
    got = jitted_choose(rows, np.zeros((1, 4), np.int32), np.zeros(1, np.int32), params, max_depth=0)
    assert np.asarray(got)[0, 1:].tolist() == [NO_CHOICE, NO_CHOICE, 0]
    assert 0 <= got[0, 0] < 8


def kept(rows, params):
    """Which tokens the filters keep: what is not -inf in the perturbed logits."""
    batch, nodes, _ = rows.shape
    depths, positions = jnp.zeros((batch, nodes), jnp.int32), jnp.zeros(batch, jnp.int32)
    noisy = jitted_perturb(jnp.asarray(rows), depths, positions, batch_of(params), max_depth=0)
    assert noisy.dtype == jnp.float32
    return np.isfinite(np.asarray(noisy))


def test_ties_at_the_edge_stay_together():
    row = np.array([1, 3, -0.0, 3, 0, 2, 0, -1], BFLOAT16)
    expected = {1: 3, 2: 3, 3: 2, 4: 1, 5: 0, 6: 0, 7: 0, 8: -1, 9: -1}
    params = [SamplingParams(temperature=1.0, seed=1, top_k=k) for k in expected]
    rows = np.broadcast_to(row, (len(params), 1, row.size))
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


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    # 4099 is prime, 12288 three chunks of a reduction.
    [(1, np.float32), (4099, BFLOAT16), (12288, np.float32), wide(7, np.float16), wide(12288, BFLOAT16)],
)
def test_the_first_of_equal_ones(vocab, dtype):
    rng = np.random.default_rng(vocab)
    rows = rng.integers(0, 4, (2, 16, vocab)).astype(dtype)
    rows[0, 0] = -np.inf
    rows[1, 3, -1] = 9
    depths, positions = jnp.zeros((2, 16), jnp.int32), jnp.zeros(2, jnp.int32)
    got = jitted_choose(jnp.asarray(rows), depths, positions, Sampling.greedy(2), max_depth=0)
    assert got.dtype == jnp.int32
    expected = rows.astype(np.float32).argmax(-1)
    expected[0, 0] = NO_CHOICE
    np.testing.assert_array_equal(got, expected)


def test_a_slot_is_alone():
    """What a slot gets does not depend on its neighbours, greedy or not, nor on how many nodes there are."""
    rng = np.random.default_rng(8)
    # A greedy slot stays greedy whatever its filters say.
    own_filters = [{}, {"top_k": 3, "min_p": 0.5}, *FILTERS]
    temperatures = [0.0, 0.0, *rng.choice([0.3, 1.0, 1.7], len(FILTERS)).tolist()]
    params = [
        SamplingParams(temperature=temperature, seed=seed, **own)
        for seed, (temperature, own) in enumerate(zip(temperatures, own_filters, strict=True))
    ]
    batch = len(params)
    rows = jnp.asarray(rng.normal(0, 2, (batch, 4, 500)), jnp.bfloat16)
    depths = jnp.asarray(rng.integers(0, 3, (batch, 4)), jnp.int32)
    positions = jnp.asarray(rng.integers(0, 99, batch), jnp.int32)
    settings = batch_of(params)
    together = np.asarray(jitted_choose(rows, depths, positions, settings, max_depth=2))
    for b in range(batch):
        one = jax.tree.map(lambda x, b=b: x[b][None], (rows, depths, positions, settings))
        np.testing.assert_array_equal(together[b], jitted_choose(*one, max_depth=2)[0])
        single = jitted_choose(one[0][:, 1:2], one[1][:, 1:2], *one[2:], max_depth=2)
        assert single[0, 0] == together[b, 1]
    np.testing.assert_array_equal(together[:2], np.asarray(rows[:2], np.float32).argmax(-1))


def test_nodes_at_one_position_share_their_noise():
    row = np.random.default_rng(2).standard_normal(40).astype(np.float32)
    rows = jnp.asarray(np.broadcast_to(row, (200, 4, 40)))
    depths = jnp.asarray(np.broadcast_to(np.array([0, 1, 1, 0], np.int32), (200, 4)))
    positions = jnp.zeros(200, jnp.int32)
    sampling = batch_of([SamplingParams(temperature=1.0, seed=seed) for seed in range(200)])
    got = np.asarray(jitted_choose(rows, depths, positions, sampling, max_depth=1))
    assert (got[:, 0] == got[:, 3]).all()
    assert (got[:, 1] == got[:, 2]).all()
    assert (got[:, 0] == got[:, 1]).mean() < 0.3
    # Depth 1 at position 0 is depth 0 at position 1: so a tree agrees with plain decoding.
    later = np.asarray(jitted_choose(rows, depths, positions + 1, sampling, max_depth=1))
    assert (later[:, 0] == got[:, 1]).all()


def test_negative_seeds_are_their_lowest_64_bits():
    keys = {-1: [2**32 - 1] * 2, 2**64 - 1: [2**32 - 1] * 2, -(2**63): [2**31, 0], -2: [2**32 - 1, 2**32 - 2]}
    got = batch_of([SamplingParams(seed=seed) for seed in keys]).key
    assert np.asarray(got).tolist() == list(keys.values())
    seeds = [[own.seed for own in SamplingParams(seed=seed, n=3).each()] for seed in (-1, 2**64 - 1)]
    assert seeds[0][1:] == seeds[1][1:]
    assert (seeds[0][0], len(set(seeds[0]))) == (-1, 3)


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
    jaxpr = jax.make_jaxpr(functools.partial(choose_tokens, max_depth=3))(*arguments(jnp.bfloat16)).jaxpr
    names = set()
    for equation in every_equation(jaxpr):
        names.add(equation.primitive.name)
        if equation.primitive.name in ("while", "scan", "cond"):
            large = [x.aval for x in (*equation.invars, *equation.outvars) if x.aval.size >= NODES * VOCAB]
            assert all(aval.dtype == jnp.bfloat16 for aval in large), large
    assert {"cond", "reduce"} <= names
    assert not names & {"sort", "top_k", "cumsum"}
