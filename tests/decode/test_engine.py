"""What an engine serves, and its streams, held against plain decoding of each request alone."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import LLM, SamplingParams, draft_logits, generate, generate_tree
from jetspec_jax.cache.pages import NO_PAGE, PAGE_SIZE
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.models import bind
from jetspec_jax.progress import log_once
from tests.decode.oracle import OracleProposer, plant
from tests.decode.ties import TIE, choice_rows, gaps
from tests.decode.tiny import (
    TINY,
    TinyEngine,
    finish,
    free_pages,
    random_head,
    random_target,
    serve,
    word_tokenizer,
)

LIMIT = 512
CONFIG = dataclasses.replace(TINY, max_position_embeddings=LIMIT)
ORACLE = OracleProposer(CONFIG.vocab_size)
SLOTS = 8
SETTINGS = TreeSettings(budget=16, width=2)
TREE = {"budget": 16, "width": 2}


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 11, tokenizer=word_tokenizer(CONFIG.vocab_size))


@pytest.fixture(scope="module")
def head():
    return random_head(CONFIG, 11)


@pytest.fixture(scope="module")
def alone(target):
    return lambda prompt, params: generate(target, [prompt], params)[0]


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(0, CONFIG.vocab_size, length).tolist()


def sampled(seed, **settings):
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 30, **settings})


@pytest.fixture(scope="module")
def oracle_engine(target, alone):
    """An engine whose first requests, in this order, find their continuations in the trees."""

    def make(prompts=(), params=(), settings=SETTINGS):
        sequences = []
        for prompt, own in zip(prompts, params, strict=True):
            # Past the request's end too, as far as a round may overshoot and the context allows.
            most = min(own.max_tokens + ORACLE.depth + 1, LIMIT - len(prompt))
            free = dataclasses.replace(own, max_tokens=most, stop=(), stop_token_ids=(), ignore_eos=True)
            sequences.append(prompt + alone(prompt, free).token_ids)
        weights = plant((sequences + [[]] * SLOTS)[:SLOTS], LIMIT + 16)
        return TinyEngine(target, None, settings, slots=SLOTS, proposer=ORACLE, proposer_weights=weights)

    return make


def check(completions, expected):
    for got, want in zip(completions, expected, strict=True):
        assert (got.token_ids, got.finish_reason, got.text) == (want.token_ids, want.finish_reason, want.text)


def tau(completions):
    return np.mean([length for completion in completions for length in completion.accept_lengths])


# Pages


@pytest.mark.wide
def test_no_slot_is_longer_than_its_pages(oracle_engine):
    """A slot that has ended is attended over while others decode, and what it overshot lies on no page."""
    prompts, params = [prompt_of(38), prompt_of(41)], [sampled(0, max_tokens=26), sampled(1, max_tokens=80)]
    engine = oracle_engine(prompts, params)
    first, _ = (engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True))
    lengths = []

    def decode(weights, state, rounds):
        state, records = engine.plan.decoder.decode(weights, state, rounds)
        lengths.extend(state.slots.lengths.tolist())
        return state, records

    engine.step(16, decode)
    assert sum(first.accept_lengths) > len(first.tokens) == 26
    assert lengths[0] == first.num_pages * PAGE_SIZE - 1


@pytest.mark.wide
def test_what_is_cancelled_leaves_nothing_behind(oracle_engine, alone):
    engine = oracle_engine()
    requests = [engine.submit(prompt_of(20 * i + 1), sampled(i, max_tokens=40)) for i in range(SLOTS + 3)]
    engine.step(2)
    gone = [requests.pop(i) for i in (-1, 3, 0)]  # the last one waits
    for own in gone:
        own.cancel()
    finish(engine)
    assert free_pages(engine.scheduler) == SLOTS * LIMIT // PAGE_SIZE
    last = engine.submit(prompt_of(1), sampled(0, max_tokens=40))
    requests.append(last)
    engine.launch(1)  # tells the device which requests have ended
    state = engine.runner.state
    tables = [[page for page in row if page != NO_PAGE] for row in state.slots.block_tables.tolist()]
    assert np.flatnonzero(state.active).tolist() == [last.slot]
    # A free slot names no page, so nothing can be written through it.
    assert tables == [last.pages if slot == last.slot else [] for slot in range(SLOTS)]
    finish(engine)
    assert free_pages(engine.scheduler) == SLOTS * LIMIT // PAGE_SIZE
    assert [own.finish_reason for own in gone] == [None] * 3
    for own in requests:
        assert own.tokens == alone(own.prompt, own.params).token_ids


def fill_with_nan(engine):
    state = engine.runner.state
    stores, proposer = (
        jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), part)
        for part in (state.stores, state.proposer)
    )
    engine.runner.state = dataclasses.replace(state, stores=stores, proposer=proposer)
    return engine


def test_nan_in_the_heads_unused_pages_changes_nothing(target, head, alone):
    prompt, params = prompt_of(70), sampled(1)
    clean = TinyEngine(target, head, SETTINGS)
    dirty = fill_with_nan(TinyEngine(target, head, SETTINGS))
    assert np.isnan(jax.tree.leaves(dirty.runner.state.proposer)[0]).all()
    [expected], [got] = serve(clean, [prompt], [params]), serve(dirty, [prompt], [params])
    check([got], [alone(prompt, params)])
    # Tokens alone would not show a spoilt head.
    assert got.accept_lengths == expected.accept_lengths


def test_the_head_knows_every_token(target, head):
    # Of shared pages, of every chunk and of every round: its drafts are those of one forward over all of it.
    prompt = prompt_of(2 * 128 + 40)
    engine = TinyEngine(target, head, SETTINGS)
    serve(engine, [prompt[:140]], [sampled(1)])
    request = engine.submit(prompt, sampled(1))
    engine.step(3)
    assert request.prefix_tokens == 128
    tokens, state = prompt + request.tokens, engine.runner.state
    assert state.slots.lengths.tolist() == [len(tokens) - 1]

    @jax.jit
    def propose(weights, state):
        proposer = engine.plan.decoder.proposer
        model = bind(CONFIG, weights.target)
        return proposer.propose(weights.proposer, state.proposer, model, state.anchors, state.slots)

    expected = draft_logits(target, head, [tokens])
    np.testing.assert_allclose(propose(engine.runner.weights, state), expected, rtol=0, atol=1e-4)


# Batches


def test_a_request_that_joins_others(oracle_engine, alone):
    prompts = [prompt_of(length) for length in (50, 5, 200)]
    params = [sampled(i, max_tokens=50) for i in range(3)]
    engine = oracle_engine(prompts, params)
    requests = [engine.submit(prompts[0], params[0])]
    engine.step(3)
    assert engine.busy
    requests.append(engine.submit(prompts[1], params[1]))
    engine.step(1)
    # The third prompt takes two chunks while both others are in the middle of their texts.
    assert np.asarray(engine.runner.state.active)[:2].all()
    requests.append(engine.submit(prompts[2], params[2]))
    finish(engine)
    for own in requests:
        assert own.tokens == alone(own.prompt, own.params).token_ids


def test_prompts_around_pages_and_chunks(target, oracle_engine):
    # Against a forward over the whole sequence: plain decoding reads the same pages as the tree.
    chunk, page = 128, PAGE_SIZE
    for lengths in (
        (1, page - 1, page, page + 1, chunk - 1, chunk, chunk + 1, 2 * chunk),
        (2 * chunk + 1, 300, 3 * chunk, page - 14, page - 9, page - 5, page - 4, page - 3),
    ):
        prompts = [prompt_of(length) for length in lengths]
        params = [sampled(length, temperature=float(length % 2), max_tokens=20) for length in lengths]
        got = serve(oracle_engine(prompts, params), prompts, params)
        for prompt, own, completion in zip(prompts, params, got, strict=True):
            assert len(completion.token_ids) == 20
            rows = choice_rows(target, prompt, completion.token_ids, own, length=LIMIT)
            wrong = (rows.argmax(-1) != completion.token_ids) & (gaps(rows) >= TIE)
            assert not wrong.any(), (len(prompt), np.flatnonzero(wrong))
        assert tau(got) > 3


def test_a_full_last_page(oracle_engine, alone):
    # A tree of 16 no longer fits after the last tokens, neither in the slot's reserved pages nor, at the
    # context limit, in its table. Neighbours hold the pages right after.
    lengths = (40, 100, LIMIT - 12, LIMIT - 1, 24, 28)
    most = (24, 28, 12, 1, 40, 100)
    prompts = [prompt_of(length) for length in lengths]
    params = [sampled(i, max_tokens=own) for i, own in enumerate(most)]
    assert [sum(pair) % PAGE_SIZE for pair in zip(lengths, most, strict=True)] == [0] * 6
    engine = oracle_engine(prompts, params)
    got = serve(engine, prompts, params)
    assert [len(completion.token_ids) for completion in got] == list(most)
    assert {completion.finish_reason for completion in got} == {"length"}
    check(got, map(alone, prompts, params))
    assert any(sum(completion.accept_lengths) > len(completion.token_ids) for completion in got)


# Settings


def test_budget_1_is_plain_decoding(target, head, alone):
    prompt, params = prompt_of(9), sampled(3)
    [got] = generate_tree(target, head, [prompt], params, budget=1, width=1)
    check([got], [alone(prompt, params)])
    assert got.tree_sizes == [1] * 30
    assert got.tree_depths == [0] * 30
    assert got.accept_lengths == [1] * 30


@pytest.mark.parametrize("depth", [1, 2, 5, None])
def test_depth_limits_the_trees(oracle_engine, alone, depth):
    # At depth 1 and 2 the budget lies beyond the 3 or 7 nodes that the tree can reach, which is legal.
    prompts, params = [prompt_of(12)], [sampled(5, max_tokens=60)]
    engine = oracle_engine(prompts, params, TreeSettings(budget=16, width=2, depth=depth))
    [got] = serve(engine, prompts, params)
    check([got], [alone(prompts[0], params[0])])
    if depth is None:
        assert 6 < max(got.accept_lengths) <= ORACLE.depth + 1
    else:
        assert max(got.accept_lengths) == depth + 1
        assert max(got.tree_depths) == depth
    assert set(got.tree_sizes) == {{1: 3, 2: 7}.get(depth, 16)}
    pairs = zip(got.accept_lengths, got.tree_depths, strict=True)
    assert all(length <= deepest + 1 for length, deepest in pairs)


# Where outputs end


# Streams


@pytest.fixture(scope="module")
def llm(target, head):
    return LLM(target, head, **TREE)


def test_a_stream_is_the_text_in_pieces(llm, short_dispatches):
    prompt, params = prompt_of(17), sampled(2, max_tokens=60)
    [expected] = llm.generate([prompt], params)
    stream = llm.stream(prompt, params)
    pieces = list(stream)
    assert "".join(pieces) == expected.text == stream.completion.text
    assert stream.completion == expected
    assert len(pieces) > 1
    assert all(pieces)
    assert next(stream, None) is None
    [engine] = llm.engines.engines()
    assert engine.open_requests == 0


# What it runs on


@pytest.mark.parametrize("problem", ["no GPU: the default device is a cpu", None])
def test_kernels_that_cannot_run_are_said_once(target, caplog, monkeypatch, problem):
    monkeypatch.setattr("jetspec_jax.engine.engine.gpu_problem", lambda: problem)
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "jetspec_jax"):
        TinyEngine(target, implementation="xla")  # who names it need not be told
        assert caplog.messages == []
        TinyEngine(target)
        TinyEngine(target)
    assert caplog.messages == ([f"tree attention runs on XLA: {problem}"] if problem else [])


@pytest.mark.parametrize("extreme", [{"top_k": 2**40}, {"seed": 2**64 - 1}, {"seed": -(2**63)}])
def test_extreme_settings_are_served(target, alone, extreme):
    params = sampled(7, max_tokens=4, **{k: v for k, v in extreme.items() if k != "seed"})
    if "seed" in extreme:
        params = dataclasses.replace(params, seed=extreme["seed"])
    completion = alone(prompt_of(9), params)
    assert len(completion.token_ids) == 4
    if "top_k" in extreme:
        plain = dataclasses.replace(params, top_k=None)
        assert completion.token_ids == alone(prompt_of(9), plain).token_ids


def test_no_prompts_no_completions(target, head, llm):
    assert generate(target, []) == generate_tree(target, head, []) == llm.generate([]) == []


def test_a_large_budget_equals_plain_decoding(target, oracle_engine, alone):
    prompts = [prompt_of(n, 4) for n in (20, 33)]
    params = [sampled(i, max_tokens=40) for i in range(2)]
    engine = oracle_engine(prompts, params, TreeSettings(budget=256, width=4))
    completions = serve(engine, prompts, params)
    for completion, prompt, own in zip(completions, prompts, params, strict=True):
        assert completion.token_ids == alone(prompt, own).token_ids
        assert max(completion.tree_sizes) == 256
