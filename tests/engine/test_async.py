"""`AsyncLLM`: many callers, one engine and one thread; each gets what it gets alone."""

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import threading
import weakref

import pytest

from jetspec_jax import AsyncLLM, SamplingParams, TreeDecoder, generate
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.request import DeadlinePassed, EngineFailed
from jetspec_jax.engine.scheduler import QueueFull
from tests.decode.tiny import TINY, flat, free_pages, random_head, random_target, with_windows
from tests.engine.halting import begun, halted, paused
from tests.events import join, until
from tests.marks import wide

CONFIG = with_windows(TINY, None)
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
TREE = {"budget": 16, "width": 3, "algorithm": "top_nodes"}
#: Threads of engines from before these tests.
OTHERS: set[threading.Thread] = set()


@pytest.fixture
def llm(models):
    """One of four slots, which leaves neither requests nor threads."""
    made = AsyncLLM(*models, max_slots=4, **TREE)
    yield made
    if not made.llm.engines.closed:
        engine = engine_of(made)
        engine.run(lambda: None)
        until(lambda: engine.open_requests == 0)
        assert free_pages(engine.scheduler) == engine.plan.size.num_pages
        asyncio.run(made.close())
    until(lambda: not threads(), threads)


@pytest.fixture(scope="module", autouse=True)
def others():
    """Engines that other modules have left are not these tests' matter."""
    OTHERS.update(threads())
    yield
    OTHERS.clear()


def threads():
    """Those of engines, and of what they compile in the background."""
    names = "jetspec-engine", "jetspec-compiler"
    return [one for one in threading.enumerate() if one.name in names and one not in OTHERS]


def engine_of(llm):
    [engine] = llm.llm.engines.engines()
    return engine


@pytest.fixture(scope="module")
def expected(models):
    return generate(models[0], [PROMPT], PARAMS)[0]


async def read(llm, prompt=PROMPT, params=PARAMS, most=None, **settings):
    """Deltas, at most so many; then the generator is closed."""
    deltas = []
    async with contextlib.aclosing(llm.generate(prompt, params, **settings)) as stream:
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == most:
                break
    return deltas


def tokens_of(deltas):
    return list(itertools.chain.from_iterable(delta.token_ids for delta in deltas))


def check(deltas, expected):
    whole = deltas[-1].completion
    assert whole == expected
    assert tokens_of(deltas) == expected.token_ids
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert whole.metrics.decode_time >= 0
    assert whole.metrics.time_to_first_token > 0


def same(deltas, expected):
    """As `check`, whatever the trees: plain decoding has other rounds."""
    assert deltas[-1].completion.token_ids == expected.token_ids
    assert "".join(delta.text for delta in deltas) == expected.text


def test_deltas_make_the_completion(llm, short_dispatches):
    deltas = asyncio.run(read(llm))
    assert len(deltas) > 1
    check(deltas, deltas[-1].completion)


def test_results_are_read_as_vllm_s(llm, expected):
    """A name as the third argument, and a text that is made of `outputs`; the tokenizer, and the end."""
    params = dataclasses.replace(PARAMS, stop_token_ids=[expected.token_ids[-1]])

    async def run():
        results = [result async for result in llm.generate(PROMPT, params, "mine")]
        assert {result.request_id for result in results} == {"mine"}
        return results, await llm.get_tokenizer()

    results, tokenizer = asyncio.run(run())
    count = expected.token_ids.index(expected.token_ids[-1]) + 1
    text = "".join(own.text for result in results for own in result.outputs)
    assert text == tokenizer.decode(expected.token_ids[: count - 1])
    assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
    assert [result.stop_reason for result in results] == [None] * (len(results) - 1) + [
        expected.token_ids[-1]
    ]
    with pytest.raises(TypeError, match="no argument lora_request; adapters are not read"):
        asyncio.run(read(llm, lora_request=None))
    llm.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(read(llm))


