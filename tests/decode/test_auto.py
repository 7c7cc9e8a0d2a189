"""The algorithm "auto" in an engine: any bucket at any dispatch, and always plain decoding's tokens."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate
from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.decode.state import grow
from jetspec_jax.engine.plan import plan_engine
from jetspec_jax.engine.policy import AutoBudget
from jetspec_jax.engine.runner import Runner
from jetspec_jax.tree import get_algorithm
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import SLIDING, TinyEngine, head_config, random_head, random_target, serve

ORACLE = OracleProposer(SLIDING.vocab_size)
# Trees that reach less: all buckets have their turn before the requests end.
SETTINGS = TreeSettings(32, 3, algorithm=get_algorithm("auto", {"tree": "accum_logp"}))
BUCKETS = (1, 16, 32)
NEW_TOKENS = 40
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
PARAMS = [
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=7),
]


@pytest.fixture(scope="module")
def target():
    return random_target(SLIDING, 0)


@pytest.fixture(scope="module")
def head():
    return random_head(SLIDING, 1)


@pytest.fixture
def known_times(monkeypatch):
    """No clock: a tree round takes twice a plain one's time."""
    collect = Runner.collect

    def timed(runner):
        record = collect(runner)
        batch = record.batch._replace(chunks=())
        return record._replace(seconds=0.01 * record.rounds * (1 + (batch.bucket > 1)), batch=batch)

    monkeypatch.setattr(Runner, "collect", timed)


@pytest.fixture(scope="module")
def oracle(target):
    """An engine for both prompts, whose trees hold their continuations; and these."""
    longer = [dataclasses.replace(own, max_tokens=200 + ORACLE.depth + 1) for own in PARAMS]
    plain = [completion.token_ids for completion in generate(target, PROMPTS, longer)]
    weights = plant([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)], 256, 0)

    def make():
        return TinyEngine(target, None, SETTINGS, slots=2, proposer=ORACLE, proposer_weights=weights)

    return make, plain


def every_bucket(monkeypatch, buckets=(1, 32, 16, 1, 16)):
    """Dispatches take turns through all buckets, and are of 3 rounds; what each of them did."""
    turns, records = itertools.cycle(buckets), []
    monkeypatch.setattr(AutoBudget, "choose", lambda _, live, *__: ((2, next(turns)), 3))
    monkeypatch.setattr(AutoBudget, "observe", lambda _, record: records.append(record))
    return records


@pytest.mark.usefixtures("known_times")
def test_tokens_are_plain_decoding_s_whatever_bucket_comes_next(oracle, monkeypatch):
    make, plain = oracle
    records = every_bucket(monkeypatch)
    for completion, expected in zip(serve(make(), PROMPTS, PARAMS), plain, strict=True):
        assert completion.token_ids == expected[:NEW_TOKENS]
        # Plain rounds, and trees of both buckets.
        assert {1, 16, 32} == set(completion.tree_sizes)
        assert max(completion.accept_lengths) > 2
    assert [record.batch.bucket for record in records[:4]] == [1, 32, 16, 1]
    # Trees tell of every bucket up to theirs, plain rounds of none.
    for record in records:
        rounds = len(record.tokens)
        assert (record.expected is None) == (record.accepted is None) == (record.batch.bucket == 1)
        if record.batch.bucket > 1:
            shape = rounds, 2, BUCKETS.index(record.batch.bucket)
            assert record.expected.shape == record.accepted.shape == shape
            assert not record.expected[record.tree_sizes == 0].any()


