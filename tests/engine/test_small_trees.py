"""Trees of 8 nodes on a CPU where nobody names any: which calls get them, and what is measured for them."""

import jax
import pytest

from jetspec_jax import LLM, SamplingParams, generate
from jetspec_jax import llm as llm_module
from jetspec_jax.engine import known_costs, round_costs, runner, small_trees
from jetspec_jax.engine.loop import loop_for
from jetspec_jax.engine.round_costs import RoundCosts
from tests.decode.compilations import compilations

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def demo():
    return LLM(budget=1)


@pytest.fixture(autouse=True)
def on_a_cpu(tmp_path, monkeypatch):
    """The demo's target counts as large; a measurement is short; nothing is known of this machine."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(small_trees, "LEAST_BYTES", 1)
    monkeypatch.setattr(small_trees, "PLAIN_TOKENS", 0)
    monkeypatch.setattr(round_costs, "REPEATS", 1)
    monkeypatch.setattr(round_costs, "DISPATCH_SECONDS", 0.0)
    monkeypatch.setattr(known_costs, "_known", {})
    monkeypatch.setattr(known_costs, "_path", None)
    monkeypatch.setattr(llm_module, "notes_folder", lambda folder: None if folder == "off" else tmp_path)


@pytest.fixture
def llm(demo):
    return LLM(demo.target, "demo")


def planned(llm, params=GREEDY, prompts=("import os\n",)):
    plan, requests = llm._requests(list(prompts), params, None)
    assert {request.budget for request in requests} == {plan.decoder.bucket}
    return plan


def ratio(llm, value):
    """Makes it known that rounds of trees take so many times as long as plain ones."""
    costs = RoundCosts((64, 512), {(1, 1): (1.0, 1.0), (1, 8): (value, value)}, {(1, 1): 5.0, (1, 8): 5.0})
    known_costs.learn_costs(planned(llm).cost_key, costs)


def test_one_greedy_request_gets_them_and_no_other_call(llm):
    assert planned(llm).decoder.bucket == 8
    assert planned(llm, SamplingParams(temperature=0.7)).decoder.bucket == 1
    assert planned(llm, prompts=["import os\n"] * 2).decoder.bucket == 1
    assert planned(llm, SamplingParams(temperature=0.7, n=2)).decoder.bucket == 1
    assert "8 for one greedy request" in repr(llm)


@pytest.mark.parametrize("settings", [{"budget": 1}, {"budget": 16}, {"width": 3}], ids=str)
def test_a_tree_that_is_named_is_that_tree(demo, settings):
    named = LLM(demo.target, "demo", **settings)
    assert planned(named).decoder.bucket == settings.get("budget", 128)


def test_a_small_target_is_decoded_plainly(demo, monkeypatch):
    monkeypatch.setattr(small_trees, "LEAST_BYTES", 10**12)
    assert planned(LLM(demo.target, "demo")).decoder.bucket == 1


def test_rounds_that_take_too_long_are_not_tried(llm):
    ratio(llm, 2.7)
    assert planned(llm).decoder.bucket == 8
    ratio(llm, 2.8)
    assert planned(llm).decoder.bucket == 1


def test_they_begin_after_some_tokens(llm, monkeypatch):
    monkeypatch.setattr(small_trees, "PLAIN_TOKENS", 30)
    for bucket in (1, 1, 8, 8):
        plan, requests = llm._requests(["import os\n"], GREEDY, None)
        assert plan.decoder.bucket == bucket
        requests[0].tokens += [7] * 20


@pytest.mark.parametrize(("params", "bucket"), [(None, 8), (GREEDY, 8), (SamplingParams(temperature=0.7), 1)])
def test_they_begin_at_once_after_a_warm_up_for_greedy_requests(llm, monkeypatch, params, bucket):
    monkeypatch.setattr(small_trees, "PLAIN_TOKENS", 30)
    monkeypatch.setattr(llm, "generate", lambda *arguments, **settings: None)
    monkeypatch.setattr(llm_module, "compile_ahead", lambda *arguments: None)
    llm.warm_up(1, params)
    assert planned(llm).decoder.bucket == bucket


def test_where_memory_is_short_decoding_stays_plain(llm, monkeypatch):
    monkeypatch.setattr(small_trees, "fits", lambda needs: False)
    loop_for(llm.target).free()
    assert planned(llm).decoder.bucket == 1


def answered(llm, wanted):
    """The trees' sizes of an answer that equals plain decoding's."""
    [completion] = llm.generate([wanted.prompt_token_ids], GREEDY)
    assert completion.token_ids == wanted.token_ids
    return completion.tree_sizes


def test_costs_are_measured_once_and_the_tokens_are_those_of_plain_decoding(llm, demo, monkeypatch, tmp_path):
    [wanted] = generate(demo.target, [demo.encode("def read_lines(path):\n")], GREEDY)
    answered(llm, wanted)
    assert (tmp_path / known_costs.FILE).exists()
    known_costs._known.clear()  # as another process
    monkeypatch.setattr(runner, "measure_round_costs", None)
    answered(LLM(demo.target, "demo"), wanted)


def test_trees_that_cost_little_are_grown(llm, demo):
    ratio(llm, 1.0)
    [wanted] = generate(demo.target, [demo.encode("def read_lines(path):\n")], GREEDY)
    assert max(answered(llm, wanted)) == 8


def test_nothing_is_kept_where_no_program_is(demo, tmp_path):
    LLM(demo.target, "demo")
    assert known_costs._path == tmp_path / known_costs.FILE
    LLM(demo.target, "demo", compilation_cache="off")
    assert known_costs._path is None


@pytest.mark.wide
def test_nothing_compiles_after_a_warm_up(llm):
    llm.warm_up(1)
    with compilations() as programs:
        llm.generate(["import os\n"], GREEDY)
        llm.generate(["import os\n"], SamplingParams(temperature=0.7, seed=1, max_tokens=24))
        for _ in llm.stream("import os\n", GREEDY):
            pass
    assert not programs
