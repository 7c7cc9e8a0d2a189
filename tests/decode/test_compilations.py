"""After one warm-up per bucket nothing compiles: what differs between requests are arrays."""

import dataclasses

import numpy as np
import pytest

from jetspec_jax import LLM, SamplingParams, generate, generate_tree
from tests.decode.compilations import compilations
from tests.decode.tiny import TINY, random_head, random_target, with_windows, word_tokenizer
from tests.marks import wide

CONFIG = with_windows(TINY, None)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 0, tokenizer=word_tokenizer(CONFIG.vocab_size))


@pytest.fixture(scope="module")
def head():
    return random_head(CONFIG, 0)


def mixed_requests(count):
    """Prompts of mixed length with every kind of setting that a request can bring."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, length).tolist() for length in rng.integers(1, 200, count)]
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "seed": 2**40, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.9, "stop_token_ids": [3, 60]},
        {"temperature": 1.0, "seed": 1, "min_p": 0.1, "stop": "ab"},
        {"ignore_eos": True},
    ]
    params = [
        SamplingParams(**kinds[i % len(kinds)], max_tokens=int(rng.integers(1, 40))) for i in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("budget", [wide(1), 16, wide(32)])
def test_after_one_warm_up_nothing_compiles(target, head, budget):
    def run(prompts, params, target, budget, depth=None):
        if budget == 1:
            return generate(target, prompts, params)
        return generate_tree(target, head, prompts, params, budget=budget, width=3, depth=depth)

    run([[1, 1]] * 8, SamplingParams(max_tokens=2), target, budget)
    prompts, params = mixed_requests(50)
    with compilations() as after:
        outputs = run(prompts, params, dataclasses.replace(target, eos_token_ids=(5, 6)), budget)
        if budget > 1:
            # Budgets of the bucket, depths and weights are arrays too.
            run(prompts[:8], params[:8], random_target(CONFIG, 1, tokenizer=target.tokenizer), budget - 5, 4)
    assert len(outputs) == 50
    assert after == []


def test_after_warm_up_the_first_call_compiles_nothing(target, head):
    # A width of its own, so that no other test has compiled what is needed.
    llm = LLM(target, head, budget=16, width=2, max_slots=2)
    with compilations() as before:
        llm.warm_up()
    assert before
    prompts, params = mixed_requests(6)
    with compilations() as after:
        llm.warm_up()
        llm.generate(prompts, params)
        llm.generate(prompts[0], params[1])
        assert "".join(llm.stream(prompts[1], params[5])) == llm.generate(prompts[1], params[5])[0].text
        llm.generate("ab", SamplingParams(temperature=1.0, n=3, max_tokens=5))
    assert after == []
    with pytest.raises(ValueError, match="num_prompts must be at least 1, not 0"):
        llm.warm_up(0)


@pytest.mark.parametrize("budget", [wide(1), 16])
def test_after_a_warm_up_no_number_of_prompts_compiles_anything(target, head, budget):
    """All share an engine, whose programs are those of 1, 4 and 5 live slots."""
    llm = LLM(target, head, budget=budget, width=4, max_slots=5)
    llm.warm_up()
    [engine] = llm.engines.engines()
    prompts, params = mixed_requests(7)
    with compilations() as after:
        alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
        for count in range(2, 8):
            together = llm.generate(prompts[:count], params[:count])
            for one, other, own in zip(together, alone, params, strict=False):
                assert (own.temperature and own.seed is None) or one.token_ids == other.token_ids
    assert after == []
    assert llm.engines.engines() == [engine]
