"""Launching and collecting, on a device."""

import jax
import pytest

from jetspec_jax import SamplingParams, generate
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.batch import Batch
from tests.decode.tiny import TinyEngine, finish, serve

PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
TREE = TreeSettings(16, 3)


@pytest.fixture(scope="module")
def expected(target):
    return generate(target, [PROMPT], PARAMS)[0].token_ids


@pytest.fixture
def engine(target, head):
    return TinyEngine(target, head, TREE)


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_launch_waits_for_nothing(engine, expected, monkeypatch):
    request = engine.submit(PROMPT, PARAMS)
    with monkeypatch.context() as patch:
        for name in ("device_get", "block_until_ready"):
            patch.setattr(jax, name, interrupt)
        engine.launch(2)
    assert engine.runner.in_flight
    assert request.tokens == []
    assert not engine.launch(), "a batch is in flight"
    assert engine.collect() == [request]
    assert not engine.runner.in_flight
    assert request.tokens == expected[: len(request.tokens)]
    assert len(request.accept_lengths) == 2
    finish(engine)
    assert request.tokens == expected


def test_a_batch_without_rounds_is_waited_for(engine, monkeypatch):
    runner, waited, get = engine.runner, [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda arrays: waited.append(arrays) or get(arrays))
    runner.launch(Batch((), (), (), (), (), 1, 0))
    assert not waited
    last = runner.in_flight[0].last
    assert last is not runner.state.active, "the next launch donates it"
    assert runner.collect().tree_sizes.size == 0
    assert any(arrays is last for arrays in waited)


def test_a_request_may_join_or_leave_while_a_batch_flies(engine, expected):
    first, second = engine.submit(PROMPT, PARAMS), engine.submit(PROMPT, PARAMS)
    engine.launch(1)
    first.cancel()
    third = engine.submit(PROMPT, PARAMS)
    assert engine.collect() == []
    finish(engine)
    assert second.tokens == third.tokens == expected


class Turns:
    """A policy of given dispatches, which writes down what they did."""

    def __init__(self, *buckets):
        self.buckets, self.records = list(buckets), []

    def choose(self, live, waiting, forwards, shape_of):
        return shape_of(2, self.buckets.pop(0)), 2

    def observe(self, record):
        self.records.append(record)


@pytest.mark.wide
def test_a_dispatch_is_timed_unless_it_compiles(target, head):
    """With its prefill forwards; a program's first call may compile it."""
    engine = TinyEngine(target, head, TreeSettings(16, 3, algorithm="auto"), slots=2)
    policy = engine.scheduler.policy = Turns(1, 1, 16, 16, 16)
    engine.submit(PROMPT, PARAMS)
    for _ in range(4):
        engine.step()
    engine.submit(PROMPT, PARAMS)
    engine.step()
    assert [record.batch.bucket for record in policy.records] == [1, 1, 16, 16, 16]
    assert [len(record.batch.forwards) for record in policy.records] == [1, 0, 0, 0, 1]
    assert [record.seconds is not None for record in policy.records] == [False, True, False, True, True]
    assert all(record.seconds is None or record.seconds > 0 for record in policy.records)
    # Trees say what smaller ones would have done; plain rounds have none.
    assert [record.expected is not None for record in policy.records] == [False, False, True, True, True]


def test_plain_decoding_holds_no_head(target, head, expected):
    engine = TinyEngine(target, head, TreeSettings(1))
    assert engine.runner.weights.proposer is None
    assert engine.runner.state.proposer is None
    assert serve(engine, [PROMPT], [PARAMS])[0].token_ids == expected
