"""The algorithm "auto" in the engine: any bucket at any dispatch, and always plain decoding's tokens."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate, generate_tree
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.auto_budget import AcceptanceEstimate, AutoBudget, Choice, Pace
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.round_costs import RoundCosts
from jetspec_jax.tree import get_algorithm
from tests.decode.compilations import compilations
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import SLIDING, finish, random_head, random_target, serve

pytestmark = pytest.mark.usefixtures("quick_compiles")

ORACLE = OracleProposer(SLIDING.vocab_size)
NEW_TOKENS = 40
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
# Of every engine here, unless its size is the point: so they share their programs.
SIZE = {"slots": 2, "capacity": 256}
PARAMS = [
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=7),
]


@pytest.fixture(scope="module")
def target():
    return random_target(SLIDING, 0)


@pytest.fixture(autouse=True)
def costs_are_known(monkeypatch):
    """No clock in tests: a tree round takes twice a plain one's time."""

    def known(decoders, weights, state, **_):
        return RoundCosts(
            (64, 768), ((1.0, 1.0), *[(2.0, 2.0)] * (len(decoders) - 1)), (0.1,) * len(decoders), 0.1
        ), state

    monkeypatch.setattr("jetspec_jax.engine.engine.round_costs", known)
    monkeypatch.setattr(Pace, "learn", lambda *_: None)


@pytest.fixture
def every_bucket(monkeypatch):
    """Dispatches take turns through all buckets, and are of 3 rounds."""
    turns, seen = itertools.count(), []

    def choose(self, context, rounds, left, feeds):
        seen.append(context)
        return Choice((0, 2, 1, 0, 1)[next(turns) % 5], 3)

    monkeypatch.setattr(AutoBudget, "choose", choose)
    return seen


def test_tokens_are_plain_decoding_s_whatever_bucket_comes_next(target, every_bucket):
    longer = [dataclasses.replace(p, max_tokens=NEW_TOKENS + ORACLE.depth + 1) for p in PARAMS]
    plain = [completion.token_ids for completion in generate(target, PROMPTS, longer)]
    engine = Engine(
        target,
        settings=TreeSettings(budget=32, width=3, algorithm="auto"),
        **SIZE,
        proposer=ORACLE,
        proposer_weights=plant([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)], 256, 0),
    )
    for completion, expected in zip(serve(engine, PROMPTS, PARAMS), plain, strict=True):
        assert completion.token_ids == expected[:NEW_TOKENS]
        # Plain rounds, and trees of both buckets.
        sizes = set(completion.tree_sizes)
        assert min(sizes) == 1
        assert max(sizes) == 32
        assert sizes & set(range(2, 17))
        assert max(completion.accept_lengths) > 2
    assert every_bucket == sorted(every_bucket)
    assert every_bucket[:2] == [4, 8]


@pytest.fixture
def plain_rounds(monkeypatch):
    """Only plain dispatches, of 5 rounds; what the pace is told of them."""
    told = []
    monkeypatch.setattr(AutoBudget, "choose", lambda *_: Choice(0, 5))
    monkeypatch.setattr(Pace, "learn", lambda self, *own: told.append(own))
    return told


@pytest.mark.parametrize(
    ("rows", "room", "dtype", "atol"),
    [
        (0, 256, "float32", 1e-5),
        (1000, 384, "float32", 1e-5),
        (4096, 1408, "float32", 1e-5),
        (1000, 384, "bfloat16", 0.1),
    ],
)
def test_the_head_sees_all_that_it_drafts_behind(plain_rounds, monkeypatch, rows, room, dtype, atol):
    """Prompts of one to three chunks, some that come while others decode, in pages of those that ended."""
    monkeypatch.setattr("jetspec_jax.engine.size.UNSEEN_ROWS", rows)
    config = dataclasses.replace(SLIDING, max_position_embeddings=512)
    target, head = (
        dataclasses.replace(own, weights=jax.tree.map(lambda leaf: leaf.astype(dtype), own.weights))
        for own in (random_target(config, 0), random_head(config, 1))
    )
    lengths, most = (5, 131, 1, 290, 20), (7, 60, 12, 30, 30)
    settings = TreeSettings(budget=16, width=3, algorithm="auto")
    engine = Engine(target, head, settings, slots=3, capacity=512, num_pages=9)
    for n, own in zip(lengths, most, strict=True):
        prompt = np.random.default_rng(n).integers(0, 64, n)
        engine.submit(prompt, SamplingParams(max_tokens=own, ignore_eos=True))
    for _ in range(6):
        engine.step()
    told = list(plain_rounds)
    assert engine.state.unseen.shape[:2] == (3, room)
    assert [len(request.prompt) for request in engine._running] == [131, 290, 20]  # the others have ended
    waiting = [request.committed - request.seen for request in engine._running]
    assert 0 < max(waiting) <= room
    assert max(waiting) > (290 if rows == 4096 else 0)
    engine._feed()
    for request in engine._running:
        length = int(engine.state.slots.lengths[request.slot])
        assert length == request.committed == request.seen
        # The same as a prompt, of an engine that shows the head every chunk at once.
        alone = Engine(target, head, TreeSettings(16, 3), slots=1, capacity=512)
        tokens = request.prompt.tolist() + request.output.token_ids[:-1]
        same = alone.submit(tokens, SamplingParams(max_tokens=2, ignore_eos=True))
        alone._admit()
        alone._feed()
        for own, expected in zip(rows_of(engine, request), rows_of(alone, same), strict=True):
            own, expected = (np.asarray(x[:length], np.float32) for x in (own, expected))
            np.testing.assert_allclose(own, expected, atol=atol)
            assert np.abs(own).max(axis=(1, 2)).min() > 0
    assert [(bucket, rounds) for bucket, _, rounds, _ in told] == [(0, 5)] * 6
    assert all(seconds > 0 for *_, seconds in told)


