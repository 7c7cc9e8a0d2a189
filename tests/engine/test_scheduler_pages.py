"""The pages that requests hold: how they grow, who gives them up for others, and who shares them."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.cache.pages import NO_PAGE, PAGE_SIZE
from jetspec_jax.engine.request import Request, State
from tests.decode.tiny import busy, free_pages
from tests.engine.scheduling import (
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


class TestPages:
    def test_come_with_the_prompt_and_grow_with_the_rounds(self):
        scheduler, device = make(slots=1, capacity=512)
        [req] = add(scheduler, request(61, 300))
        assert req.num_pages == 6
        batch = step(scheduler, device, 1)
        # 60 tokens are committed, and a round commits at most 3.
        assert (len(req.pages), batch.growths) == (1, ())
        batch = step(scheduler, device, 1)
        assert [growth.slot for growth in batch.growths] == [0]
        assert batch.growths[0].pages.tolist() == req.pages + [NO_PAGE] * 6
        batch = step(scheduler, device, 40)
        assert len(req.pages) == -(-(66 + 40 * STEP) // PAGE_SIZE)
        assert step(scheduler, device, 1).growths == ()
        finish(scheduler, device)
        assert_served(req)
        assert free_pages(scheduler) == 8

    def test_are_never_more_than_it_can_use(self):
        scheduler, device = make(slots=1)
        [req] = add(scheduler, request(60, 4))
        step(scheduler, device)
        assert_served(req)
        assert device.slots[0].pages == [0]

    def test_a_request_waits_for_them_and_lets_nobody_pass(self):
        scheduler, device = make(slots=4, pages=5)
        requests = add(scheduler, *(request(n, m, start=n) for n, m in ((70, 70), (190, 9), (5, 50), (9, 9))))
        step(scheduler, device, 1)
        # The first has two pages of three, the second needs four; the others wait though they would fit.
        assert [req.state for req in requests] == [State.DECODING, *[State.WAITING] * 3]
        finish(scheduler, device)
        assert_served(*requests)
        assert [req.overtaken for req in requests] == [0] * 4
        assert free_pages(scheduler) == 5

    def test_none_is_left_for_who_needs_no_more(self):
        scheduler, device = make(slots=2, pages=3)
        requests = add(scheduler, request(70, 50), request(10, 9, start=1))
        step(scheduler, device, 1)
        assert [req.state for req in requests] == [State.DECODING] * 2

    def test_one_is_left_for_each_that_may_need_more(self):
        """Else it would be taken back soon."""
        scheduler, device = make(slots=3, pages=3)
        requests = add(scheduler, request(10, 70), request(20, 9, start=1), request(30, 9, start=2))
        step(scheduler, device, 1)
        assert [len(req.pages) for req in requests] == [1, 1, 0]
        finish(scheduler, device)
        assert_served(*requests)
        assert [req.preemptions for req in requests] == [0, 0, 0]


class TestPressure:
    def test_cached_pages_go_first(self):
        scheduler, device = make(slots=1, pages=4)
        add(scheduler, request(130, 5))
        finish(scheduler, device)
        assert scheduler.pool.num_free == free_pages(scheduler) == 4
        first, second = add(scheduler, request(130, 5), request(200, 50, start=7))
        finish(scheduler, device)
        assert (first.prefix_tokens, second.prefix_tokens) == (128, 0)
        # The second has evicted what the first had.
        [third] = add(scheduler, request(130, 5))
        finish(scheduler, device)
        assert third.prefix_tokens == 0
        assert_served(first, second, third)

    def test_then_what_was_held_for_rounds_that_needed_less(self):
        scheduler, device = make(slots=2, pages=8, capacity=512, most=30)
        [first] = add(scheduler, request(10, 400))
        step(scheduler, device, 12)
        # Rounds might have committed ten times as much.
        assert (len(first.tokens), len(first.pages)) == (36, 6)
        [second] = add(scheduler, request(200, 50, start=3))
        batch = step(scheduler, device, 1)
        assert slots_of(batch) == [1]
        assert (first.preemptions, len(first.pages), len(second.pages)) == (0, 2, 4)
        assert [growth.slot for growth in batch.growths] == [0]
        finish(scheduler, device)
        assert_served(first, second)

    def test_then_the_last_in_order_which_resumes_with_the_same_tokens(self):
        scheduler, device = make(slots=3, pages=6, capacity=384)
        first, second = add(scheduler, request(10, 250), request(60, 200, start=1))
        while not second.preemptions:
            step(scheduler, device, 4)
        got = list(second.tokens)
        [late] = add(scheduler, request(4, 9, start=2))
        while second.state is State.WAITING:
            # Whoever came later stays behind it.
            assert late.started is None
            assert second.tokens == got != []
            step(scheduler, device, 4)
        assert first.state is State.FINISHED
        finish(scheduler, device)
        assert_served(first, second, late)
        assert [req.preemptions for req in (first, second, late)] == [0, 1, 0]

    def test_what_resumes_brings_prompt_and_output(self):
        scheduler, device = make(slots=2, pages=8, capacity=384)
        [req] = add(scheduler, request(60, 200, stop_ids=(5000,)))
        for _ in range(7):
            step(scheduler, device, 4)
        got = list(req.tokens)
        # As if others had needed its pages.
        scheduler._allocator.free(req)
        req.preempt()
        [admission] = next_batch(scheduler, 1).admissions
        assert admission.anchor == got[-1]
        assert admission.remaining == 200 - len(got)
        # All its full pages are still there.
        assert admission.length == (60 + len(got) - 1) // 64 * 64 > 64
        assert not admission.active

    def test_priorities_decide_who_is_last(self):
        scheduler, device = make(slots=2, pages=5, capacity=256)
        idle, urgent = add(scheduler, request(10, 200, priority=1), request(10, 200, start=1))
        while busy(scheduler):
            step(scheduler, device, 4)
        assert_served(idle, urgent)
        assert (urgent.preemptions, idle.preemptions > 0) == (0, True)


class TestPrefixes:
    def test_a_later_request_shares_full_pages(self):
        scheduler, device = make(slots=2, pages=12)
        [first] = add(scheduler, request(200, 20))
        step(scheduler, device, 1)
        [second] = add(scheduler, request(170, 20))
        batch = step(scheduler, device, 1)
        [admission] = batch.admissions
        assert (admission.length, admission.active, second.prefix_tokens) == (128, False, 128)
        assert second.pages[:2] == first.pages[:2]
        assert [chunk.counts.sum() for chunk in batch.chunks] == [169 - 128]
        finish(scheduler, device)
        assert_served(first, second)

    def test_the_anchor_is_never_shared(self):
        """A prompt of whole pages decodes at once behind all but its last; one token more, behind all."""
        scheduler, device = make(slots=3, pages=12)
        [first] = add(scheduler, request(200, 5))
        step(scheduler, device, 1)
        whole, longer = add(scheduler, request(128, 5), request(129, 5))
        batch = step(scheduler, device, 1)
        assert [(admission.length, admission.active) for admission in batch.admissions] == [
            (64, False),
            (128, True),
        ]
        finish(scheduler, device)
        assert_served(first, whole, longer)

    def test_outputs_are_shared_too(self):
        scheduler, device = make(slots=1, pages=12, capacity=512)
        [first] = add(scheduler, request(60, 100))
        finish(scheduler, device)
        prompt = np.concatenate([first.prompt, np.asarray(first.tokens, np.int32), [3]]).astype(np.int32)
        [second] = add(scheduler, Request(prompt, SamplingParams(max_tokens=9, seed=4)))
        finish(scheduler, device)
        assert second.prefix_tokens == 128
        assert_served(second)

    def test_requests_that_come_together_share_what_the_first_fills(self):
        """As the completions of one prompt do: it is prefilled once, and the others behind it."""
        scheduler, device = make(slots=4, pages=20)
        children = add(scheduler, *(request(150, 20, seed=seed) for seed in range(4)))
        batch = step(scheduler, device, 1)
        assert [(admission.slot, admission.length) for admission in batch.admissions] == [
            (0, 0),
            (1, 128),
            (2, 128),
            (3, 128),
        ]
        assert [chunk.counts.tolist() for chunk in batch.chunks] == [[128], [21], [21, 21], [21]]
        assert len({page for req in children for page in req.pages[:2]}) == 2
        assert [len(req.tokens) for req in children] == [STEP] * 4
        finish(scheduler, device)
        assert_served(*children)

    def test_requests_that_begin_alike_wait_for_the_first(self):
        """Where its prompt takes several batches, they come when what they share is there."""
        scheduler, device = make(slots=4, pages=20, prefill_tokens=100)
        children = add(scheduler, *(request(150, 20, seed=seed) for seed in range(4)))
        assert slots_of(step(scheduler, device, 1)) == [0]
        batch = step(scheduler, device, 1)
        assert slots_of(batch) == [1, 2, 3]
        assert [admission.length for admission in batch.admissions] == [128] * 3
        finish(scheduler, device)
        assert_served(*children)

    def test_nobody_waits_for_one_that_has_gone(self):
        scheduler, device = make(slots=2, pages=20, prefill_tokens=64)
        first, second = add(scheduler, request(150, 20), request(150, 20))
        step(scheduler, device, 1)
        assert second.state is State.WAITING
        first.cancel()
        step(scheduler, device, 1)
        # What the first has filled is there.
        assert (second.state, second.prefix_tokens) == (State.PREFILLING, 64)
        finish(scheduler, device)
        assert_served(second)

    @pytest.mark.parametrize(("salts", "shared"), [(("a", "a"), 128), (("a", "b"), 0), ((None, "a"), 0)])
    def test_salts_keep_requests_apart(self, salts, shared):
        scheduler, device = make(slots=1, pages=12)
        first, second = add(scheduler, *(request(150, 5, cache_salt=salt) for salt in salts))
        finish(scheduler, device)
        assert_served(first, second)
        assert second.prefix_tokens == shared

    def test_are_off_where_the_engine_cannot(self):
        scheduler, device = make(slots=2, pages=12, pages_alone=False)
        requests = add(scheduler, *(request(150, 5) for _ in range(3)))
        assert len(step(scheduler, device, 1).admissions) == 2
        finish(scheduler, device)
        assert_served(*requests)
        assert [req.prefix_tokens for req in requests] == [0] * 3
