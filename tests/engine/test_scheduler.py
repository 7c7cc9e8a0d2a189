"""The scheduler by itself, before a device that is made of dictionaries."""

import pickle

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.cache.slots import NO_PAGE, PAGE_SIZE
from jetspec_jax.engine.budget_policy import Dispatch, FixedBudget, LiveSlot
from jetspec_jax.engine.output import Output
from jetspec_jax.engine.pages import PagePool
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.scheduler import Scheduler
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.sampling.choice import NO_CHOICE
from jetspec_jax.tree import Routing

BUCKET = 16
# Prompts of a forward, and rows of each.
CHUNKS = ((1, 128), (2, 64))
# Tokens of a round, whatever is left.
STEP = 3


def text_of(prompt, count):
    """What follows a prompt; no other prompt's text, and no token twice."""
    return (1000 * int(np.sum(prompt)) + np.arange(count)).tolist()


def request(length, tokens, *, start=0, stop_ids=(), **settings):
    prompt = np.arange(start, start + length, dtype=np.int32)
    return Request(prompt, SamplingParams(max_tokens=tokens, seed=1, **settings), frozenset(stop_ids), BUCKET)


class Device:
    """Does what a runner does, and checks that it may."""

    def __init__(self, slots):
        self.slots = slots
        # Of each slot: the pages that it names, the prompt, and what it still has to emit while it decodes.
        self.pages, self.prompts, self.left = {}, {}, {}

    def run(self, batch):
        for slot in batch.releases:
            del self.pages[slot]  # an error if it was told before
            self.left.pop(slot, None)
        for own in batch.admissions:
            self.left.pop(own.slot, None)
        for own in batch.admissions:
            pages = own.pages[own.pages != NO_PAGE].tolist()
            assert not set(pages) & {page for slot in self.left for page in self.pages[slot]}
            self.pages[own.slot], self.prompts[own.slot] = pages, []
        admitted = {own.slot: own for own in batch.admissions}
        for own in batch.admissions:
            if own.active:
                self.begin(admitted.pop(own.slot))
        for chunk in batch.chunks:
            assert chunk.tokens.shape in CHUNKS
            assert len(set(chunk.slots.tolist())) == len(chunk.tokens)
            for slot, tokens, count, ready in zip(*map(np.ndarray.tolist, chunk), strict=True):
                self.prompts[slot] = [*self.prompts.get(slot, ()), *tokens[:count]]
                if ready:
                    self.begin(admitted.pop(slot))
        assert not admitted, "an admission without its prompt"
        tokens, sizes = [], []
        while self.left and len(tokens) < batch.rounds:
            row = np.full((self.slots, STEP), -1, np.int32)
            sizes.append([batch.bucket * (slot in self.left) for slot in range(self.slots)])
            for slot, (text, end) in list(self.left.items()):
                row[slot] = text[:STEP]
                self.left[slot] = text[STEP:], end - STEP
                if end <= STEP:
                    del self.left[slot]
            tokens.append(row)
        return DispatchRecord(
            batch.bucket,
            batch.live,
            None,
            np.array(tokens, np.int32).reshape(-1, self.slots, STEP),
            np.array(sizes, np.int32).reshape(-1, self.slots),
        )

    def begin(self, own):
        """Its prompt is whole."""
        prompt = [*self.prompts[own.slot], own.anchor]
        assert own.remaining == own.params.max_tokens
        assert len(prompt) + own.remaining <= PAGE_SIZE * len(self.pages[own.slot])
        # Past the end too, as rounds overshoot it.
        text = text_of(prompt, own.remaining + STEP)
        end = next((i + 1 for i, t in enumerate(text) if t in own.stop_ids), own.remaining)
        self.left[own.slot] = text, end


@pytest.fixture
def made():
    """A scheduler and its device."""

    def make(slots=2, pages=8, capacity=256, policy=None):
        policy = FixedBudget(BUCKET) if policy is None else policy
        return Scheduler(EngineSize(slots, capacity, pages, CHUNKS), policy), Device(slots)

    return make


def step(scheduler, device, rounds=None):
    batch = scheduler.next_batch(rounds)
    scheduler.take(device.run(batch))
    return batch


def finish(scheduler, device):
    for _ in range(1000):
        if not scheduler.busy:
            return
        step(scheduler, device)
    raise AssertionError("no progress")


def assert_served(own):
    assert own.tokens == text_of(own.prompt, own.params.max_tokens)
    assert own.finish_reason == "length"


def test_a_token_that_is_no_choice_is_an_error(made):
    """Nothing of such a batch is handed out."""
    scheduler, device = made()
    own = request(5, 9)
    scheduler.add(own)
    record = device.run(scheduler.next_batch(1))
    record.tokens[0, own.slot, 1] = NO_CHOICE
    with pytest.raises(ValueError, match="the target's logits are not numbers"):
        scheduler.take(record)
    assert own.tokens == []