def rows_of(engine, request):
    """What a slot's pages hold in the head's stores, token by token."""
    leaves = jax.tree.leaves(engine.state.proposer)
    return [leaf[np.asarray(request.pages)].reshape(-1, *leaf.shape[2:]) for leaf in leaves]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("rows", "behind"),
    [
        (4096, [True, False, True, False, False]),  # the prefill, and two dispatches that are shown
        (0, [True, True, True, False, False]),  # both of them by itself
    ],
)
def test_rounds_are_timed_without_what_runs_before_them(target, monkeypatch, rows, behind, known):
    """A wait for prefills or the head takes 100 seconds here, one for records 1; or they are not timed."""
    now, told = [0.0], []

    def takes(seconds, real):
        def wait(value):
            now[0] += seconds
            return real(value)

        return wait

    turns = iter((0, 0, 1, 1, 0))
    monkeypatch.setattr(AutoBudget, "choose", lambda *_: Choice(next(turns), 3))
    monkeypatch.setattr(Pace, "learn", lambda self, *own: told.append(own))
    monkeypatch.setattr(Pace, "known", lambda self, bucket: known)
    monkeypatch.setattr(jax, "block_until_ready", takes(100.0, jax.block_until_ready))
    monkeypatch.setattr(jax, "device_get", takes(1.0, jax.device_get))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("jetspec_jax.engine.size.UNSEEN_ROWS", rows)
    settings = TreeSettings(budget=16, width=3, algorithm="auto")
    engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=90, ignore_eos=True))
    waited = []
    for _ in range(5):
        before = now[0]
        engine.step()
        waited.append(now[0] - before >= 100.0)
    assert waited == [own and not known for own in behind]
    seconds = [None if own and known else 1.0 for own in behind]
    assert [(bucket, own) for bucket, *_, own in told] == [*zip((0, 0, 1, 1, 0), seconds, strict=True)]


def test_what_is_told_is_learnt_while_the_next_rounds_run(target, monkeypatch):
    """Unless it had fewer rounds than it might: then before the next choice."""
    seen, device_get = [], jax.device_get
    rounds = (16, 3, 3, 16, 16)
    turns = iter(rounds)
    monkeypatch.setattr(AutoBudget, "choose", lambda *_: seen.append("choose") or Choice(1, next(turns)))
    monkeypatch.setattr(AutoBudget, "observe", lambda *_: seen.append("learn"))
    monkeypatch.setattr(jax, "device_get", lambda value: seen.append("wait") or device_get(value))
    settings = TreeSettings(budget=16, width=3, algorithm="auto")
    engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=90, ignore_eos=True))
    engine._prepare_auto()
    seen.clear()
    for _ in rounds:
        engine.step(16)
    at_once, later = ["choose", "wait", "learn"], ["choose", "wait"]
    assert seen == [*later, "choose", "learn", "wait", "learn", *at_once, *later, "choose", "learn", "wait"]


def test_the_estimate_is_told_of_new_texts(target, monkeypatch):
    """Of the kind that is decoded, before the choice; again if something of other texts was learnt since."""
    seen = []
    monkeypatch.setattr(AutoBudget, "choose", lambda *_: seen.append("choose") or Choice(1, 4))
    monkeypatch.setattr(AutoBudget, "observe", lambda *_: seen.append("learn"))
    settings = TreeSettings(budget=16, width=3, algorithm="auto")
    engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
    kinds = {id(estimate): sampled for sampled, estimate in engine._acceptance.items()}
    monkeypatch.setattr(AcceptanceEstimate, "begin", lambda *own: seen.append((kinds[id(own[0])], own[1])))
    greedy, sampled = (SamplingParams(temperature=t, max_tokens=40, ignore_eos=True) for t in (0.0, 1.0))
    engine.submit(PROMPTS[0], greedy)
    engine.step(4)
    engine.step(4)
    assert seen == [(False, 1.0), "choose", (False, 0.0), "choose", "learn", (False, 0.0)]
    seen.clear()
    engine.submit(PROMPTS[1], sampled)
    engine.step(4)
    assert seen == [(True, 0.5), "choose", "learn", (True, 0.5)]


