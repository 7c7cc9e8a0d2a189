"""A server on a GPU: the context is the model's, and pages come from the free memory."""

import asyncio
from dataclasses import replace

import pytest

from jetspec_jax import LLM, AsyncLLM, DeviceMemoryError, SamplingParams
from jetspec_jax.async_llm import server_plan
from jetspec_jax.decode.settings import PLAIN
from jetspec_jax.device import memory
from jetspec_jax.engine import plan as planning
from jetspec_jax.engine.plan import engine_bytes, plan_engine
from tests.decode.tiny import TINY, random_target, with_windows

LONG = replace(with_windows(TINY, None), max_position_embeddings=8192)


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setattr(planning, "gpu_problem", lambda: None)
    target = random_target(LONG, 0)
    return plan_engine(LONG, None, PLAIN, target.dtype, slots=256)


def sized(plan, slots, capacity, pages):
    return replace(plan, size=replace(plan.size.with_slots(slots), capacity=capacity, num_pages=pages))


def planned(plan, monkeypatch, free, max_slots=None, capacity=None):
    monkeypatch.setattr(memory, "free_bytes", lambda *_: free)
    made = server_plan(plan, [None], max_slots, capacity)
    return made, (made.size.slots, made.size.capacity, made.size.num_pages)


def needs(plan):
    return sum(engine_bytes(plan).values())


def test_much_memory_has_all_slots_full(plan, monkeypatch):
    assert planned(plan, monkeypatch, 1 << 50)[1] == (256, 8192, 256 * 128)
    assert planned(plan, monkeypatch, 1 << 50, max_slots=4)[1] == (4, 8192, 4 * 128)
    assert planned(plan, monkeypatch, 1 << 50, capacity=640)[1] == (256, 640, 256 * 10)


def test_a_device_that_reports_no_memory(plan, monkeypatch):
    """Slots have pages for 1,024 tokens each, and one request has its context."""
    assert planned(plan, monkeypatch, None)[1] == (256, 8192, 256 * 16)
    assert planned(plan, monkeypatch, None, max_slots=4)[1] == (4, 8192, 128)


def test_pages_take_most_of_the_memory_that_is_left(plan, monkeypatch):
    least = needs(sized(plan, 256, 8192, 256 * 16))
    page = needs(sized(plan, 256, 8192, 256 * 16 + 1)) - least
    made, size = planned(plan, monkeypatch, least + 100 * page)
    assert size == (256, 8192, 256 * 16 + 90)
    assert needs(made) <= least + 100 * page
    assert planned(plan, monkeypatch, least)[1] == (256, 8192, 256 * 16)
    # Half of the slots leave memory for more pages.
    made, (slots, capacity, pages) = planned(plan, monkeypatch, least - 1)
    assert (slots, capacity) == (128, 8192)
    assert pages > 128 * 16
    assert needs(made) < least


def test_a_context_that_does_not_fit_is_halved(plan, monkeypatch):
    whole, half = (needs(sized(plan, 8, each, 128)) for each in (8192, 4096))
    assert half < whole
    made, (slots, capacity, pages) = planned(plan, monkeypatch, whole - 1)
    assert (slots >= 8, capacity) == (True, 4096)
    assert pages >= 64
    assert needs(made) < whole
    # Only the default may shrink.
    assert planned(plan, monkeypatch, whole - 1, capacity=8192)[1][1] == 8192


def test_slots_that_are_asked_for_and_do_not_fit_are_refused(monkeypatch):
    """The refusal counts the pages that a server needs at least, not those of full slots."""
    monkeypatch.setattr(planning, "gpu_problem", lambda: None)
    monkeypatch.setattr("jetspec_jax.async_llm.gpu_problem", lambda: None)
    target, free = random_target(LONG, 0), [1 << 50]
    monkeypatch.setattr(memory, "free_bytes", lambda *_: free[0])
    made = AsyncLLM(target, budget=1, max_slots=16)
    least = sized(made.llm.engines.plan, 16, 1024, 256)
    free[0] = needs(least)
    assert AsyncLLM(target, budget=1, max_slots=16).max_model_len < 8192
    with pytest.raises(DeviceMemoryError, match="stores of 16 x 8192 tokens in 256 pages"):
        AsyncLLM(target, budget=1, max_slots=16, capacity=8192)


def test_a_request_beyond_the_default_of_a_cpu(monkeypatch):
    target, prompt, params = random_target(LONG, 0), [1, 5] * 600, SamplingParams(max_tokens=5)
    [expected] = LLM(target, budget=1).generate([prompt], params)
    with pytest.raises(ValueError, match="maximum context length is 1024"):
        AsyncLLM(target, budget=1).check(prompt, params)
    for module in ("engine.plan", "async_llm"):
        monkeypatch.setattr(f"jetspec_jax.{module}.gpu_problem", lambda: None)

    async def run():
        async with AsyncLLM(target, budget=1, max_slots=2) as llm:
            assert llm.max_model_len == 8192
            return [token async for delta in llm.generate(prompt, params) for token in delta.token_ids]

    assert asyncio.run(run()) == expected.token_ids
