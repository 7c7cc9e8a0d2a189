"""Choices where each device computes a part of the vocabulary: those of the whole on one device."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.sampling.choice import choose_tokens, perturb
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.token_sets import NO_CHOICE
from pallas_kernels.token_filter import least_kept
from tests.marks import wide
from tests.meshes import GATHER, agreed, on_parts, padded
from tests.sampling.exact import FILTERS, batch_of, jitted_choose, jitted_perturb

VOCAB, NODES = 67, 7  # 67 is prime
PARAMS = [
    SamplingParams(),
    SamplingParams(top_k=3, min_p=0.5),  # greedy all the same
    *(SamplingParams(temperature=1.0, seed=seed, **own) for seed, own in enumerate(FILTERS)),
    SamplingParams(temperature=0.5, seed=2**40, top_k=20, top_p=0.9, min_p=0.05),
]


@functools.cache
def choose_on(vocab=VOCAB):
    return functools.partial(choose_tokens, max_depth=2, vocab_size=vocab)


@functools.cache
def perturb_on(vocab=VOCAB):
    return functools.partial(perturb, max_depth=2, vocab_size=vocab)


def make_case(dtype):
    """Rows without ties, with many, of NaN, of -inf, of one number at each end, and of equals."""
    rng = np.random.default_rng(5)
    rows = rng.normal(0, 3, (len(PARAMS), NODES, VOCAB))
    rows[:, 1] = rows[:, 1].round()
    rows[:, 2] = np.nan
    rows[:, 3:6] = -np.inf
    rows[:, 4, -1] = rows[:, 5, 0] = -2
    rows[:, 6] = 1.5
    depths = rng.integers(0, 3, rows.shape[:2]).astype(np.int32)
    positions = np.arange(100, 100 + len(PARAMS), dtype=np.int32)
    return rows.astype(dtype), depths, positions, batch_of(PARAMS)


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        ((1, 2), jnp.float32),
        ((2, 2), jnp.bfloat16),
        ((2, 4), jnp.float32),
        wide((1, 3), jnp.bfloat16),
    ],
)
def test_choices_are_those_of_the_whole(mesh, dtype):
    rows, *others = make_case(dtype)
    got = agreed(on_parts(choose_on(), *mesh)(padded(rows, np.prod(mesh)), *others))
    np.testing.assert_array_equal(got, jitted_choose(rows, *others, max_depth=2))
    assert (got[:, 2:4] == NO_CHOICE).all()
    assert (got[:, 4] == VOCAB - 1).all()
    assert (got[:, 5] == 0).all()
    # Greedy ones take the first of the equals, which are in several parts.
    np.testing.assert_array_equal(got[:2, 1], rows[:2, 1].astype(np.float32).argmax(-1))
    assert (got[:2, 6] == 0).all()


def test_each_part_has_its_own_perturbed_logits():
    rows, *others = make_case(jnp.float32)
    whole = np.asarray(jitted_perturb(rows, *others, max_depth=2))
    own = on_parts(perturb_on(), 2, 4)(padded(rows, 8), *others)
    assert own.shape == (8, len(PARAMS), NODES, 9)
    joined = np.concatenate(list(np.asarray(own)), axis=-1)
    np.testing.assert_array_equal(joined[..., :VOCAB], whole)
    assert not np.isfinite(joined[..., VOCAB:]).any()


@pytest.mark.parametrize("partitionable", [True, False])
def test_the_noise_has_the_bits_of_the_whole(partitionable):
    """Also where the vocabulary does not divide, whichever way JAX makes its random bits."""
    vocab, parts = 1001, 4
    params = batch_of([SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2**33)])
    depths = np.broadcast_to(np.arange(3, dtype=np.int32), (2, 3))
    positions = np.array([5, 70], np.int32)
    zeros = np.zeros((2, 3, vocab), np.float32)
    with jax.threefry_partitionable(partitionable):
        whole = jitted_perturb(zeros, depths, positions, params, max_depth=2)
        own = on_parts(perturb_on(vocab), 2, 2)(padded(zeros, parts), depths, positions, params)
    joined = np.concatenate(list(np.asarray(own)), axis=-1)[..., :vocab]
    np.testing.assert_array_equal(joined.view(np.uint32), np.asarray(whole).view(np.uint32))


def test_a_choice_is_one_gather_beside_the_filters():
    rows, *others = make_case(jnp.bfloat16)
    rows = padded(rows, 8)
    text = on_parts(choose_on(), 2, 4).lower(rows, *others).as_text()
    settings = batch_of(PARAMS)
    filters = settings.temperature, settings.top_k, settings.top_p, settings.min_p
    # The largest logit, top-k's counts, and top-p's sum and sums.
    assert on_parts(least_kept, 2, 4).lower(rows, *filters).as_text().count(GATHER) == 4
    assert text.count(GATHER) == 5
    assert text.count("stablehlo.all_") == 5
    for line in text.splitlines():
        if GATHER in line:
            shape = re.search(r"-> tensor<((?:\d+x)+)", line)[1]
            assert math.prod(map(int, shape.rstrip("x").split("x"))) < rows.size
    assert jitted_choose.lower(rows, *others, max_depth=2).as_text().count("stablehlo.all_") == 0


@pytest.mark.parametrize("vocab", [None, 69])
def test_the_size_of_the_whole_must_be_known(vocab):
    rows, *others = make_case(jnp.float32)
    message = f"vocab_size must be in 1..68, as 2 devices have logits of 34 tokens each; got {vocab}"
    with pytest.raises(ValueError, match=message):
        on_parts(choose_on(vocab), 1, 2)(padded(rows, 2), *others)


def test_a_mesh_of_one_device_is_whole():
    rows, *others = make_case(jnp.float32)
    run = on_parts(choose_on(None), 1, 1)
    assert "stablehlo.all_" not in run.lower(rows, *others).as_text()
    np.testing.assert_array_equal(run(rows, *others)[0], jitted_choose(rows, *others, max_depth=2))
