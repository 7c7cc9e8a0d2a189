"""The engine behind `AsyncLLM`: its size, its programs, its figures, and the `LLM` that shares it."""

import asyncio
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from jetspec_jax import AsyncLLM, SamplingParams, generate
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.device import memory
from jetspec_jax.engine import plan as planning
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.engines import Engines
from jetspec_jax.engine.plan import engine_bytes, plan_engine, with_slots_that_fit
from jetspec_jax.engine.request import Request, State
from jetspec_jax.engine.stats import EngineStats, Tally
from tests.decode.compilations import compilations
from tests.engine.budget_simulation import dispatch
from tests.engine.halting import begun, halted
from tests.events import join

PROMPT = [3, 1, 4, 1, 5]
WANTS = SamplingParams(max_tokens=12, presence_penalty=1.0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
# Each wants a part of it.
PARTS = (
    WANTS,
    replace(WANTS, logprobs=None, prompt_logprobs=None),
    replace(WANTS, presence_penalty=0.0),
    replace(WANTS, bad_words=["abc", "gh", "dd"]),
)


async def whole(llm, prompt, params):
    async for delta in llm.generate(prompt, params):
        last = delta
    return last.completion


async def running(llm):
    while not llm.stats().running:
        await asyncio.sleep(0.001)


def batches_of(monkeypatch):
    seen, launch = [], Engine._launch

    def noted(engine, batch):
        seen.append(batch)
        launch(engine, batch)

    monkeypatch.setattr(Engine, "_launch", noted)
    return seen


@pytest.mark.wide
def test_a_warm_up_compiles_all_and_figures_add_up(models, monkeypatch):
    """Also of batches in which somebody wants more: no request compiles anything."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, int(size)).tolist() for size in rng.integers(1, 150, 10)]
    params = [
        PARTS[number // 2 % 4] if number % 2 else SamplingParams(max_tokens=12, temperature=1.0, seed=number)
        for number in range(10)
    ]
    expected = generate(models[0], prompts, params)
    jax.clear_caches()  # of what tells of prompts, too
    batches = batches_of(monkeypatch)

    async def run():
        async with AsyncLLM(*models, budget=16, width=3, algorithm="auto", max_slots=4) as llm:
            await llm.warm_up(WANTS)
            before = llm.stats()
            with compilations() as seen:
                alone = await whole(llm, prompts[0], params[0])
                got = await asyncio.gather(*[whole(llm, *own) for own in zip(prompts, params, strict=True)])
            [engine] = llm.llm.engines.engines()
            while engine.open_requests:  # the rounds after an end count too
                await asyncio.sleep(0.001)
            return seen, before, alone, got, llm.stats()

    seen, before, alone, got, after = asyncio.run(run())
    assert seen == []
    assert alone.token_ids == expected[0].token_ids
    for mine, plain in zip(got, expected, strict=True):
        assert (mine.token_ids, mine.text) == (plain.token_ids, plain.text)
        assert (mine.prompt_logprobs is None) == (plain.prompt_logprobs is None)
    assert {len(batch.live) for batch in batches} >= {1, 4}
    figures = [one.metrics for one in [alone, *got]]
    assert after.compilations == 1  # of `compilations` itself
    assert after.running == after.waiting == after.pages_used == 0
    assert after.dispatches > before.dispatches
    assert after.prefix_queries - before.prefix_queries == sum(map(len, [prompts[0], *prompts]))
    assert after.prefix_hits == sum(one.prefix_tokens for one in figures) > 0
    assert after.pages_cached > 0
    assert (after.pages, after.preemptions) == (4 * 4, 0)
    assert after.drafted_tokens - before.drafted_tokens >= sum(one.drafted_tokens for one in figures)
    assert sum(after.accepted_by_depth) == after.accepted_tokens


def test_a_tally_counts_rounds():
    tokens = np.full((2, 2, 4), -1, np.int32)
    tokens[0, 0, :3], tokens[0, 1, :1], tokens[1, 0, :2] = 1, 1, 1
    tally = Tally()
    tally.add_dispatch(dispatch(8, (0, 2), None, (), tokens, np.array([[8, 8], [5, 0]], np.int32)), 0)
    assert tally.stats([], 7, None) == EngineStats(
        pages=7,
        dispatches=1,
        drafts=3,
        drafted_tokens=7 + 7 + 4,
        accepted_tokens=2 + 0 + 1,
        accepted_by_depth=(2, 1),
        bucket=8,
        live_slots=2,
    )


def test_a_cancelled_request_does_not_run():
    """Counted before the engine has freed its slot, and so has changed its state."""
    request = Request(np.arange(5, dtype=np.int32), SamplingParams(max_tokens=3))
    request.state, request.started = State.DECODING, 1.0
    tally = Tally()
    assert tally.stats([request], 7, None).running == 1
    request.cancel()
    assert tally.stats([request], 7, None).running == 0
    tally.add_request(request)
    assert tally.stats([], 7, None) == EngineStats(pages=7, prefix_queries=5)


def test_slots_by_memory(models, monkeypatch):
    target, head = models

    def plan(settings, slots=256):
        config = None if settings.budget == 1 else head.config
        return plan_engine(target.config, config, settings, target.dtype, slots=slots)

    assert plan(PLAIN, 8).size.live == (1, 4)
    monkeypatch.setattr(planning, "gpu_problem", lambda: None)
    settings = TreeSettings(32, 3, algorithm="auto")
    most = plan(settings)
    assert (most.size.slots, most.size.live) == (256, (1, 2, 4, 8, 16, 32, 64, 128))
    assert [decoder.bucket for decoder in most.decoders] == [1, 2, 4, 8, 16, 32]
    assert most.size.prefill_tokens == 1024
    # Trees of all slots at once are never run where there is a choice.
    needs = [engine_bytes(own) for own in (most, plan(TreeSettings(32, 3)))]
    assert 1.5 * sum(needs[0].values()) < sum(needs[1].values())
    for slots in (256, 64, 1):
        free = sum(
            engine_bytes(most if slots == 256 else replace(most, size=most.size.with_slots(slots))).values()
        )
        monkeypatch.setattr(memory, "free_bytes", lambda *_, free=free: free)
        assert with_slots_that_fit(most, [None]).size.slots == slots
        if slots > 1:
            monkeypatch.setattr(memory, "free_bytes", lambda *_, free=free: free - 1)
            assert with_slots_that_fit(most, [None]).size.slots == slots // 2


def test_a_call_and_other_callers_run_together(models, monkeypatch):
    """Others are taken in while a long call runs, and a stream is one of them."""
    long, short = SamplingParams(max_tokens=200, ignore_eos=True), SamplingParams(max_tokens=9)
    prompts = [[number, 5] for number in range(8)]
    expected, brief = generate(models[0], prompts, long), generate(models[0], prompts, short)
    submit, requests, completions = Engines.submit, {9: [], 200: []}, []

    def noted(engines, asked, *arguments):
        for request in asked:
            requests.get(request.max_tokens, []).append(request)
        return submit(engines, asked, *arguments)

    async def run():
        async with AsyncLLM(*models, max_slots=4, budget=16, width=3) as llm:
            await llm.warm_up()
            monkeypatch.setattr(Engines, "submit", noted)
            thread = threading.Thread(target=lambda: completions.extend(llm.llm.generate(prompts, long)))
            with halted(begun(1)):
                thread.start()
                await running(llm)
                streamed = llm.llm.stream(prompts[0], short)
                others = [asyncio.create_task(whole(llm, prompt, short)) for prompt in prompts[:2]]
                while len(requests[9]) < 3:
                    await asyncio.sleep(0.001)
            got = [one.token_ids for one in await asyncio.gather(*others)]
            pieces = await asyncio.to_thread(list, streamed)
            await asyncio.to_thread(join, thread)
            return got, pieces, streamed.completion

    got, pieces, streamed = asyncio.run(run())
    assert max(one.arrival for one in requests[9]) < min(one.ended for one in requests[200])
    assert [one.token_ids for one in completions] == [one.token_ids for one in expected]
    assert got == [one.token_ids for one in brief[:2]]
    assert (streamed.token_ids, "".join(pieces)) == (brief[0].token_ids, brief[0].text)
    assert max(streamed.tree_sizes) > 1, "trees were asked for"


def test_one_name_for_two_loops_at_once(models):
    llm, got = AsyncLLM(*models, max_slots=2, budget=1), []
    gate = threading.Barrier(4)

    async def one():
        stream = llm.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), request_id="mine")
        gate.wait()
        try:
            await anext(stream)
        except ValueError as error:
            got.append(str(error))
        gate.wait()
        await stream.aclose()

    threads = [threading.Thread(target=lambda: asyncio.run(one())) for _ in range(4)]
    for thread in threads:
        thread.start()
    join(*threads)
    asyncio.run(llm.close())
    assert got == ["another request with the id 'mine' runs"] * 3
