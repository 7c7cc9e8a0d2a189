"""What rounds cost: measured with the engine's own programs and state, and kept."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate
from jetspec_jax.decode import decoder as decode
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine import round_costs
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.round_costs import RoundCosts
from tests.decode.compilations import compilations
from tests.decode.tiny import SLIDING, random_head, random_target, serve

pytestmark = pytest.mark.usefixtures("quick_compiles")

PROMPT, PARAMS = [3, 1, 4, 1, 5], SamplingParams(max_tokens=40, ignore_eos=True)
SIZE = {"slots": 2, "capacity": 256}


@pytest.fixture(scope="module")
def target():
    return random_target(SLIDING, 0)


@pytest.fixture(autouse=True)
def nothing_measured_yet(monkeypatch):
    monkeypatch.setattr(round_costs, "_measured", {})


@pytest.fixture
def engine(target):
    settings = TreeSettings(budget=16, width=3, algorithm="auto")
    return Engine(target, random_head(SLIDING, 1), settings, **SIZE)


@pytest.fixture
def shown(monkeypatch):
    """The tokens of all slots, of every time that the proposer is shown some."""
    lengths, feed = [], decode.feed

    def watched(*own, **taps):
        lengths.append(own[4].lengths.tolist())
        return feed(*own, **taps)

    monkeypatch.setattr(decode, "feed", watched)
    return lengths


def measure(engine, folder):
    costs, engine.state = round_costs.round_costs(
        engine._decoders,
        engine.weights,
        engine.state,
        num_pages=engine.size.num_pages,
        page_size=64,
        rounds=4,
        folder=folder,
    )
    return costs


def test_are_positive_and_leave_the_slots_free(engine, tmp_path):
    def slots():
        return dataclasses.replace(engine.state, stores=(), proposer=None, unseen=None)

    before = jax.tree.map(np.asarray, slots())
    costs = measure(engine, tmp_path)
    assert len(costs.seconds) == 2
    assert min(min(own) for own in costs.seconds) > 0
    assert len(costs.dispatches) == 2
    assert min(costs.dispatches) >= 0
    jax.tree.map(np.testing.assert_array_equal, slots(), before)
    [completion] = serve(engine, [PROMPT], [PARAMS])
    [plain] = generate(engine.target, [PROMPT], PARAMS)
    assert completion.token_ids == plain.token_ids


@pytest.mark.parametrize("capacity", [64, 128, 320, 384, 1024, 40_960])
def test_are_timed_far_apart_and_within_a_slot(capacity):
    most = 16
    low, high, rounds = round_costs.timed_contexts(capacity, 16, most)
    assert high - low >= capacity // 4
    assert rounds >= 2
    assert high + rounds * most <= capacity
    assert (capacity < 512) == (rounds < 16)


def test_are_kept_between_processes(engine, tmp_path, monkeypatch):
    costs = measure(engine, tmp_path)
    monkeypatch.setattr(round_costs, "_measured", {})
    monkeypatch.setattr(round_costs, "measure_round_costs", None)  # calling it would fail
    assert measure(engine, tmp_path) == costs
    [entry] = json.loads((tmp_path / "costs.json").read_text()).values()
    assert entry["device"] == jax.devices()[0].device_kind


def test_that_are_kept_leave_nothing_to_compile(target, tmp_path, monkeypatch):
    """A later process reads the costs, and still has no program."""
    settings = TreeSettings(budget=16, width=5, algorithm="auto")  # of no other test
    engine = Engine(target, random_head(SLIDING, 1), settings, **SIZE)
    costs = RoundCosts((64, 100), ((1.0, 1.0), (2.0, 2.0)), (0.1, 0.1), 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(round_costs, "measure_round_costs", lambda *args, **_: (costs, args[2]))
        assert measure(engine, tmp_path) == costs
    monkeypatch.setattr(round_costs, "_measured", {})
    with compilations() as seen:
        assert measure(engine, tmp_path) == costs
    assert seen
    with compilations() as seen:
        for decoder in engine._decoders:
            engine.state, _ = decoder.decode(engine.weights, engine.state, np.int32(1))
    assert seen == []


def test_are_of_rounds_alone(engine, shown):
    """What shows plain rounds to the head is compiled, but not timed."""
    clock = round_costs._Clock(engine.weights, engine.state, engine.size.num_pages)
    clock.compile(engine._decoders)
    assert len(shown) == engine.size.slots
    for made in engine._decoders:
        assert clock.seconds(made, 64, 2) > 0
    assert len(shown) == engine.size.slots


def test_a_feed_costs_what_one_more_takes(engine, shown, tmp_path, monkeypatch):
    """Without what waiting for the device takes, which all of a dispatch share."""
    clock = round_costs._Clock(engine.weights, engine.state, engine.size.num_pages)
    clock.compile(engine._decoders)
    shown.clear()
    assert clock.feed_seconds(engine._decoders[0], 64, 2) > 0
    assert shown == [[64, 64], [64, 64]]
    engine.state = clock.free_slots()
    with monkeypatch.context() as patched:
        patched.setattr(round_costs._Clock, "feed_seconds", lambda *own: 0.5 + 0.25 * own[-1])
        assert measure(engine, tmp_path).feed == 0.25


def test_an_engine_is_of_use_after_an_interrupt(engine, monkeypatch):
    def interrupted(decoders, weights, state, **_):
        decoders[0].decode(weights, state, np.int32(1))  # donates the state
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("jetspec_jax.engine.engine.round_costs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.complete([PROMPT], [PARAMS])
    [completion] = serve(engine, [PROMPT], [PARAMS])
    [plain] = generate(engine.target, [PROMPT], PARAMS)
    assert completion.token_ids == plain.token_ids


@pytest.mark.parametrize(("text", "message"), [("{", "cannot read"), ("[]", "holds no JSON object")])
def test_a_damaged_file_is_measured_anew(engine, tmp_path, caplog, text, message):
    (tmp_path / "costs.json").write_text(text)
    measure(engine, tmp_path)
    assert "measured anew" in caplog.text
    assert message in caplog.text
    assert len(json.loads((tmp_path / "costs.json").read_text())) == 1


def test_a_file_that_can_be_neither_read_nor_written(engine, tmp_path, caplog):
    (tmp_path / "costs.json").mkdir()
    measure(engine, tmp_path)
    assert "cannot read" in caplog.text
    assert "round costs are not kept" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_on_a_cpu_nothing_is_written(engine, monkeypatch):
    monkeypatch.setattr(round_costs.platformdirs, "user_cache_path", None)  # calling it would fail
    measure(engine, None)
    assert jnp.all(~engine.state.active)
