"""Requests that come, go, share pages and lose them, on a device: each gets what it gets alone."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest

from jetspec_jax import SamplingParams, draft_logits
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.engine.batch import Kind
from jetspec_jax.engine.runner import Runner
from jetspec_jax.models import bind
from tests.decode.compilations import compilations
from tests.decode.oracle import OracleProposer, plant
from tests.decode.ties import TIE, first_difference, gap_of_difference
from tests.decode.tiny import (
    HYBRID,
    SLIDING,
    TINY,
    TinyEngine,
    finish,
    random_head,
    random_target,
    with_windows,
)
from tests.marks import wide

LIMIT = 384
TREE = TreeSettings(16, 2)
MODELS = {"dense": with_windows(TINY, None), "windows": SLIDING, "recurrent": HYBRID}


def texts_of(rng, count):
    """Prompts of which some begin alike, and how they go on."""
    begins = [rng.integers(0, 64, 200).tolist() for _ in range(2)]
    asked = []
    for seed in range(count):
        most = int(rng.choice([1, 20, 120, 150, 180]))
        begin = begins[int(rng.integers(2))][: int(rng.choice([0, 0, 64, 128]))]
        prompt = begin + rng.integers(0, 64, int(rng.integers(1, 20))).tolist()
        params = SamplingParams(temperature=float(seed % 2), seed=seed, max_tokens=most, ignore_eos=True)
        asked.append((prompt, params))
    return asked


def planted(monkeypatch, truth):
    """An oracle that knows what each request says, whichever slot it has."""
    launch = Runner.launch

    def launched(runner, batch, *arguments, **settings):
        for admission in batch.admissions:
            held[admission.slot] = truth[admission.params.seed]
        runner.weights = runner.weights._replace(proposer=plant(held, LIMIT + 16))
        return launch(runner, batch, *arguments, **settings)

    held = [[] for _ in range(4)]
    monkeypatch.setattr(Runner, "launch", launched)


@functools.cache
def plain_engine(target):
    """One that shares no pages."""
    engine = TinyEngine(target)
    engine.scheduler.pool.shares = False
    return engine


def tokens_alone(target, prompt, params):
    """Plain decoding of one request, of which nothing was in the stores before."""
    engine = plain_engine(target)
    request = engine.submit(prompt, params)
    finish(engine)
    assert request.prefix_tokens == 0
    return request.tokens


def check_pages(pool, tables):
    """Every page is in one state, with exactly these block tables."""
    counts = collections.Counter(page for pages in tables for page in pages)
    assert counts == collections.Counter(pool._reference_counts)
    places = [*pool._free, *pool._reference_counts, *pool._cached]
    assert sorted(places) == list(range(pool.num_pages))
    assert {key: page for page, key in pool._keys.items()} == pool._pages
    assert pool._cached.keys() <= pool._keys.keys()
    assert not pool._keys.keys() & set(pool._free)


def serve_all(engine, asked, rng, most_rounds):
    """Requests that come at random; every fifth is cancelled at some time."""
    line, requests, gone = list(asked), [], set()
    while line or engine.busy:
        for _ in range(min(int(rng.poisson(2)), len(line))):
            prompt, params = line.pop(0)
            requests.append(engine.submit(prompt, params))
        engine.launch(int(rng.integers(1, most_rounds)))
        if requests and rng.random() < 0.1:
            req = requests[int(rng.integers(len(requests)))]
            if req.open and len(gone) < len(asked) // 5:
                req.cancel()
                gone.add(req)
        if engine.runner.in_flight:
            engine.collect()
        check_pages(engine.scheduler.pool, [req.pages for req in requests if req.pages])
    finish(engine)
    engine.scheduler.drop_closed()
    assert engine.scheduler.pool.num_free == engine.plan.size.num_pages
    return requests, gone


def assert_as_alone(target, requests, gone, asked, alone):
    assert gone
    for request, (prompt, params), expected in zip(requests, asked, alone, strict=True):
        if request in gone:
            expected = expected[: len(request.tokens)]
        if request.tokens != expected:
            assert first_difference(expected, request.tokens) is not None
            assert gap_of_difference(target, prompt, expected, request.tokens, params) < TIE


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "proposer", "count", "snapshots"),
    [
        ("dense", "oracle", 30, 0),
        ("recurrent", "head", 12, 4),
        wide("windows", "head", 30, 2),
        wide("dense", "head", 60, 0),
        wide("dense", "plain", 100, 0),
        wide("windows", "oracle", 30, 4),
        wide("recurrent", "oracle", 30, 4),
        wide("recurrent", "plain", 60, 0),
    ],
)
def test_each_gets_what_it_gets_alone(monkeypatch, model, proposer, count, snapshots):
    config = dataclasses.replace(MODELS[model], max_position_embeddings=LIMIT)
    target, rng = random_target(config, 0), np.random.default_rng(count)
    asked = texts_of(rng, count)
    alone = [tokens_alone(target, prompt, each) for prompt, each in asked]
    settings = {"slots": 4, "num_pages": 6, "capacity": 384, "snapshots": snapshots}
    if proposer == "oracle":
        oracle = OracleProposer(config.vocab_size)
        planted(monkeypatch, [prompt + tokens for (prompt, _), tokens in zip(asked, alone, strict=True)])
        engine = TinyEngine(
            target, None, TREE, proposer=oracle, proposer_weights=plant([[]] * 4, LIMIT + 16), **settings
        )
    else:
        head = random_head(config, 1) if proposer == "head" else None
        engine = TinyEngine(target, head, TREE if head else PLAIN, **settings)
    requests, gone = serve_all(engine, asked, rng, 3 if proposer == "oracle" else 9)
    assert_as_alone(target, requests, gone, asked, alone)
    assert sum(request.preemptions for request in requests) >= count // 15
    hits = sum(request.prefix_tokens > 0 for request in requests)
    assert hits >= count // 12 if model == "dense" or snapshots else hits == 0
    if proposer == "oracle":
        assert np.mean([length for request in requests for length in request.accept_lengths]) > 2


@pytest.mark.wide
def test_an_engine_for_many_compiles_nothing_while_it_serves(monkeypatch):
    """Dispatches of some of the slots, of trees and plain ones, between parts of prompts."""
    config = dataclasses.replace(MODELS["dense"], max_position_embeddings=LIMIT)
    target, rng = random_target(config, 0), np.random.default_rng(1)
    asked = texts_of(rng, 30)
    alone = [tokens_alone(target, prompt, each) for prompt, each in asked]
    planted(monkeypatch, [prompt + tokens for (prompt, _), tokens in zip(asked, alone, strict=True)])
    engine = TinyEngine(
        target,
        None,
        TreeSettings(16, 2, algorithm="auto"),
        live=(1, 2),
        prefill_tokens=70,
        least_nodes=16,
        slots=4,
        num_pages=8,
        capacity=384,
        chunks=((1, 64), (2, 32)),
        proposer=OracleProposer(config.vocab_size),
        proposer_weights=plant([[]] * 4, LIMIT + 16),
    )
    engine.runner.compiler.compile(engine.runner.programs([Kind()]))
    engine.submit([1, 2], SamplingParams(max_tokens=1, seed=0))
    finish(engine)
    batches, next_batch = [], engine.scheduler.next_batch

    def noted(*arguments):
        batch = next_batch(*arguments)
        batches.extend([] if batch is None else [batch])
        return batch

    monkeypatch.setattr(engine.scheduler, "next_batch", noted)
    with compilations() as seen:
        requests, gone = serve_all(engine, asked, rng, 9)
    assert seen == []
    assert_as_alone(target, requests, gone, asked, alone)
    assert {1, 2, 4} <= {len(batch.live) for batch in batches} <= {0, 1, 2, 4}
    assert {batch.bucket for batch in batches} == {1, 16}
    assert {chunk.tokens.shape for batch in batches for chunk in batch.chunks} == {(1, 64), (2, 32)}
    assert all(request.prefix_tokens % 64 == 0 for request in requests)
    assert sum(request.prefix_tokens > 0 for request in requests) >= 6


def test_the_head_knows_the_tokens_of_shared_pages():
    """Its drafts are those of one forward over all tokens."""
    config = MODELS["dense"]
    target, head = random_target(config, 0), random_head(config, 1)
    engine = TinyEngine(target, head, TREE)
    prompt = np.random.default_rng(0).integers(0, 64, 150).tolist()
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    engine.submit(prompt, params)
    finish(engine)
    request = engine.submit(prompt[:140], params)
    engine.step(3)
    assert request.prefix_tokens == 128
    tokens, state = prompt[:140] + request.tokens, engine.runner.state
    assert state.slots.lengths.tolist() == [len(tokens) - 1]

    @jax.jit
    def propose(weights, state):
        proposer = engine.plan.decoder.proposer
        model = bind(config, weights.target)
        return proposer.propose(weights.proposer, state.proposer, model, state.anchors, state.slots)

    expected = draft_logits(target, head, [tokens])
    np.testing.assert_allclose(propose(engine.runner.weights, state), expected, rtol=0, atol=1e-4)
