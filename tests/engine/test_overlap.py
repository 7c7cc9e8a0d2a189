"""Whether rounds overlap; engines with two batches in flight."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jetspec_jax import SamplingParams, generate
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.engine.call import Call
from jetspec_jax.engine.loop import EngineLoop, wait
from jetspec_jax.engine.planning import overlaps, plan_engine
from jetspec_jax.engine.runner import Runner
from tests.decode.compilations import compilations
from tests.decode.tiny import TINY, TinyEngine, finish, random_head, random_target, with_windows

CONFIG = with_windows(TINY, None)
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
TREE = TreeSettings(16, 3)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 0)


@pytest.fixture(scope="module")
def head():
    return random_head(CONFIG, 0)


@pytest.fixture(scope="module")
def expected(target):
    return generate(target, [PROMPT], PARAMS)[0].token_ids


@pytest.mark.parametrize(
    ("backend", "hidden", "overlapped"), [("cpu", 4096, False), ("gpu", 4096, True), ("gpu", 64, False)]
)
def test_large_targets_overlap_on_a_gpu(monkeypatch, backend, hidden, overlapped):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    config = dataclasses.replace(CONFIG, hidden_size=hidden, vocab_size=150_000)
    plan = plan_engine(config, None, TreeSettings(1), jnp.dtype("float32"), implementation="xla")
    assert overlaps(plan) == overlapped


def test_tokens_are_those_of_plain_decoding(target, head):
    params = [
        SamplingParams(max_tokens=10 + 9 * seed, temperature=seed % 2, seed=seed, ignore_eos=True)
        for seed in range(4)
    ]
    prompts = [PROMPT * (1 + 7 * seed) for seed in range(4)]
    plain = generate(target, prompts, params)
    engine = TinyEngine(target, head, TREE, slots=2, overlapped=True)
    requests = [engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    finish(engine)
    assert [request.tokens for request in requests] == [output.token_ids for output in plain]
    while engine.runner.in_flight:
        engine.collect()
    engine.step()
    engine.scheduler.pool.check([])


class TestTwoInFlight:
    @pytest.fixture
    def engine(self, target, head):
        return TinyEngine(target, head, TREE, slots=2, overlapped=True)

    def test_the_next_batch_is_launched_before_the_last_is_fetched(self, engine, expected):
        request = engine.submit(PROMPT, PARAMS)
        assert engine.launch()
        assert engine.launch()
        assert len(engine.runner.in_flight) == 2
        assert request.tokens == []
        with pytest.raises(RuntimeError, match="launched and not collected"):
            engine.launch()
        assert engine.collect() == [request]
        assert len(engine.runner.in_flight) == 1
        assert request.tokens == expected[: len(request.tokens)]
        finish(engine)
        assert request.tokens == expected

    def test_an_end_by_length_that_is_certain_launches_nothing(self, engine):
        request = engine.submit(PROMPT, SamplingParams(max_tokens=1))
        assert engine.launch()
        assert not engine.launch()
        assert engine.collect() == [request]
        assert not engine.busy
        assert not engine.runner.in_flight

    def test_an_end_that_is_found_late_is_an_idle_round(self, engine, expected):
        request = engine.submit(PROMPT, SamplingParams(max_tokens=20, stop_token_ids=expected[:1]))
        engine.step()
        assert request.finish_reason == "stop"
        assert engine.record.idle_rounds == 0
        assert engine.collect() == []
        assert engine.record.idle_rounds == 1
        assert request.tokens == expected[:1]

    def test_a_cancelled_request_leaves_its_slot_to_the_next_at_once(self, engine, expected):
        first, second = engine.submit(PROMPT, PARAMS), engine.submit(PROMPT, PARAMS)
        engine.launch()
        engine.launch()
        first.cancel()
        third = engine.submit(PROMPT, PARAMS)
        assert engine.collect() == [second]
        assert engine.launch()
        assert third.slot == first.slot
        finish(engine)
        assert second.tokens == third.tokens == expected

    def test_a_prompt_without_rounds_is_waited_for(self, target, head, expected):
        many = {"prefill_tokens": 64}
        prompt = PROMPT * 40
        engine = TinyEngine(target, head, TREE, slots=1, many=many, overlapped=True)
        request = engine.submit(prompt, PARAMS)
        assert engine.launch()
        assert engine.launch()
        assert [flight.batch.rounds for flight in engine.runner.in_flight] == [0, 0]
        assert engine.collect() == []
        finish(engine)
        assert request.tokens == generate(target, [prompt], PARAMS)[0].token_ids

    def test_a_batch_takes_the_time_between_two_fetches(self, engine):
        engine.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
        engine.step()
        engine.step()
        engine.launch()
        before = engine.runner._collected
        engine.collect()
        assert engine.record.seconds == pytest.approx(engine.runner._collected - before)

    def test_nothing_compiles_once_all_is_compiled(self, target, head):
        many = {"live": (1,)}
        engine = TinyEngine(target, head, TREE, slots=2, many=many, overlapped=True)
        engine.compiler.compile(engine.runner.programs([]))
        with compilations() as seen:
            for length in (3, 40):
                engine.submit(PROMPT * length, PARAMS)
                finish(engine)
        assert seen == []


class TestLoop:
    """Loops whose engines have two batches in flight."""

    @pytest.fixture
    def loop(self, target, head):
        return EngineLoop(None, TinyEngine(target, head, TREE, slots=2, overlapped=True))

    def call(self, loop, *requests):
        call = Call(loop, loop.engine.plan, loop.engine.weights)
        call.queue.extend(requests)
        loop.submit(call)
        return call

    def serve(self, call):
        while not call.over:
            wait([call])

    def test_requests_and_functions(self, loop, expected):
        engine, seen = loop.engine, []
        ends = SamplingParams(max_tokens=20, stop_token_ids=expected[3:4], ignore_eos=True)
        requests = [engine.request(PROMPT, params) for params in [PARAMS, ends, PARAMS, PARAMS, PARAMS]]
        call = self.call(loop, *requests)
        for request in requests:
            request.on_update = call.news.set
        worker = threading.Thread(target=lambda: loop.run(lambda: seen.append(len(engine.runner.in_flight))))
        worker.start()
        self.serve(call)
        worker.join()
        loop.settle()
        assert seen == [0], "a function runs while nothing is in flight"
        assert [request.tokens for request in requests] == [expected, expected[:4], *[expected] * 3]
        assert not engine.runner.in_flight
        assert loop.stats(0).idle_rounds > 0

    def test_a_late_error_fails_the_requests_of_both_batches(self, loop, monkeypatch, expected):
        engine = loop.engine
        first, second = engine.request(PROMPT, PARAMS), engine.request(PROMPT, PARAMS)
        collect, count, counted = Runner.collect, [], []

        def failing(runner):
            count.append(len(runner.in_flight))
            if len(count) == 3:
                raise RuntimeError("the device is lost")
            return collect(runner)

        first.on_update = lambda: counted.append(loop.stats(0).prefix_queries)
        monkeypatch.setattr(Runner, "collect", failing)
        calls = [self.call(loop, request) for request in (first, second)]
        while not all(call.over for call in calls):
            time.sleep(0.01)
        assert all("the device is lost" in str(call.error) for call in calls)
        assert count == [2, 2, 2]
        assert all("the device is lost" in str(request.error) for request in (first, second))
        assert engine.broken
        loop.settle()
        assert counted[-1] == loop.stats(0).prefix_queries == 2 * len(PROMPT), "counters only grow"
        third = engine.request(PROMPT, PARAMS)
        call = Call(loop, engine.plan, DecodeWeights(*engine.weights))
        call.queue.append(third)
        third.on_update = call.news.set
        loop.submit(call)
        self.serve(call)
        assert third.tokens == expected
        assert loop.engine is not engine
