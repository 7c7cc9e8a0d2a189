"""The scheduler by itself, before a device that is made of NumPy: who is served, when, and until when."""

import pickle

import numpy as np
import pytest

from jetspec_jax import SamplingParams, StructuredOutputsParams
from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.engine.output import Output, RequestMetrics
from jetspec_jax.engine.policy import FixedBudget, LiveSlot
from jetspec_jax.engine.request import DeadlinePassed, Request, State
from jetspec_jax.engine.scheduler import MASKED_ROUNDS, MOST_OVERTAKEN
from jetspec_jax.sampling.grammar import Matcher
from jetspec_jax.sampling.token_sets import NO_CHOICE
from tests.decode.tiny import busy, check_pool, free_pages, free_slots
from tests.engine.fake_device import expected_tokens
from tests.engine.scheduling import (
    BUCKET,
    STEP,
    add,
    assert_served,
    finish,
    make,
    next_batch,
    request,
    slots_of,
    step,
)


def test_a_token_that_is_no_choice_is_an_error():
    """Nothing of such a batch is handed out."""
    scheduler, device = make()
    [req] = add(scheduler, request(5, 9))
    record = device.run(next_batch(scheduler, 1))
    record.tokens[0, req.slot, 1] = NO_CHOICE
    with pytest.raises(ValueError, match="the target's logits are not numbers"):
        scheduler.update(record)
    assert req.tokens == []


def test_what_an_idle_slot_holds_does_not_matter():
    scheduler, device = make()
    [req] = add(scheduler, request(5, 9))
    record = device.run(next_batch(scheduler, 1))
    record.tokens[0, 1 - req.slot] = NO_CHOICE
    scheduler.update(record)
    assert req.tokens == expected_tokens(req)[:STEP]


def test_a_slot_is_cleared_once():
    """By its next request, or with the next batch of others."""
    scheduler, device = make(slots=2, pages=4)
    add(scheduler, request(5, 3), request(6, 40), request(7, 4))
    step(scheduler, device, 1)
    batch = step(scheduler, device, 1)
    assert slots_of(batch) == [0]
    assert batch.releases == ()
    step(scheduler, device, 1)
    # The first slot is free again, and too few pages are: it is released once, with rounds of the other.
    add(scheduler, request(200, 50))
    batch = step(scheduler, device, 1)
    assert (batch.releases, batch.admissions) == ((0,), ())
    assert step(scheduler, device, 1).releases == ()
    finish(scheduler, device)
    # A batch of releases alone would delay the next request.
    [last] = device.slots
    assert scheduler.next_batch() is None
    add(scheduler, request(5, 3), request(6, 3))
    batch = step(scheduler, device, 1)
    assert {*batch.releases, *slots_of(batch)} >= {last}


@pytest.mark.parametrize(
    ("most", "stop", "tokens", "reason", "lengths"),
    [
        (1, None, 1, "length", [3]),
        (9, 0, 1, "stop", [3]),
        (9, 4, 5, "stop", [3, 3]),
        (8, None, 8, "length", [3, 3, 3]),
        (5, 4, 5, "stop", [3, 3]),  # on the last that is allowed
        (5, 5, 5, "length", [3, 3]),
    ],
)
def test_where_a_request_ends(most, stop, tokens, reason, lengths):
    """Rounds count what they committed before the cut, and none after the end."""
    scheduler, device = make()
    text = expected_tokens(request(4, 10))
    [req] = add(scheduler, request(4, most, stop_ids=() if stop is None else text[stop : stop + 1]))
    finish(scheduler, device)
    assert req.tokens == text[:tokens]
    assert req.finish_reason == reason
    assert req.accept_lengths == lengths
    assert req.tree_sizes == [BUCKET] * len(lengths)
    assert req.tree_depths == [STEP - 1] * len(lengths)


def test_a_request_that_no_pool_can_hold_is_refused():
    scheduler, _ = make(slots=1, pages=2)
    message = "needs 3 pages for 100 prompt tokens and max_tokens=60, and the engine has 2"
    with pytest.raises(ValueError, match=message):
        scheduler.add(request(100, 60))
    scheduler, _ = make(slots=1, pages=8, capacity=128)
    with pytest.raises(ValueError, match=r"needs 3 pages .* and a slot can name 2"):
        scheduler.add(request(100, 60))
    assert not busy(scheduler)


