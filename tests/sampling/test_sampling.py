"""What decoding draws: its distribution, and where its randomness comes from."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jetspec_jax import SamplingParams, generate_tree, logits
from jetspec_jax.config import Rope
from tests.decode.tiny import TINY, random_head, random_target
from tests.marks import wide
from tests.sampling.exact import batch_of, distribution, jitted_choose

# So few tokens that every pair of them can be counted.
VOCAB = 8
LAYER = dataclasses.replace(TINY.layers[0], num_heads=2, num_kv_heads=1, head_dim=8, rope=Rope(5e5, 8))
SMALL = dataclasses.replace(TINY, vocab_size=VOCAB, hidden_size=16, layers=(LAYER,))
PROMPT = [1, 2, 3]


def chi_square(counts, expected):
    """p-value of counts; cells that expect fewer than 5 are one cell."""
    counts, expected = np.ravel(counts), np.ravel(expected)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    assert counts[~used].sum() == 0, "a token of probability zero was drawn"
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    return stats.chi2.sf(statistic, used.sum() - 1)


@pytest.mark.parametrize("own", [{}, {"top_k": 6, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_frequencies_over_seeds(own):
    row = np.array([0.1, 1.2, -0.3, 0.9, -1.5, 0.5, -0.6, -1.0], np.float32)
    count = 4000
    sampling = batch_of([SamplingParams(temperature=0.8, seed=seed, **own) for seed in range(count)])
    rows = jnp.asarray(np.broadcast_to(row, (count, 1, VOCAB)))
    got = jitted_choose(
        rows, jnp.zeros((count, 1), jnp.int32), jnp.full(count, 9, jnp.int32), sampling, max_depth=0
    )
    counts = np.bincount(np.asarray(got)[:, 0], minlength=VOCAB)
    exact = distribution(row, SamplingParams(temperature=0.8, **own))
    assert chi_square(counts, count * exact) > 1e-3
    if not own:
        # The test can tell: at another temperature it would fail.
        assert chi_square(counts, count * distribution(row, SamplingParams(temperature=1.0))) < 1e-6


@pytest.fixture(scope="module")
def models():
    # A larger deviation than usual: eight nearly equal probabilities would hide a lost temperature.
    return random_target(SMALL, 0, std=0.6), random_head(SMALL, 5)


def decode(models, params):
    return generate_tree(*models, [PROMPT] * len(params), params, budget=16, width=3)


@pytest.mark.parametrize(
    "own",
    [
        {"temperature": 1.0},
        wide({"temperature": 0.6}),
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_every_token_has_its_conditional_distribution(models, own):
    """Long texts: what was drawn less its exact probability given its prefix is a martingale.

    Grouped by the token before, its sums are normal with a known covariance, whatever the model is.
    """
    params = [SamplingParams(seed=1000 + seed, max_tokens=200, **own) for seed in range(16)]
    outputs = decode(models, params)
    sequences = np.array([PROMPT + output.token_ids for output in outputs])
    rows = np.asarray(logits(models[0], sequences))
    value = statistic(sequences, rows, params[0])
    assert value > 1e-3
    # The test can tell: with another temperature it would fail.
    wrong = dataclasses.replace(params[0], temperature=own["temperature"] * 1.4)
    assert statistic(sequences, rows, wrong) < 1e-6


def statistic(sequences, rows, params):
    """p-value of all drawn tokens under ``params``."""
    difference = np.zeros((VOCAB, VOCAB))
    covariance = np.zeros((VOCAB, VOCAB, VOCAB))
    for sequence, own_rows in zip(sequences, rows, strict=True):
        for t in range(len(PROMPT), len(sequence)):
            before, token = sequence[t - 1], sequence[t]
            p = distribution(own_rows[t - 1], params)
            difference[before] += np.eye(VOCAB)[token] - p
            covariance[before] += np.diag(p) - np.outer(p, p)
    total = degrees = 0
    for d, c in zip(difference, covariance, strict=True):
        total += d @ np.linalg.pinv(c, rcond=1e-6) @ d
        degrees += np.linalg.matrix_rank(c, tol=1e-6)
    return stats.chi2.sf(total, degrees)


def test_seeds(models):
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1, 0]
    texts = [
        tuple(output.token_ids)
        for output in decode(
            models, [SamplingParams(temperature=1.0, seed=seed, max_tokens=40) for seed in seeds]
        )
    ]
    assert texts[0] == texts[-1]
    assert len(set(texts)) == len(set(seeds))


def test_without_a_seed_one_is_drawn(models):
    """For every request; all tokens are about as likely, or two texts might be alike by chance."""
    params = SamplingParams(temperature=100.0, max_tokens=40)
    texts = [tuple(output.token_ids) for _ in range(2) for output in decode(models, [params] * 8)]
    assert len(set(texts)) == 16