def test_what_is_not_to_be_learnt_is_not_waited_for(target, monkeypatch):
    """Though it comes behind a prefill, and nobody knows how long such rounds take."""
    seen = []
    monkeypatch.setattr(AutoBudget, "choose", lambda *_: Choice(0, 3, learns=False))
    monkeypatch.setattr(AutoBudget, "observe", lambda *_: seen.append("learn"))
    monkeypatch.setattr(jax, "block_until_ready", lambda _: seen.append("wait"))
    settings = TreeSettings(budget=16, width=3, algorithm="auto")
    engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
    request = engine.submit(PROMPTS[0], SamplingParams(max_tokens=10, ignore_eos=True))
    finish(engine)
    engine._learn()
    assert (len(request.output.token_ids), seen) == (10, [])


def test_what_is_told_is_learnt_whatever_comes_between(target, monkeypatch):
    """One free probe, although engines change their size after every request, and nothing compiles later."""
    chosen, choose = [], AutoBudget.choose

    def noted(self, *own):
        chosen.append(choose(self, *own))
        return chosen[-1]

    monkeypatch.setattr(AutoBudget, "choose", noted)
    settings = TreeSettings(budget=16, width=3, algorithm="auto")
    engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
    for turn, tokens in enumerate((30, 6, 6, 6, 6)):
        engine.resize(1 + turn % 2, 256)
        with compilations() as seen:
            serve(engine, [PROMPTS[turn % 2]], [SamplingParams(max_tokens=tokens, ignore_eos=True)])
        assert turn < 2 or seen == []
    assert chosen[0] == Choice(1, 8)
    assert chosen.count(Choice(1, 8)) == 1
    assert chosen[-1] == Choice(0, 5)


def test_an_interrupted_step_loses_nothing(target, every_bucket, monkeypatch):
    """No tokens, wherever it was interrupted."""
    [plain] = generate(target, PROMPTS[:1], PARAMS[0])
    settings = TreeSettings(budget=32, width=3, algorithm="auto")
    for owner, name, calls, rounds, in_flight in (
        (jax, "device_get", 1, None, True),
        (jax, "device_get", 4, None, True),
        (jax, "block_until_ready", 0, None, False),
        (AutoBudget, "observe", 1, None, False),
        (AutoBudget, "observe", 1, 3, True),  # of the rounds before
    ):
        engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
        real, left = getattr(owner, name), itertools.count(calls, -1)

        def interrupted(*own, real=real, left=left):
            if next(left) == 0:
                raise KeyboardInterrupt
            return real(*own)

        request = engine.submit(PROMPTS[0], PARAMS[0])
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                any(engine.step(rounds) for _ in range(100))
        assert (engine._records is not None) == in_flight
        finish(engine)
        assert request.output.token_ids == plain.token_ids, name


def test_a_choice_is_told_how_much_the_head_has_not_seen(target, monkeypatch):
    """In launches, of all slots: they show it 128 tokens of one."""
    told = []
    monkeypatch.setattr(AutoBudget, "choose", lambda *own: told.append(own[-1]) or Choice(0, 60))
    engine = Engine(target, random_head(SLIDING, 1), TreeSettings(16, 3, algorithm="auto"), **SIZE)
    prompts = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (100, 5)]
    serve(engine, prompts, [SamplingParams(max_tokens=80, ignore_eos=True)] * 2)
    assert told == [1 + 1, 2 + 1]


def test_plain_rounds_feed_the_head_s_context(target):
    """At the end of a dispatch, all that tree rounds would have fed; an ended slot is left alone."""
    params = [dataclasses.replace(PARAMS[0], max_tokens=30), dataclasses.replace(PARAMS[0], max_tokens=5)]

    def state_after(make_decode):
        settings = TreeSettings(budget=16, width=3, algorithm="auto")
        engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
        for prompt, own in zip(PROMPTS, params, strict=True):
            engine.submit(prompt, own)
        for _ in range(2):
            engine.step(8, make_decode(engine._decoders[0]))
        return engine.state

    def round_by_round(decoder):
        one_round = jax.jit(decoder.round)

        def decode(weights, state, rounds):
            records = []
            for _ in range(int(rounds)):
                state, record = one_round(weights, state)
                records.append(record)
            return state, jax.tree.map(lambda *own: jnp.stack(own), *records)

        return decode

    late, each = state_after(lambda decoder: decoder.decode), state_after(round_by_round)
    np.testing.assert_array_equal(late.slots.lengths, each.slots.lengths)
    np.testing.assert_array_equal(late.slots.lengths, [len(PROMPTS[0]) + 16, 0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), late.proposer, each.proposer)
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(late.proposer))