class TestLine:
    def test_lower_numbers_go_first_then_who_came_first(self):
        scheduler, device = make(slots=1)
        requests = add(
            scheduler, *(request(5, 3, start=i, priority=p) for i, p in enumerate((1, 0, 2, 0, 1)))
        )
        order = []
        while busy(scheduler):
            batch = step(scheduler, device)
            order += [req for req in requests if batch.admissions and req.started and req not in order]
        assert [requests.index(req) for req in order] == [1, 3, 0, 4, 2]
        assert [req.overtaken for req in requests] == [2, 0, 2, 0, 0]

    def test_nobody_is_overtaken_for_ever(self):
        scheduler, device = make(slots=1)
        [patient] = add(scheduler, request(5, 3, priority=9))
        count = 0
        while not patient.tokens:
            add(scheduler, request(5, 3, start=count, priority=-5))
            step(scheduler, device)
            count += 1
            assert count <= MOST_OVERTAKEN + 1
        assert patient.overtaken == MOST_OVERTAKEN == count - 1


class TestDeadlines:
    @pytest.mark.parametrize(
        ("slots", "message"),
        [
            (1, r"of 1.500 s passed: after 2.000 s the request still waits for a slot"),
            (2, r"after 2.000 s the request has 6 tokens"),
        ],
    )
    def test_one_that_passes_ends_the_request(self, slots, message):
        scheduler, device = make(slots=slots)
        first, late = request(5, 60), request(6, 60, deadline=11.5)
        scheduler.add(first, 10.0)
        scheduler.add(late, 10.0)
        for now in (10.0, 11.0):
            step(scheduler, device, 1, now)
        assert late.open
        step(scheduler, device, 1, 12.0)
        assert (late.state, late.finish_reason) == (State.FAILED, "error")
        assert isinstance(late.error, DeadlinePassed)
        with pytest.raises(TimeoutError, match=message):
            raise late.error
        finish(scheduler, device)
        assert_served(first)
        assert free_pages(scheduler) == 8

    def test_one_that_does_not_pass_does_nothing(self):
        scheduler, device = make()
        scheduler.add(req := request(5, 3, deadline=10.5), 10.0)
        step(scheduler, device, 1, 10.4)
        step(scheduler, device, 1, 11.0)
        assert_served(req)


class TestPrefill:
    def test_goes_on_between_dispatches(self):
        """No more than so many tokens of prompts, while others decode."""
        scheduler, device = make(slots=3, pages=20, capacity=512, prefill_tokens=100)
        first, long, short = add(scheduler, request(5, 90), request(300, 9, start=1), request(30, 9, start=2))
        counts, tokens = [], []
        while long.state is not State.DECODING or not short.tokens:
            batch = step(scheduler, device, 1)
            counts.append(sum(int(chunk.counts.sum()) for chunk in batch.chunks))
            tokens.append(len(first.tokens))
        assert counts == [100, 100, 100, 32]
        assert tokens == [3, 6, 9, 12]
        finish(scheduler, device)
        assert_served(first, long, short)

    def test_takes_prompts_together_where_that_is_cheaper(self):
        scheduler, device = make(slots=3, pages=20, capacity=512)
        requests = add(scheduler, *(request(n, 9, start=n) for n in (50, 190, 60)))
        batch = step(scheduler, device, 1)
        assert [chunk.tokens.shape for chunk in batch.chunks] == [(2, 64), (1, 128), (1, 128)]
        assert [chunk.slots.tolist() for chunk in batch.chunks] == [[0, 1], [1], [2]]
        assert [chunk.counts.tolist() for chunk in batch.chunks] == [[49, 64], [125], [59]]
        assert [chunk.ready.tolist() for chunk in batch.chunks] == [[True, False], [True], [True]]
        finish(scheduler, device)
        assert_served(*requests)

    def test_a_batch_may_have_no_rounds(self):
        scheduler, device = make(slots=2, pages=20, capacity=512, prefill_tokens=64)
        [req] = add(scheduler, request(150, 9))
        batch = scheduler.next_batch()
        assert (batch.live, batch.rounds) == ((), 0)
        assert scheduler.update(device.run(batch)) == []
        finish(scheduler, device)
        assert_served(req)


def test_live_slots_are_as_many_as_a_program_has():
    scheduler, device = make(slots=7, pages=20, live=(1, 2, 4))
    requests = add(scheduler, *(request(5, 3 * n, start=n) for n in range(1, 7)))
    seen = []
    while busy(scheduler):
        seen.append(step(scheduler, device, 1).live)
    assert seen == [tuple(range(7)), tuple(range(7)), (2, 3, 4, 5), (0, 3, 4, 5), (4, 5), (5,)]
    assert_served(*requests)


