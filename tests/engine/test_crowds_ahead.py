"""Crowds on engines with two batches in flight: every request gets what plain decoding gives it alone.

As on a GPU; when results are fetched is left to chance.
"""

import numpy as np
import pytest

from jetspec_jax import load_draft_head, load_target
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from tests.decode.tiny import random_head
from tests.engine.crowd import make_crowd
from tests.engine.test_crowds import byte_target, serve_and_check
from tests.families.goldens import golden_target
from tests.marks import wide


@pytest.mark.wide
def test_a_small_crowd(monkeypatch, no_type_checks):
    """Of all kinds: grammars, adjustments, log-probabilities, stop strings, callers that leave."""
    target, rng = byte_target(), np.random.default_rng(0)
    crowd = make_crowd(target, 40, rng, lengths=(1, 60, 90, 120))
    head = random_head(target.config, 4)
    told = serve_and_check(
        monkeypatch, target, head, crowd, rng, slots=4, num_pages=6, live=(), overlapped=True
    )
    assert told.preemptions >= 3
    assert told.prefix_hits >= 5
    assert {batch.rounds for batch in told.batches} == {0, 1}


@pytest.mark.wide
def test_a_crowd_of_the_demo_pair(monkeypatch, no_type_checks):
    target = load_target(DEMO_TARGET, dtype="float32")
    head, rng = load_draft_head(DEMO_DRAFT_HEAD, dtype="float32"), np.random.default_rng(1)
    crowd = make_crowd(target, 20, rng, lengths=(1, 100, 150), without=("logprobs", "structured_outputs"))
    told = serve_and_check(
        monkeypatch, target, head, crowd, rng, slots=4, num_pages=6, live=(2,), overlapped=True
    )
    assert told.preemptions >= 1
    assert told.prefix_hits >= 3
    assert {2, 4} <= {len(batch.live) for batch in told.batches} <= {0, 2, 4}


@pytest.mark.parametrize("family", [wide("qwen3_next"), wide("gpt_oss")])
def test_snapshots_are_kept_and_restored_in_order(monkeypatch, no_type_checks, family):
    """Rings and recurrent states, which are no pages."""
    target, rng = golden_target(family), np.random.default_rng(2)
    crowd = make_crowd(target, 24, rng, lengths=(50, 65), without=("logprobs",))
    size = {"slots": 4, "num_pages": 6, "snapshots": 4}
    told = serve_and_check(monkeypatch, target, None, crowd, rng, live=(), overlapped=True, **size)
    assert told.prefix_hits >= 1
    assert max(length for own in told.requests for length in own.accept_lengths) > 3
