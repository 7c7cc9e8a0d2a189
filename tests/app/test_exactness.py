"""Where two decodings part, and how far apart the choices were there."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams, logits
from jetspec_jax.inspect.exactness import TIE_GAP, Divergence, first_divergence, tie_gap_at
from tests.decode.tiny import TINY, random_target

pytestmark = pytest.mark.usefixtures("optimised")

PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def target():
    return random_target(TINY, 5)


def test_equal_outputs_do_not_part(target):
    assert first_divergence(target, PROMPT, SamplingParams(), [1, 2], (1, 2)) is None


@pytest.mark.wide
def test_the_first_difference_and_the_gap_there(target):
    found = first_divergence(target, PROMPT, SamplingParams(), [5, 6, 7, 8], [5, 6, 9, 9])
    row = np.sort(np.asarray(logits(target, [[*PROMPT, 5, 6]]))[0, -1])
    assert (found.position, found.token, found.expected) == (2, 7, 9)
    assert found.gap == pytest.approx(row[-1] - row[-2], abs=1e-5)
    logit = np.asarray(logits(target, [[*PROMPT, 5, 6]]))[0, -1]
    assert found.behind == pytest.approx(row[-1] - min(logit[7], logit[9]), abs=1e-5)


@pytest.mark.parametrize(("ours", "theirs", "at"), [([5], [5, 6], (1, None, 6)), ([5, 6], [5], (1, 6, None))])
def test_one_may_end_before_the_other(target, ours, theirs, at):
    found = first_divergence(target, PROMPT, SamplingParams(), ours, theirs)
    assert (found.position, found.token, found.expected) == at
    assert found.behind is None
    assert not found.is_tie


@pytest.mark.parametrize(("behind", "tie"), [(0.5 * TIE_GAP, True), (2 * TIE_GAP, False), (None, False)])
def test_a_tie_is_between_the_two_tokens_that_differ(behind, tie):
    # Two other tokens may well be close to each other: that excuses nothing.
    assert Divergence(0, 1, 2, 0.5 * TIE_GAP, behind).is_tie == tie


def test_a_token_may_have_a_bound_of_its_own():
    assert Divergence(0, 1, 2, 0.5, 5e-4, tie_gap=1e-3).is_tie
    assert not Divergence(0, 1, 2, 0.5, 2e-3, tie_gap=1e-3).is_tie


def test_attention_has_one_bound(target):
    assert tie_gap_at(target, PROMPT, [5, 6], SamplingParams(), 1, 2) == TIE_GAP


def test_a_token_that_the_filter_takes_out_is_no_tie(target):
    row = np.asarray(logits(target, [PROMPT]))[0, -1]
    best, second = np.argsort(row)[::-1][:2].tolist()
    params = SamplingParams(temperature=1.0, seed=0, top_k=1)
    found = first_divergence(target, PROMPT, params, [second], [best])
    assert (found.gap, found.behind, found.is_tie) == (np.inf, None, False)


def test_the_noise_of_a_sampled_choice_must_be_known(target):
    with pytest.raises(ValueError, match="seed"):
        first_divergence(target, PROMPT, SamplingParams(temperature=1.0), [0], [1])
    settings = SamplingParams(temperature=1.0, seed=3), SamplingParams()
    sampled, greedy = (first_divergence(target, PROMPT, params, [0], [1]) for params in settings)
    assert sampled.gap != greedy.gap