def test_dispatches_with_a_grammar_are_short():
    """Their rounds wait for the host, which the policy knows nothing of."""

    class AsItLikes(Matcher):
        def __init__(self):
            self.count, self.problem, self.seconds = 0, None, 0.0

        def advance(self, tokens):
            self.count += len(tokens)

    scheduler, device = make(slots=2, pages=8)
    form = {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])}
    free, bound = request(5, 60), request(5, 60, start=1, settings=form)
    add(scheduler, free)
    assert step(scheduler, device).rounds > MASKED_ROUNDS
    bound.matcher = AsItLikes()
    add(scheduler, bound)
    assert step(scheduler, device).rounds == MASKED_ROUNDS
    finish(scheduler, device)
    assert_served(free, bound)


class TestLeaving:
    def test_what_nobody_reads_any_more_holds_nothing(self):
        """Whoever waits for it may be gone without a word."""
        scheduler, device = make(slots=1, pages=2)
        runs, waits = request(60, 10), request(100, 10, start=1)
        reader = Output(runs, None)
        add(scheduler, runs, waits)
        step(scheduler, device, 2)
        assert (free_pages(scheduler), free_slots(scheduler)) == (0, [])
        del reader
        assert (free_pages(scheduler), free_slots(scheduler), scheduler.requests) == (2, [0], [waits])
        finish(scheduler, device)
        assert_served(waits)

    @pytest.mark.parametrize("first", [0, 1], ids=["one that runs", "one that was just admitted"])
    def test_who_goes_before_others_are_admitted_keeps_its_slot_for_this_batch(self, monkeypatch, first):
        scheduler, device = make(slots=1, pages=4)
        gone, waits = add(scheduler, request(60, 30), request(60, 3, start=1))
        if not first:
            step(scheduler, device, 1)
        admit = scheduler._admit

        def after_a_cancellation(running, now):
            if not first:
                gone.cancel()
            admitted = admit(running, now)
            gone.cancel()
            return admitted

        monkeypatch.setattr(scheduler, "_admit", after_a_cancellation)
        batch = step(scheduler, device, 1)
        assert waits.slot == -1
        assert len(batch.admissions) == first
        finish(scheduler, device)
        assert_served(waits)

    def test_who_goes_while_a_batch_is_made_holds_its_pages_until_the_next(self):
        """Its slot still decodes in this one."""

        class Dropping(FixedBudget):
            def choose(self, *arguments):
                runs.cancel()
                return super().choose(*arguments)

        scheduler, device = make(slots=2, pages=2, policy=Dropping([(2, BUCKET)]))
        runs, waits = add(scheduler, request(60, 30), request(50, 30, start=1))
        batch = next_batch(scheduler, 1)
        assert slots_of(batch) == [0]
        scheduler.update(device.run(batch))
        batch = next_batch(scheduler, 1)
        assert (batch.releases, slots_of(batch)) == ((), [0])
        scheduler.update(device.run(batch))
        finish(scheduler, device)
        assert_served(waits)

    @pytest.mark.parametrize("looks", range(7))
    def test_who_goes_at_any_moment_leaves_nothing(self, looks):
        """Also between two looks at it: it is cancelled by another thread."""

        class Fading(Request):
            left_looks = None

            @property
            def open(self):
                if self.left_looks is not None:
                    self.left_looks -= 1
                    if self.left_looks < 0:
                        self.cancel()
                return super().open

        scheduler, device = make(slots=2, pages=4)
        fades = Fading(np.arange(70, dtype=np.int32), SamplingParams(max_tokens=60, seed=1), budget=BUCKET)
        [stays] = add(scheduler, request(60, 30, start=1))
        add(scheduler, fades)
        step(scheduler, device, 1)
        fades.left_looks = looks
        finish(scheduler, device)
        step(scheduler, device)
        assert_served(stays)
        assert fades.left_looks < 0
        check_pool(scheduler.pool, [])
        assert device.slots.keys() == scheduler._occupied  # the next batch releases them

    def test_a_request_may_be_cancelled_anywhere(self):
        scheduler, device = make(slots=2, pages=8)
        requests = runs, flies, waits, late, stays = [request(10 + i, 30, start=i) for i in range(5)]
        add(scheduler, *requests)
        step(scheduler, device, 1)
        waits.cancel()
        runs.cancel()
        # While the device works on it, its prompt too: `late` has just come.
        batch = next_batch(scheduler, 1)
        assert slots_of(batch) == [late.slot] == [runs.slot]
        flies.cancel()
        late.cancel()
        assert scheduler.update(device.run(batch)) == []
        assert [len(req.tokens) for req in (runs, flies, waits, late)] == [3, 3, 0, 0]
        assert slots_of(step(scheduler, device)) == [stays.slot]
        finish(scheduler, device)
        assert_served(stays)
        stays.cancel()  # has ended
        runs.cancel()  # is gone already
        assert free_pages(scheduler) == 8
        assert [req.finish_reason for req in (runs, flies, waits, late)] == [None] * 4

    def test_what_is_cancelled_is_taken_out_by_the_next_batch(self):
        scheduler, device = make(slots=1)
        runs, waits = add(scheduler, request(4, 30), request(5, 30))
        step(scheduler, device, 1)
        runs.cancel()
        waits.cancel()
        assert not busy(scheduler)
        assert scheduler.next_batch() is None
        assert scheduler.pool.num_free == free_pages(scheduler) == 8
        [comes] = add(scheduler, request(5, 30))
        assert slots_of(step(scheduler, device, 1)) == [comes.slot] == [0]