def test_completions_of_one_prompt(llm, models):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, n=3)
    deltas = asyncio.run(read(llm, params=params))
    [name] = {delta.request_id for delta in deltas}
    assert {delta.completion.request_id for delta in deltas if delta.completion} == {name}
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    for index, whole in enumerate(flat(generate(models[0], [PROMPT], params))):
        same([delta for delta in deltas if delta.index == index], whole)


def test_tasks_that_are_cancelled_free_their_slots(llm, expected):
    async def run():
        first = asyncio.Event()

        async def endless():
            async for _ in llm.generate(PROMPT, LONG):
                first.set()

        with halted(begun(1)):
            tasks = [asyncio.create_task(endless()) for _ in range(6)]
            await first.wait()
            for task in tasks:
                task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        return await read(llm)

    same(asyncio.run(run()), expected)


def test_a_consumer_that_raises_and_one_that_forgets(llm, expected):
    async def run():
        async def raises():
            async with contextlib.aclosing(llm.generate(PROMPT, LONG)) as stream:
                async for _ in stream:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await raises()
        forgotten = llm.generate(PROMPT, LONG)
        await anext(forgotten)
        del forgotten
        return await read(llm)

    same(asyncio.run(run()), expected)


def test_loops_one_after_another_and_at_once(llm, expected):
    for _ in range(2):
        same(asyncio.run(read(llm)), expected)
    got = []
    loops = [threading.Thread(target=lambda: got.append(asyncio.run(read(llm)))) for _ in range(2)]
    for one in loops:
        one.start()
    join(*loops)
    for deltas in got:
        same(deltas, expected)
    assert len(got) == 2


def test_a_loop_that_is_closed_takes_its_requests_along(llm, expected):
    loop = asyncio.new_event_loop()
    stream = llm.generate(PROMPT, LONG)
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    same(asyncio.run(read(llm)), expected)
    del stream


def test_calls_of_other_threads_share_the_engine(llm, expected):
    got, beside = [], llm.llm

    def call():
        for _ in range(3):
            got.extend(beside.generate([PROMPT] * 2, PARAMS))
            with beside.stream(PROMPT, PARAMS) as stream:
                list(stream)
            got.append(stream.completion)

    async def run():
        other = threading.Thread(target=call)
        await read(llm, most=1)
        engine = engine_of(llm)
        other.start()
        deltas = await asyncio.gather(*[read(llm) for _ in range(8)])
        await asyncio.to_thread(other.join)
        assert engine_of(llm) is engine
        return deltas

    for deltas in asyncio.run(run()):
        same(deltas, expected)
    assert [one.token_ids for one in got] == [expected.token_ids] * 9


@pytest.mark.wide
def test_deltas_tell_of_their_tokens(llm, models):
    """One that wants more than those before it: their engine makes room for that."""
    wants = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1, bad_words=["ab"], min_tokens=12)

    async def both():
        return await asyncio.gather(read(llm), read(llm, params=wants))

    plain, deltas = asyncio.run(both())
    assert {delta.logprobs is None for delta in plain} == {True}
    [expected] = generate(models[0], [PROMPT], wants)
    told = list(itertools.chain.from_iterable(delta.logprobs for delta in deltas))
    assert told == deltas[-1].completion.logprobs
    assert tokens_of(deltas) == expected.token_ids
    for mine, other in zip(told, expected.logprobs, strict=True):
        assert {token: own.logprob for token, own in mine.items()} == pytest.approx(
            {token: own.logprob for token, own in other.items()}, abs=1e-4
        )


def test_an_error_of_the_engine_ends_all_and_the_next_begins_anew(llm, expected, monkeypatch):
    def broken(*_):
        raise OSError("the device is gone")

    async def run():
        await read(llm)
        with monkeypatch.context() as patch:
            patch.setattr(TreeDecoder, "decode", broken)
            ends = await asyncio.gather(*[read(llm) for _ in range(3)], return_exceptions=True)
        assert [str(end) for end in ends] == ["the device is gone"] * 3
        assert all(isinstance(end, EngineFailed) and isinstance(end.__cause__, OSError) for end in ends)
        assert llm.errored
        deltas = await read(llm)
        assert not llm.errored
        return deltas

    same(asyncio.run(run()), expected)