def test_a_dispatch_tells_what_smaller_trees_would_have_had_accepted(target):
    """Of every round of every slot that decoded, and nothing of the others."""
    settings = TreeSettings(budget=32, width=3, algorithm="auto")
    engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
    seen = []

    def round_by_round(weights, state, rounds):
        """Also looks at the trees themselves."""
        decoder, records = engine._decoders[2], []
        for _ in range(int(rounds)):
            tree = decoder.build(state, decoder.draft(weights, state))
            output = decoder.verify(weights, state, tree)
            accepted = decoder.accept(state, tree, output.logits)
            seen.append(jax.device_get((accepted.path, accepted.counts, jnp.exp(tree.scores))))
            state, record = decoder.commit(weights, state, tree, output, accepted)
            records.append(record.with_reach((16, 32)))
        return state, jax.tree.map(lambda *own: jnp.stack(own), *records)

    def all_at_once(weights, state, rounds):
        before = jax.tree.map(jnp.copy, state)
        together.append(engine._decoders[2].decode(weights, state, rounds)[1])
        return round_by_round(weights, before, rounds)

    together = []
    for prompt, own in zip(PROMPTS, (PARAMS[0], dataclasses.replace(PARAMS[0], max_tokens=3)), strict=True):
        engine.submit(prompt, own)
    engine.step(4, all_at_once)
    reach = jax.device_get(together[0].reach)
    for row, (path, counts, drafted) in enumerate(seen):
        for slot in range(2):
            decoded = counts[slot] > 0
            for k, budget in enumerate((16, 32)):
                assert reach.accepted[row, slot, k] == decoded * sum(0 < x < budget for x in path[slot])
                np.testing.assert_allclose(
                    reach.expected[row, slot, k], decoded * drafted[slot, 1:budget].sum(), rtol=1e-5
                )
    assert reach.accepted.any()
    decoded = [counts[1] > 0 for _, counts, _ in seen]
    assert any(decoded)
    assert not all(decoded)
    assert not reach.expected[len(seen) :].any()


def test_nothing_compiles_after_a_first_request(target, every_bucket):
    head = random_head(SLIDING, 1)

    def run(count, tokens):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return generate_tree(target, head, PROMPTS[:1] * count, params, budget=32, width=3, algorithm="auto")

    run(2, 24)
    with compilations() as seen:
        run(2, 40)
    assert seen == []


def test_the_choice_follows_what_is_accepted(target):
    """The oracle is always right, so trees soon pay; a random head never is, so they never do."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    plain, _ = generate(target, PROMPTS, dataclasses.replace(params, max_tokens=220))
    settings = TreeSettings(budget=32, width=3, algorithm="auto")
    engine = Engine(
        target,
        settings=settings,
        **SIZE,
        proposer=ORACLE,
        proposer_weights=plant([[*PROMPTS[0], *plain.token_ids], []], 256, 0),
    )
    [good] = serve(engine, PROMPTS[:1], [params])
    engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
    [bad] = serve(engine, PROMPTS[:1], [params])
    assert np.mean(np.asarray(good.tree_sizes) == 1) < 0.2
    assert np.mean(np.asarray(bad.tree_sizes) == 1) > 0.7
    assert good.token_ids == bad.token_ids == plain.token_ids[:200]


def test_greedy_and_sampled_requests_are_learnt_apart(target):
    """What greedy requests have accepted is no guess for a sampled one, and is not forgotten over it."""
    settings = TreeSettings(budget=16, width=3, algorithm="auto")
    engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
    guess = engine._acceptance[True].tokens()
    serve(engine, PROMPTS[:1], PARAMS[:1])
    greedy = engine._acceptance[False].tokens()
    assert greedy != guess
    assert engine._acceptance[True].tokens() == guess
    serve(engine, PROMPTS[1:], PARAMS[1:])
    assert engine._acceptance[True].tokens() != guess
    assert engine._acceptance[False].tokens() == greedy


def test_shape_of_the_trees_is_an_option(target, every_bucket):
    completion, _ = generate_tree(
        target,
        random_head(SLIDING, 1),
        PROMPTS,
        PARAMS[0],
        budget=32,
        algorithm=get_algorithm("auto", {"tree": "chain"}),
    )
    assert set(completion.tree_sizes) == {1, 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "auto"}, "auto needs another algorithm"),
        ({"tree": "best"}, "unknown tree algorithm 'best'"),
        ({"tree": ["chain"]}, r"tree must be an algorithm or the name of one, not \['chain'\]"),
        ({"probing": "0.1"}, "'auto': probing must be a finite number, not '0.1'"),
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