class Noted:
    """A policy that writes down what it is told."""

    def __init__(self):
        self.told, self.records = [], []

    def choose(self, live, waiting, forwards, shape_of):
        self.told.append((list(live), waiting, list(forwards)))
        return shape_of(2, 32), 5

    def observe(self, record):
        self.records.append(record)


def test_the_policy_decides_and_is_told():
    policy = Noted()
    scheduler, device = make(slots=2, policy=policy)
    watched = {"temperature": 1.0, "stop": ("x",)}
    add(scheduler, request(150, 30, settings=watched), request(4, 8, start=1), request(5, 8, start=2))
    for most, rounds in ((2, 2), (9, 5)):
        batch = step(scheduler, device, most)
        assert (batch.bucket, batch.rounds) == (32, rounds)
    first = [(30, True, True), (8, False, True)]
    second = [(24, True, False), (2, False, False)]
    forwards = [(1, 128), (2, 64)]
    assert policy.told[0] == ([LiveSlot(*slot, budget=16) for slot in first], 1, forwards)
    assert policy.told[1] == ([LiveSlot(*slot, budget=16) for slot in second], 1, [])
    assert [len(record.tokens) for record in policy.records] == [2, 5]
    assert {record.batch.bucket for record in policy.records} == {32}


def test_figures_of_a_request():
    scheduler, device = make(slots=1, pages=12)
    first, req = request(70, 3), request(90, 8)
    scheduler.add(first, 10.0)
    scheduler.add(req, 11.0)
    assert RequestMetrics.of(req) == RequestMetrics(None, None, None, 0, 0, 0, 0, (), 0, 0)
    for now in (12.0, 14.0, 15.0, 17.0):
        step(scheduler, device, 1, now)
    figures = RequestMetrics.of(req)
    assert figures == RequestMetrics(3.0, 3.0, 3.0, 3, 3, 45, 6, (3, 3), 64, 0)
    assert RequestMetrics.of(req, 1).accepted_tokens == 2
    req.accept_lengths, req.tree_sizes = [1, 4, 2], [1, 16, 8]
    figures = RequestMetrics.of(req)
    assert (figures.rounds, figures.drafts) == (3, 2), "a root alone is no draft"
    assert (figures.drafted_tokens, figures.accepted_tokens) == (22, 4)
    assert figures.accepted_by_depth == (2, 1, 1)


def plain_leaves(value):
    """What records are made of."""
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in plain_leaves(part)]
    return [type(value)]


def test_records_can_go_to_another_process():
    scheduler, device = make()
    req = request(131, 20, stop_ids=(4, 2), settings={"temperature": 0.5, "top_k": 3, "stop": ("x",)})
    req.routing = (("task", "math"),)
    add(scheduler, req)
    batch = scheduler.next_batch()
    record = device.run(batch)
    for sent in (batch, record):
        got = pickle.loads(pickle.dumps(sent))
        assert type(got) is type(sent)
        np.testing.assert_equal(got, sent)
        allowed = {int, bool, float, str, np.ndarray, SamplingParams, type(None)}
        assert set(plain_leaves(sent)) <= allowed
    [admission], [first, last] = batch.admissions, batch.chunks
    assert admission.stop_ids == (2, 4)
    assert admission.params.stop == ()
    assert admission.pages.tolist() == req.pages + [NO_PAGE] * (4 - len(req.pages))
    assert (admission.anchor, admission.length, admission.active, admission.remaining) == (130, 0, False, 20)
    assert [chunk.counts.tolist() for chunk in (first, last)] == [[128], [2]]
    assert [chunk.ready.tolist() for chunk in (first, last)] == [[False], [True]]