def test_a_deadline_passes(llm, expected):
    async def run():
        with pytest.raises(DeadlinePassed):
            await read(llm, timeout=0)
        return await read(llm, timeout=600)

    same(asyncio.run(run()), expected)


def test_a_deadline_passes_while_a_function_has_the_engine(llm):
    async def run():
        message = r"of 0\.050 s passed: after \d+\.\d+ s the request still waits"
        late = pytest.raises(DeadlinePassed, match=message)
        with paused(llm.llm.engines), late:
            await read(llm, timeout=0.05)

    asyncio.run(run())


def test_a_full_queue(models, expected):
    async def run():
        async with AsyncLLM(*models, max_slots=4, max_waiting=2, **TREE) as llm:
            with paused(llm.llm.engines):  # nobody is served before all have come
                tasks = [asyncio.create_task(read(llm)) for _ in range(8)]
                while sum(task.done() for task in tasks) < 2:
                    await asyncio.sleep(0.001)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            served = [end for end in ends if isinstance(end, list)]
            assert all(isinstance(end, QueueFull) for end in ends if not isinstance(end, list))
            assert len(served) == 6  # in slots, or waiting
            for deltas in served:
                same(deltas, expected)
            # Of an idle engine's slots all may be asked for.
            assert len(await read(llm, params=SamplingParams(n=4, max_tokens=9, ignore_eos=True))) >= 4
            await llm.warm_up(SamplingParams(logprobs=1))  # which the bound does not refuse
        with pytest.raises(RuntimeError, match="this AsyncLLM is closed"):
            await llm.warm_up()

    asyncio.run(run())


@pytest.mark.wide
def test_closed_with_running_requests(models):
    async def run():
        llm = AsyncLLM(*models, max_slots=2, **TREE)
        stream = llm.generate(PROMPT, LONG)
        with halted(begun(1), over=lambda: llm.llm.engines.closed):
            await anext(stream)
            others = [asyncio.create_task(read(llm, params=LONG)) for _ in range(4)]
            while llm.stats().running + llm.stats().waiting < 5:
                await asyncio.sleep(0.001)
            await llm.close()
        await llm.close()
        until(lambda: threads() == [])  # programs that are being compiled are not interrupted
        with pytest.raises(RuntimeError, match="closed"):
            [delta async for delta in stream]
        for end in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(end, RuntimeError)
        with pytest.raises(RuntimeError, match="closed"):
            await read(llm)

    asyncio.run(run())


def test_abort(llm):
    async def run():
        stream = llm.generate(PROMPT, LONG, request_id="mine")
        with halted(begun(1)):
            begun_with = await anext(stream)
            with pytest.raises(ValueError, match="'mine' runs"):
                await read(llm, request_id="mine")
            await llm.abort("mine")
            await llm.abort("nobody's")
        deltas = [delta async for delta in stream]
        deltas.insert(0, begun_with)
        assert deltas[-1].finish_reason == "abort"
        whole = deltas[-1].completion
        assert (whole.finish_reason, whole.prompt_token_ids) == ("abort", PROMPT)
        assert whole.token_ids == [token for delta in deltas for token in delta.token_ids] != []
        assert whole.text == "".join(delta.text for delta in deltas)
        assert sum(whole.accept_lengths) == len(whole.token_ids)
        assert whole.metrics.rounds == whole.rounds == len(whole.tree_sizes)
        assert (await read(llm, request_id="mine"))[-1].finish_reason == "length"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "settings", "says"),
    [
        ([], {}, "the prompt is empty"),
        ([64], {}, "outside the vocabulary"),
        ([1] * 300, {}, "the prompt is too long: 300 tokens"),
        (PROMPT, {"params": SamplingParams(max_tokens=300)}, "max_tokens"),
        (PROMPT, {"params": 3}, "SamplingParams"),
        (PROMPT, {"params": SamplingParams(n=257, max_tokens=1)}, r"n=257 .* more than the \d+ slots"),
        (PROMPT, {"priority": "high"}, "priority"),
        (PROMPT, {"timeout": "soon"}, "timeout"),
        (PROMPT, {"timeout": -1.0}, "timeout must be at least 0 seconds, not -1.0"),
        (PROMPT, {"timeout": float("nan")}, "timeout must be at least 0 seconds, not nan"),
        (PROMPT, {"request_id": 3}, "request_id"),
    ],
)
def test_bad_input_reaches_no_engine(llm, monkeypatch, prompt, settings, says):
    monkeypatch.setattr(Engine, "submit", lambda *_: pytest.fail("was submitted"))
    with pytest.raises((TypeError, ValueError), match=says):
        asyncio.run(read(llm, prompt, **settings))


