"""The n-gram baseline is a distribution, and a good one of what it was made for."""

import numpy as np
import pytest

from train.demo.ngram import NGram

V = 5


def chain(length, seed=0):
    """A Markov chain: after x mostly comes 2x + 1."""
    rng = np.random.default_rng(seed)
    x = [0]
    for _ in range(length - 1):
        x.append((2 * x[-1] + 1) % V if rng.random() < 0.9 else int(rng.integers(V)))
    return np.array(x)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_probabilities_sum_to_one(order):
    model = NGram(chain(300), order=order, vocab_size=V)
    for context in ([0, 1, 3], [4, 4, 4], [2, 0, 0]):
        total = sum(2 ** -model.bits(np.array([*context, w]))[-1] for w in range(V))
        assert total == pytest.approx(1)


def test_it_learns_the_chain():
    held = chain(2000, seed=1)
    rates = [NGram(chain(20000), order=n, vocab_size=V).bits(held).mean() for n in (1, 2, 4)]
    # Entropy of a step: 0.92 for the likely one, 0.02 for each of the four others.
    entropy = -(0.92 * np.log2(0.92) + 4 * 0.02 * np.log2(0.02))
    assert rates[0] > 2
    assert rates[1] == pytest.approx(entropy, abs=0.05)
    assert rates[2] == pytest.approx(entropy, abs=0.1)


def test_an_order_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="63 bits"):
        NGram(chain(10), order=6, vocab_size=4096)
