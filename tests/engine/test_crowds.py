"""Crowds on engines for many: every request gets what plain decoding gives it alone."""

import dataclasses
import time

import numpy as np
import pytest

from jetspec_jax import load_draft_head, load_target
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from tests.decode.tiny import TINY, random_head, random_target, with_windows
from tests.engine.crowd import Alone, assert_as_alone, engine_for_many, make_crowd, serve_crowd
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
    start = time.time()
    alone = list(map(Alone(target, CAPACITY), crowd))
    truth = None
    if head is None:
        truth = {
            child.seed: asked.prompt + whole.token_ids
            for asked, own in zip(crowd, alone, strict=True)
            for child, whole in zip(asked.params.each(), own, strict=True)
        }
    t0 = time.time()
    print("alone", t0 - start, flush=True)
    engine = engine_for_many(
        monkeypatch, target, head, crowd, rng, capacity=CAPACITY, truth=truth, **settings
    )
    t1 = time.time()
    print("compiled", t1 - t0, flush=True)
    told = serve_crowd(engine, crowd, rng)
    print(
        "served",
        time.time() - t1,
        len(told.batches),
        told.preemptions,
        told.prefix_hits,
        told.compiled,
        flush=True,
    )
    finished, ties = assert_as_alone(target, crowd, told, alone)
    assert finished >= 0.7 * len(crowd)
    assert len(ties) <= 0.05 * len(crowd)
    assert told.compiled == 0
    return told


def test_a_small_crowd(monkeypatch, no_type_checks):
    target, rng = byte_target(), np.random.default_rng(0)
    crowd = make_crowd(target, 30, rng, lengths=(1, 20, 60, 90))
    head = random_head(target.config, 4)
    told = serve_and_check(monkeypatch, target, head, crowd, rng, slots=4, num_pages=7, live=())
    assert told.preemptions >= 3
    assert told.prefix_hits >= 5


@pytest.mark.wide
def test_a_crowd_of_the_demo_pair(monkeypatch, no_type_checks):
    target = load_target(DEMO_TARGET, dtype="float32")
    head, rng = load_draft_head(DEMO_DRAFT_HEAD, dtype="float32"), np.random.default_rng(1)
    crowd = make_crowd(target, 200, rng, lengths=(1, 12, 40, 70))
    told = serve_and_check(
        monkeypatch, target, head, crowd, rng, slots=4, num_pages=8, live=()
    )
    assert told.preemptions >= 20
    assert told.prefix_hits >= 50
    assert {len(batch.live) for batch in told.batches} == {0, 4}
    assert {batch.bucket for batch in told.batches} == {1, 16}
