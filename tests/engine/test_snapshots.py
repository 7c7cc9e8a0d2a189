"""Snapshots: when prompts leave them, who begins behind them, and which go first."""

import json

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.engine.batch import SlotCopy
from jetspec_jax.engine.pages import Snapshots
from jetspec_jax.engine.request import Request, State
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.engine.worker import pack, unpack
from tests.decode.tiny import HYBRID, SLIDING, TINY, check_snapshots
from tests.engine.scheduling import STEP, add, assert_served, finish, make, request, slots_of, step


def made(snapshots=4, **size):
    return make(pages_alone=False, snapshots=snapshots, **{"slots": 2, "pages": 16, "capacity": 512, **size})


def behind(shared, more, *, start=500, seed=1, **settings):
    """A prompt of which others have the first tokens, and some of its own."""
    prompt = np.r_[np.arange(shared), start + np.arange(more)].astype(np.int32)
    return Request(prompt, SamplingParams(max_tokens=9, seed=seed), **settings)


def counts_of(batch):
    return [chunk.counts[chunk.counts > 0].tolist() for chunk in batch.chunks]


class TestPlaces:
    KEYS = tuple(bytes([number]) for number in range(6))

    def test_the_longest_beginning_ends_with_one(self):
        snapshots = Snapshots(3)
        assert snapshots.longest(self.KEYS) == 0
        assert [snapshots.keep(self.KEYS[number]) for number in (1, 3)] == [0, 1]
        assert [snapshots.longest(self.KEYS[:count]) for count in range(6)] == [0, 0, 2, 2, 4, 4]
        check_snapshots(snapshots)

    def test_without_any_pages_are_enough(self):
        assert Snapshots(0).longest(self.KEYS) == 6

    def test_what_was_used_last_stays(self):
        snapshots = Snapshots(2)
        assert [snapshots.keep(key) for key in self.KEYS[:2]] == [0, 1]
        assert snapshots.use(self.KEYS[0]) == 0
        assert snapshots.keep(self.KEYS[2]) == 1
        # One that is there is kept as it is, and counts as used.
        assert snapshots.keep(self.KEYS[0]) is None
        assert snapshots.keep(self.KEYS[3]) == 1
        assert [snapshots.longest(self.KEYS[: end + 1]) for end in range(4)] == [1, 1, 1, 4]
        check_snapshots(snapshots)


class TestSize:
    def test_as_many_as_slots_where_the_target_needs_any(self):
        sizes = [EngineSize.of(config, 3, 128) for config in (TINY, SLIDING, HYBRID)]
        assert [size.shares_pages for size in sizes] == [True, False, False]
        assert [size.with_snapshots().snapshots for size in sizes] == [0, 3, 3]
        assert [size.with_snapshots(5).snapshots for size in sizes] == [0, 5, 5]
        assert [size.with_snapshots().shares_pages for size in sizes] == [True] * 3
        assert not sizes[1].with_snapshots(0).shares_pages

    def test_is_checked(self):
        with pytest.raises(ValueError, match="snapshots must be at least 0"):
            EngineSize.of(SLIDING, 3, 128).with_snapshots(-1)


