"""Crowds on engines for many: every request gets what plain decoding gives it alone."""

import dataclasses

import numpy as np
import pytest

from jetspec_jax import SamplingParams, load_draft_head, load_target
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from tests.decode.tiny import TINY, TinyEngine, finish, random_head, random_target, with_windows
from tests.engine.crowd import Alone, assert_as_alone, engine_for_many, make_crowd, serve_crowd
from tests.families.goldens import MADE_OF_OTHERS, NAMES, golden_target
from tests.marks import wide
from tests.sampling.byte_tokenizer import SPECIAL, byte_tokenizer

CAPACITY = 384


def byte_target(config=None):
    """A tiny target whose tokens are bytes, so that it can follow grammars."""
    tokenizer = byte_tokenizer()
    end = tokenizer.convert_tokens_to_ids(SPECIAL[0])
    config = dataclasses.replace(
        with_windows(TINY, None) if config is None else config,
        vocab_size=len(tokenizer) + 6,
        max_position_embeddings=CAPACITY,
    )
    return random_target(config, 3, eos=(end,), tokenizer=tokenizer)


def serve_and_check(monkeypatch, target, head, crowd, rng, **settings):
    capacity = min(CAPACITY, target.config.max_position_embeddings)
    alone = list(map(Alone(target, capacity), crowd))
    truth = None
    if head is None:
        truth = {
            child.seed: asked.prompt + whole.token_ids
            for asked, own in zip(crowd, alone, strict=True)
            for child, whole in zip(asked.params.each(), own, strict=True)
        }
    engine = engine_for_many(
        monkeypatch, target, head, crowd, rng, capacity=capacity, truth=truth, **settings
    )
    told = serve_crowd(engine, crowd, rng)
    finished, ties = assert_as_alone(target, crowd, told, alone)
    assert finished >= 0.7 * len(crowd)
    assert len(ties) <= 0.05 * len(crowd)
    assert told.compiled == 0
    return told


@pytest.mark.wide
def test_a_small_crowd(monkeypatch, no_type_checks):
    target, rng = byte_target(), np.random.default_rng(0)
    crowd = make_crowd(target, 30, rng, lengths=(1, 20, 60, 90))
    head = random_head(target.config, 4)
    told = serve_and_check(monkeypatch, target, head, crowd, rng, slots=4, num_pages=6, live=())
    assert told.preemptions >= 3
    assert told.prefix_hits >= 5


@pytest.mark.wide
def test_a_crowd_of_the_demo_pair(monkeypatch, no_type_checks):
    target = load_target(DEMO_TARGET, dtype="float32")
    head, rng = load_draft_head(DEMO_DRAFT_HEAD, dtype="float32"), np.random.default_rng(1)
    crowd = make_crowd(target, 30, rng, lengths=(1, 100, 150, 150))
    told = serve_and_check(
        monkeypatch, target, head, crowd, rng, slots=4, num_pages=6, most_rounds=8, live=()
    )
    assert told.preemptions >= 3
    assert told.prefix_hits >= 7
    assert {len(batch.live) for batch in told.batches} == {0, 4}
    assert {batch.bucket for batch in told.batches} == {1, 16}
    forms = [own for own in told.requests if own.params.structured_outputs]
    assert np.mean([length for own in forms for length in own.accept_lengths]) > 1.25  # drafts keep to them


@pytest.mark.parametrize("family", [wide(name) for name in NAMES if name not in MADE_OF_OTHERS])
def test_a_crowd_of_each_family(monkeypatch, no_type_checks, family):
    """Drafts come from an oracle, as nobody has trained heads for these."""
    target, rng = golden_target(family), np.random.default_rng(2)
    # Two kinds of rounds, in place of four, are half the programs.
    crowd = make_crowd(target, 24, rng, lengths=(1, 12, 50, 65), without=("logprobs",))
    size = {"slots": 4, "num_pages": 6, "snapshots": 4}
    told = serve_and_check(monkeypatch, target, None, crowd, rng, live=(), **size)
    assert told.preemptions >= 1
    assert told.prefix_hits >= 1  # of windows and recurrent states too
    assert max(length for own in told.requests for length in own.accept_lengths) > 3


def test_a_prefix_hit_changes_no_round():
    """The head has seen what is on shared pages: as much is accepted as without them."""
    target = random_target(dataclasses.replace(with_windows(TINY, None), vocab_size=16), 0)
    engine = TinyEngine(target, random_head(target.config, 1), TreeSettings(16, 3), slots=2, capacity=256)
    rng = np.random.default_rng(0)
    begin, lengths = rng.integers(0, 16, 140).tolist(), []
    for seed in range(6):
        prompt = begin + rng.integers(0, 16, 5).tolist()
        params = SamplingParams(max_tokens=40, temperature=float(seed % 2), seed=seed, ignore_eos=True)
        both = [engine.request(prompt, params) for _ in range(2)]
        both[0].cache_salt = f"{seed}"  # which nobody else has
        for request in both:
            engine.admit(request)
            finish(engine)
        alone, shared = both
        assert (alone.prefix_tokens, shared.prefix_tokens) == (0, 128 if seed else 0)
        assert (shared.accept_lengths, shared.tree_sizes) == (alone.accept_lengths, alone.tree_sizes)
        assert shared.tokens == alone.tokens
        lengths += shared.accept_lengths
    assert np.mean(lengths) > 1.2