@pytest.mark.wide
@pytest.mark.usefixtures("known_times")
def test_a_round_tells_what_smaller_trees_would_have_had_accepted(oracle):
    """The same as building, verifying and accepting those; nothing of a slot that does not decode."""
    engine = oracle[0]()
    for prompt, most in zip(PROMPTS, (90, 1), strict=True):
        engine.submit(prompt, dataclasses.replace(PARAMS[0], max_tokens=most))
    engine.step(1)

    @jax.jit
    def round_of_both(weights, state):
        (_, small), (after, large) = (engine.runner.decoders[own].round(weights, state) for own in (16, 32))
        return after, (small, small.counts), (large, large.counts)

    # The engine gives pages before each dispatch; here nobody else wants any.
    state, beyond = engine.runner.state, 0
    held = [page for page in state.slots.block_tables[0].tolist() if page != NO_PAGE]
    others = [page for page in range(engine.plan.size.num_pages) if page not in held]
    pages = np.array(held + others, np.int32)[: engine.plan.size.pages_per_slot]
    state = grow(state, np.zeros(1, np.int32), pages[None])
    for _ in range(8):
        state, *both = round_of_both(engine.runner.weights, state)
        (small, small_counts), (large, large_counts) = jax.device_get(both)
        assert (large_counts > 0).tolist() == [True, False]
        drafted = np.stack([small_counts, large_counts], axis=1)[:1] - 1
        np.testing.assert_array_equal(large.reach.accepted[:1], drafted)
        np.testing.assert_allclose(large.reach.expected[:, :1], small.reach.expected, rtol=1e-5)
        assert large.reach.expected[0, 1] > large.reach.expected[0, 0] > 0
        assert not large.reach.expected[1].any()
        assert not large.reach.accepted[1].any()
        beyond += int(large_counts[0] > small_counts[0])
    assert beyond, "no path went beyond the smaller tree"


@pytest.mark.wide
@pytest.mark.usefixtures("known_times")
def test_the_choice_follows_what_is_accepted(target, head, oracle):
    """The oracle is always right, so trees soon pay; a random head never is, so they never do."""
    make, plain = oracle
    params = dataclasses.replace(PARAMS[0], max_tokens=200)
    [good] = serve(make(), PROMPTS[:1], [params])
    [bad] = serve(TinyEngine(target, head, SETTINGS, slots=2), PROMPTS[:1], [params])
    assert np.mean(np.asarray(good.tree_sizes) == 1) < 0.2
    assert np.mean(np.asarray(bad.tree_sizes) == 1) > 0.7
    assert good.token_ids == bad.token_ids == plain[0][:200]


def test_shape_of_the_trees_is_an_option():
    chain = get_algorithm("auto", {"tree": "chain"})
    plan = plan_engine(
        SLIDING,
        head_config(SLIDING),
        TreeSettings(32, 3, algorithm=chain),
        jnp.dtype("float32"),
        least_nodes=16,
    )
    assert [(own.bucket, own.algorithm, own.observes) for own in plan.decoders] == [
        (bucket, get_algorithm("chain"), BUCKETS[1:] if bucket > 1 else ()) for bucket in BUCKETS
    ]
    # Those that pay where many slots decode; a small budget is a choice between it and plain decoding.
    small = dataclasses.replace(plan, least_nodes=4)
    assert [own.bucket for own in small.decoders] == [1, 4, 8, 16, 32]
    assert {own.observes for own in small.decoders[1:]} == {(4, 8, 16, 32)}
    four = dataclasses.replace(plan, decoder=dataclasses.replace(plan.decoder, bucket=4))
    assert [own.bucket for own in four.decoders] == [1, 4]
    plain = dataclasses.replace(plan.decoder, bucket=1)
    assert dataclasses.replace(plan, decoder=plain).decoders == (plain,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "auto"}, "auto needs another algorithm"),
        ({"tree": "best"}, "unknown tree algorithm 'best'"),
        ({"probing": 2}, "probing must be a share in 0..1, not 2"),
        (
            {"buckets": [1]},
            r"unknown options \['buckets'\] of the tree algorithm 'auto'; it has: probing, tree",
        ),
    ],
)
def test_options_that_are_not_valid(options, message):
    with pytest.raises(ValueError, match=message):
        get_algorithm("auto", options)
