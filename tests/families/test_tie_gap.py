"""What rounding may explain of a difference, where layers are recurrent."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.inspect import exactness
from tests.families.goldens import IDS, golden_target, in_float64
from tests.float64 import FACTOR


@pytest.mark.wide
def test_the_bound_at_a_token_is_what_rounding_amounts_to_there(monkeypatch):
    """At the least and at the most sensitive of some tokens, as samples of rounding in float64 have it."""
    target, (values, bound) = golden_target("qwen3_5_moe"), in_float64("qwen3_5_moe")
    monkeypatch.setattr(exactness, "TIE_GAP", 0.0)  # what is measured, however small
    found, rounding = np.empty((2, 2))
    for i, find in enumerate((np.argmin, np.argmax)):
        place = 8 + int(find(bound[1, 8:16]))  # one program of 16 tokens
        best, second = np.argsort(values[1, place])[::-1][:2].tolist()
        prompt = IDS[1, : place + 1].tolist()
        found[i] = exactness.tie_gap_at(target, prompt, [], SamplingParams(), best, second)
        rounding[i] = bound[1, place] / FACTOR
    assert rounding[1] > 5 * rounding[0]
    # More than one rounding of each result, and for two logits not much more than a program may be off.
    np.testing.assert_array_less(rounding, found)
    np.testing.assert_array_less(found, 4 * FACTOR * rounding)