def test_what_an_idle_slot_holds_does_not_matter(made):
    scheduler, device = made()
    own = request(5, 9)
    scheduler.add(own)
    record = device.run(scheduler.next_batch(1))
    record.tokens[0, 1 - own.slot] = NO_CHOICE
    scheduler.take(record)
    assert own.tokens == text_of(own.prompt, STEP)


def test_a_pool_hands_out_each_page_once():
    pool = PagePool(5)
    first, second = pool.reserve(2), pool.reserve(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.reserve(1) is None
    pool = PagePool(5, second)  # the first are given back
    assert pool.reserve(3) is None
    assert pool.num_free == 2
    assert sorted(pool.reserve(2)) == sorted(first)


def test_all_is_served_whatever_comes_and_goes(made):
    """Slots and pages come back, and nobody gets another's tokens."""
    scheduler, device = made(slots=4, pages=20, capacity=512)
    rng, started = np.random.default_rng(0), []
    for turn in range(40):
        requests = [
            request(int(rng.integers(1, 300)), int(rng.integers(1, 90)), start=20 * turn + i)
            for i in range(6)
        ]
        for own in requests:
            scheduler.add(own)
        wanted = list(requests)
        while scheduler.busy:
            batch = step(scheduler, device, int(rng.integers(1, 9)))
            started += [own.slot for own in batch.admissions]
            if rng.random() < 0.2 and wanted:
                scheduler.cancel(wanted.pop(int(rng.integers(len(wanted)))))
        for own in wanted:
            assert_served(own)
        assert scheduler.pool.num_free == 20
    assert scheduler.next_batch().releases == tuple(sorted(device.pages))
    assert set(started) == {0, 1, 2, 3}


def test_a_request_waits_for_pages_and_takes_its_turn(made):
    scheduler, device = made(slots=4, pages=3)
    requests = [request(n, most, start=n) for n, most in ((70, 20), (10, 30), (60, 40), (5, 50))]
    for own in requests:
        scheduler.add(own)
    step(scheduler, device, 1)
    # The first holds two pages, the second one; the third waits though two slots are free.
    assert [len(own.pages) for own in requests] == [2, 1, 0, 0]
    assert scheduler.pool.num_free == 0
    finish(scheduler, device)
    for own in requests:
        assert_served(own)
    assert scheduler.pool.num_free == 3


def test_a_request_that_no_pool_can_hold_is_refused(made):
    scheduler, _ = made(slots=1, pages=2)
    with pytest.raises(ValueError, match="needs 3 pages, and the engine has 2"):
        scheduler.add(request(100, 60))
    assert not scheduler.busy


def test_what_nobody_reads_any_more_holds_nothing(made):
    """Whoever waits for it may be gone without a word."""
    scheduler, device = made(slots=1, pages=2)
    runs, waits = request(60, 10), request(100, 10, start=1)
    reader = Output(runs, None)
    scheduler.add(runs)
    scheduler.add(waits)
    step(scheduler, device, 1)
    assert (scheduler.pool.num_free, scheduler.free_slots) == (0, [])
    del reader
    assert (scheduler.pool.num_free, scheduler.free_slots, scheduler.requests) == (2, [0], [waits])
    finish(scheduler, device)
    assert_served(waits)


def test_who_goes_while_a_batch_is_made_holds_its_pages_until_the_next(made):
    """Its slot still decodes in this one."""

    class Dropping(FixedBudget):
        def choose(self, live, waiting):
            runs.abandoned = True
            return super().choose(live, waiting)

    scheduler, device = made(slots=2, pages=2, policy=Dropping(BUCKET))
    runs, waits = request(60, 30), request(50, 30, start=1)
    scheduler.add(runs)
    scheduler.add(waits)
    batch = scheduler.next_batch(1)
    assert [own.slot for own in batch.admissions] == [0]
    scheduler.take(device.run(batch))
    batch = scheduler.next_batch(1)
    assert (batch.releases, [own.slot for own in batch.admissions]) == ((), [0])
    scheduler.take(device.run(batch))
    finish(scheduler, device)
    assert_served(waits)


def test_a_slot_is_cleared_once(made):
    """By its next request; and before more rounds where there are no pages for one."""
    scheduler, device = made(slots=2, pages=4)
    for own in (request(5, 4), request(6, 40), request(7, 4)):
        scheduler.add(own)
    step(scheduler, device, 2)
    batch = step(scheduler, device, 2)
    assert [own.slot for own in batch.admissions] == [0]
    assert batch.releases == ()
    # The first slot is free again, and too few pages are: what it was is told at once, and not again.
    scheduler.add(request(200, 50))
    batch = step(scheduler, device, 1)
    assert (batch.releases, batch.admissions) == ((0,), ())
    assert step(scheduler, device, 1).releases == ()
    finish(scheduler, device)
    batch = scheduler.next_batch()
    assert len(batch.releases) == 1
    assert scheduler.next_batch().releases == ()


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
def test_where_a_request_ends(made, most, stop, tokens, reason, lengths):
    """Rounds count what they committed before the cut, and none after the end."""
    scheduler, device = made()
    stops = () if stop is None else text_of(np.arange(4), 10)[stop : stop + 1]
    own = request(4, most, stop_ids=stops)
    scheduler.add(own)
    finish(scheduler, device)
    assert own.tokens == text_of(own.prompt, tokens)
    assert own.finish_reason == reason
    assert own.accept_lengths == lengths
    assert own.tree_sizes == [BUCKET] * len(lengths)


def test_a_request_may_be_cancelled_anywhere(made):
    scheduler, device = made(slots=2, pages=8)
    runs, flies, waits, late, stays = (request(10 + i, 30, start=i) for i in range(5))
    for own in (runs, flies, waits, late, stays):
        scheduler.add(own)
    step(scheduler, device, 1)
    scheduler.cancel(waits)
    scheduler.cancel(runs)
    # While the device works on it, its prompt too: `late` has just come.
    batch = scheduler.next_batch(1)
    assert [own.slot for own in batch.admissions] == [late.slot] == [runs.slot]
    scheduler.cancel(flies)
    scheduler.cancel(late)
    assert scheduler.take(device.run(batch)) == []
    got = [len(own.tokens) for own in (runs, flies, waits, late)]
    assert got == [3, 3, 0, 0]
    assert [own.slot for own in step(scheduler, device).admissions] == [stays.slot]
    finish(scheduler, device)
    assert_served(stays)
    scheduler.cancel(stays)  # has ended
    scheduler.cancel(runs)  # is gone already
    assert scheduler.pool.num_free == 8
    assert [own.finish_reason for own in (runs, flies, waits, late)] == [None] * 4


def test_what_is_abandoned_is_taken_out_by_the_next_batch(made):
    scheduler, device = made(slots=1)
    runs, waits = request(4, 30), request(5, 30)
    scheduler.add(runs)
    scheduler.add(waits)
    step(scheduler, device, 1)
    runs.abandoned = waits.abandoned = True
    assert not scheduler.busy
    batch = scheduler.next_batch()
    assert (batch.releases, batch.admissions, batch.chunks) == ((0,), (), ())
    assert scheduler.pool.num_free == 8


class Noted:
    """A policy that writes down what it is told."""

    def __init__(self):
        self.told, self.records = [], []

    def choose(self, live, waiting):
        self.told.append((list(live), waiting))
        return Dispatch(32, 5)

    def observe(self, record):
        self.records.append(record)


def test_the_policy_decides_and_is_told(made):
    policy = Noted()
    scheduler, device = made(slots=2, policy=policy)
    scheduler.add(request(150, 30, temperature=1.0, stop=("x",)))
    scheduler.add(request(4, 8))
    scheduler.add(request(5, 8))
    assert step(scheduler, device, 2)[-2:] == (32, 2)
    assert step(scheduler, device, 9)[-2:] == (32, 5)
    # All of a prompt but its last token is in the stores when its first round begins.
    assert policy.told[0] == ([LiveSlot(149, 30, True, True), LiveSlot(3, 8, False, False)], 1)
    assert policy.told[1] == ([LiveSlot(155, 24, True, True), LiveSlot(9, 2, False, False)], 1)
    assert [len(record.tokens) for record in policy.records] == [2, 5]
    assert {record.bucket for record in policy.records} == {32}


def plain_leaves(value):
    """What records are made of."""
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in plain_leaves(part)]
    return [type(value)]


def test_records_can_go_to_another_process(made):
    scheduler, device = made()
    own = request(131, 20, stop_ids=(4, 2), temperature=0.5, top_k=3, stop=("x",))
    own.routing = Routing.of_one({"task": "math"})
    scheduler.add(own)
    batch = scheduler.next_batch()
    record = device.run(batch)
    for sent in (batch, record):
        got = pickle.loads(pickle.dumps(sent))
        assert type(got) is type(sent)
        np.testing.assert_equal(got, sent)
        allowed = {int, bool, float, np.ndarray, np.int32, np.bool_, SamplingParams, type(None)}
        assert set(plain_leaves(sent)) <= allowed
    [admission], [first, last] = batch.admissions, batch.chunks
    assert admission.stop_ids == (2, 4)
    assert admission.params.stop == ()
    assert admission.pages.tolist() == own.pages + [NO_PAGE] * (4 - len(own.pages))
    assert (admission.anchor, admission.length, admission.active, admission.remaining) == (130, 0, False, 20)
    assert [chunk.counts.tolist() for chunk in (first, last)] == [[128], [2]]
    assert [chunk.ready.tolist() for chunk in (first, last)] == [[False], [True]]
