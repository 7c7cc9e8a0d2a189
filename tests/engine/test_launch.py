"""Launching, collecting, and what an interrupt leaves: on a device."""

import jax
import pytest

from jetspec_jax import SamplingParams, TreeDecoder, generate
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.runner import Runner
from tests.decode.tiny import TINY, TinyEngine, finish, random_head, random_target, serve, with_windows

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
    with pytest.raises(RuntimeError, match="launched and not collected"):
        engine.launch()
    assert engine.collect() == [request]
    assert not engine.runner.in_flight
    assert request.tokens == expected[: len(request.tokens)]
    assert len(request.accept_lengths) == 2
    with pytest.raises(RuntimeError, match="no batch was launched"):
        engine.collect()
    finish(engine)
    assert request.tokens == expected


def test_a_request_may_join_or_leave_while_a_batch_flies(engine, expected):
    first, second = engine.submit(PROMPT, PARAMS), engine.submit(PROMPT, PARAMS)
    engine.launch(1)
    first.cancel()
    third = engine.submit(PROMPT, PARAMS)
    assert engine.collect() == []
    finish(engine)
    assert second.tokens == third.tokens == expected


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_an_interrupted_wait_loses_nothing(engine, expected, monkeypatch, turn):
    request = engine.submit(PROMPT, PARAMS)
    for _ in range(turn):
        engine.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step(2)
    assert engine.runner.in_flight
    # The next step does what this one did not.
    assert engine.step(2) == [request]
    assert len(request.accept_lengths) == 2 * (turn + 1)
    finish(engine)
    assert request.tokens == expected


@pytest.mark.parametrize(
    ("owner", "name"),
    [(TreeDecoder, "prefill"), (TreeDecoder, "decode"), (Runner, "launch"), (Request, "append_tokens")],
)
def test_an_interrupted_decision_is_said(engine, expected, monkeypatch, owner, name):
    """Host and device may be at odds then: no tokens come of it."""
    request = engine.submit(PROMPT, PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(RuntimeError, match="interrupted; its requests are lost"):
        engine.step()
    assert request.tokens == []


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
    assert [record.bucket for record in policy.records] == [1, 1, 16, 16, 16]
    assert [len(record.forwards) for record in policy.records] == [1, 0, 0, 0, 1]
    assert [record.seconds is not None for record in policy.records] == [False, True, False, True, True]
    assert all(record.seconds is None or record.seconds > 0 for record in policy.records)
    # Trees say what smaller ones would have done; plain rounds have none.
    assert [record.expected is not None for record in policy.records] == [False, False, True, True, True]


def test_plain_decoding_holds_no_head(target, head, expected):
    engine = TinyEngine(target, head, TreeSettings(1))
    assert engine.weights.proposer is engine.runner.weights.proposer is None
    assert engine.runner.state.proposer is None
    assert serve(engine, [PROMPT], [PARAMS])[0].token_ids == expected