class TestHits:
    def test_a_prompt_leaves_one_at_its_last_full_page(self):
        scheduler, device = made()
        [first] = add(scheduler, request(170, 9))
        batch = step(scheduler, device, 1)
        # A forward ends there, though the shapes could have taken more.
        assert counts_of(batch) == [[128], [41]]
        assert batch.copies == (SlotCopy(1, 0, 0, restores=False),)
        second = behind(128, 60)
        add(scheduler, second)
        batch = step(scheduler, device, 1)
        assert batch.copies == (SlotCopy(0, 1, 0, restores=True),)
        assert counts_of(batch) == [[59]]
        assert (second.prefix_tokens, second.pages[:2]) == (128, first.pages[:2])
        finish(scheduler, device)
        assert_served(first, second)

    def test_one_that_has_nothing_left_decodes_at_once(self):
        scheduler, device = made()
        add(scheduler, request(129, 9))
        finish(scheduler, device)
        [second] = add(scheduler, request(129, 9))
        batch = step(scheduler, device, 1)
        assert (batch.chunks, batch.copies) == ((), (SlotCopy(0, 0, 0, restores=True),))
        assert batch.admissions[0].active
        assert len(second.tokens) == STEP
        finish(scheduler, device)
        assert_served(second)

    def test_pages_without_one_are_no_hit_and_leave_one_where_ways_part(self):
        scheduler, device = made(slots=1)
        prompts = [behind(128, 100, start=start) for start in (300, 500, 700)]
        batches = []
        for prompt in prompts:
            add(scheduler, prompt)
            batches.append(step(scheduler, device, 1))
            finish(scheduler, device)
        assert_served(*prompts)
        assert [req.prefix_tokens for req in prompts] == [0, 0, 128]
        # 227 tokens, and full pages of 192 of them; the second has found pages of 128.
        assert [[(copy.after, copy.restores) for copy in batch.copies] for batch in batches] == [
            [(2, False)],
            [(1, False), (2, False)],
            [(0, True), (1, False)],
        ]
        assert [counts_of(batch) for batch in batches] == [[[128], [64], [35]]] * 2 + [[[64], [35]]]

    def test_those_that_come_together_share_what_the_first_leaves(self):
        scheduler, device = made(slots=4, pages=20)
        children = add(scheduler, *(request(150, 20, seed=seed) for seed in range(4)))
        batch = step(scheduler, device, 1)
        assert [(admission.slot, admission.length) for admission in batch.admissions] == [
            (0, 0),
            (1, 128),
            (2, 128),
            (3, 128),
        ]
        # They are restored behind the forwards of the first, in the same batch.
        kept, *others = batch.copies
        assert (kept.slot, kept.restores) == (0, False)
        assert [(copy.slot, copy.restores, copy.after > kept.after) for copy in others] == [
            (slot, True, True) for slot in (1, 2, 3)
        ]
        finish(scheduler, device)
        assert_served(*children)

    def test_those_that_can_use_one_that_is_to_come_wait_for_it(self):
        scheduler, device = made(slots=4, pages=24, prefill_tokens=100)
        children = add(scheduler, request(150, 20), request(150, 20, seed=2), behind(64, 100))
        assert slots_of(step(scheduler, device, 1)) == [0]
        assert [req.state for req in children[1:]] == [State.WAITING] * 2
        batch = step(scheduler, device, 1)
        # The last finds a page of the first, but no snapshot that it could use, and waits for nobody.
        assert slots_of(batch) == [1, 2]
        assert [admission.length for admission in batch.admissions] == [128, 0]
        finish(scheduler, device)
        assert_served(*children)

    def test_nobody_waits_for_one_that_has_gone(self):
        scheduler, device = made(prefill_tokens=100)
        first, second = add(scheduler, request(150, 20), request(150, 20))
        step(scheduler, device, 1)
        first.cancel()
        batch = step(scheduler, device, 1)
        assert [(admission.slot, admission.length) for admission in batch.admissions] == [(0, 0)]
        finish(scheduler, device)
        assert_served(second)

    def test_who_has_lost_its_slot_goes_on_behind_one(self):
        scheduler, device = made(slots=2, pages=8)
        [req] = add(scheduler, request(140, 200))
        for _ in range(7):
            step(scheduler, device, 4)
        length = req.length - 1
        assert length > 192
        # As if others had needed its pages.
        scheduler._allocator.free(req)
        req.preempt()
        batch = step(scheduler, device, 1)
        assert batch.admissions[0].length == 128
        assert [copy.restores for copy in batch.copies] == [True, False]
        assert sum(map(sum, counts_of(batch))) == length - 128
        finish(scheduler, device)
        assert_served(req)


def test_other_processes_are_told_of_copies():
    scheduler, device = made()
    add(scheduler, request(170, 9), request(170, 9))
    batch = scheduler.next_batch(1)
    assert len(batch.copies) == 2
    told = unpack(json.loads(json.dumps(pack(batch))))
    assert told.copies == batch.copies
    assert all(isinstance(copy, SlotCopy) for copy in told.copies)
    device.run(told)


class TestPressure:
    def test_the_oldest_goes_and_its_pages_stay(self):
        scheduler, device = made(slots=1, snapshots=1)
        add(scheduler, request(150, 5))
        finish(scheduler, device)
        add(scheduler, request(150, 5, start=300))
        finish(scheduler, device)
        again, other = add(scheduler, request(150, 5), request(150, 5, start=300))
        finish(scheduler, device)
        # The first prompt's pages are there and its snapshot is not; it leaves another, in the other's place.
        assert (again.prefix_tokens, other.prefix_tokens) == (0, 0)
        [last] = add(scheduler, request(150, 5, start=300))
        finish(scheduler, device)
        assert last.prefix_tokens == 128
        assert_served(again, other, last)

    def test_one_whose_pages_have_gone_is_no_hit(self):
        scheduler, device = made(slots=1, pages=4, capacity=256)
        for start in (0, 300, 0):
            [req] = add(scheduler, request(200, 50, start=start))
            finish(scheduler, device)
            assert_served(req)
            assert req.prefix_tokens == 0
