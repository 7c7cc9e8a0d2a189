"""Whether rounds overlap; engines with two batches in flight."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.plan import overlaps, plan_engine
from tests.decode.tiny import TinyEngine, check_pool, finish

PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
TREE = TreeSettings(16, 3)


@pytest.fixture(scope="module")
def expected(target):
    return generate(target, [PROMPT], PARAMS)[0].token_ids


@pytest.mark.parametrize(
    ("backend", "hidden", "overlapped"), [("cpu", 4096, False), ("gpu", 4096, True), ("gpu", 64, False)]
)
def test_large_targets_overlap_on_a_gpu(target, monkeypatch, backend, hidden, overlapped):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    config = dataclasses.replace(target.config, hidden_size=hidden, vocab_size=150_000)
    plan = plan_engine(config, None, TreeSettings(1), jnp.dtype("float32"), implementation="xla")
    assert overlaps(plan) == overlapped


@pytest.mark.usefixtures("no_type_checks")
def test_several_devices_have_loops(target):
    class TwoGpus:
        devices, size = np.array([SimpleNamespace(platform="gpu")] * 2), 2

    plan = plan_engine(target.config, None, TreeSettings(1), jnp.dtype("float32"), implementation="xla")
    object.__setattr__(plan.decoder, "mesh", TwoGpus())
    assert not overlaps(plan)


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
    engine.scheduler.drop_closed()
    check_pool(engine.scheduler.pool, [])


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
        assert not engine.launch(), "two batches are in flight"
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
        assert engine.scheduler.idle_rounds == 0
        assert engine.collect() == []
        assert engine.scheduler.idle_rounds == 1
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

    def test_a_batch_takes_the_time_between_two_fetches(self, engine):
        engine.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
        engine.step()
        engine.step()
        engine.launch()
        before = engine.runner._collected
        record = engine.runner.collect()
        assert record.seconds == pytest.approx(engine.runner._collected - before)