def test_hints_of_calls_are_refused_by_name(llm):
    with pytest.raises(TypeError, match=r"no argument routing; give the hints to the tree algorithm"):
        asyncio.run(read(llm, PROMPT, routing={"task": "math"}))


def test_what_was_checked_is_not_checked_again(llm, expected, monkeypatch):
    checked = llm.check(PROMPT, PARAMS)
    monkeypatch.setattr("jetspec_jax.async_llm.check_request", lambda *_, **__: pytest.fail("checked twice"))
    same(asyncio.run(read(llm, checked, None)), expected)
    with pytest.raises(ValueError, match="give no sampling_params"):
        asyncio.run(read(llm, checked, PARAMS))


def test_one_that_is_dropped_leaves_no_thread_and_no_target():
    target, head = random_target(CONFIG, 1), random_head(CONFIG, 1)
    llm = AsyncLLM(target, head, max_slots=2, **TREE)
    stream = llm.generate(PROMPT, LONG)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    kept = weakref.ref(engine_of(llm)), weakref.ref(target.weights["embed_tokens"])
    del llm, stream, target
    until(lambda: gc.collect() >= 0 and not threads(), threads)
    assert [one() for one in kept] == [None, None]


def test_one_process_has_nobody_to_follow(llm):
    with pytest.raises(ValueError, match="shares its models with no other"):
        llm.follow()


@pytest.mark.parametrize("algorithm", [wide("auto"), "top_nodes"])
def test_a_request_has_a_budget_of_its_own(models, algorithm):
    async def run():
        async with AsyncLLM(*models, max_slots=2, **{**TREE, "algorithm": algorithm}) as llm:
            alone = [await read(llm, budget=own) for own in (1, 4)]
            return [*alone, *await asyncio.gather(read(llm, budget=1), read(llm, budget=16))]

    plain, small, beside, other = asyncio.run(run())
    expected = plain[-1].completion.token_ids
    assert plain[-1].completion.tree_sizes == [1] * len(expected)
    assert max(small[-1].completion.tree_sizes) <= 4
    assert set(beside[-1].completion.tree_sizes) == {1}  # whatever the bucket
    for deltas in (small, beside, other):
        assert deltas[-1].completion.token_ids == expected


def test_what_each_round_added_joins_to_the_text(llm):
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=["x9 x"])
    deltas = asyncio.run(read(llm, params=params))
    whole = deltas[-1].completion
    rounds = list(itertools.chain.from_iterable(delta.rounds for delta in deltas))
    for delta in deltas:
        assert "".join(own.text for own in delta.rounds) == delta.text
        assert sum(own.tokens for own in delta.rounds) == len(delta.token_ids)
    assert len(rounds) == whole.rounds
    assert sum(own.tokens for own in rounds) == len(whole.token_ids)
    assert [own.tokens for own in rounds[:-1]] == whole.accept_lengths[:-1]


@pytest.mark.parametrize(
    ("budget", "error"), [(0, "lie in 1..16, not 0"), (17, "lie in 1..16, not 17"), (True, "an integer")]
)
def test_a_budget_that_there_is_not(llm, budget, error):
    with pytest.raises((TypeError, ValueError), match=f"budget must .*{error}"):
        asyncio.run(read(llm, budget=budget))
