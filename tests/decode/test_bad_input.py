"""Requests and settings that cannot be served: one clear error each, before any work is done."""

import contextlib
import dataclasses
import math

import jax
import pytest

from jetspec_jax import LLM, Head, SamplingParams, draft_logits, generate, generate_tree
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.admission import check_request, encode_bad_words
from jetspec_jax.engine.plan import plan_engine
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.tiny import (
    TINY,
    TinyEngine,
    finish,
    free_pages,
    head_config,
    letters_tokenizer,
    random_head,
    random_target,
    serve,
    with_windows,
    word_tokenizer,
)

CONFIG = with_windows(TINY, None)
LIMIT = CONFIG.max_position_embeddings
GOOD = [1, 2, 3]
SHORT = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 0)


@pytest.fixture(scope="module")
def head():
    return random_head(CONFIG, 0)


REQUESTS = pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, 64], {}, r"token id 64 in prompt .*0\.\.63"),
        (
            [1],
            {"max_tokens": LIMIT},
            f"1 prompt tokens and max_tokens={LIMIT} need {LIMIT + 1}; .* at most {LIMIT - 1} ",
        ),
        (
            [1] * LIMIT,
            {"max_tokens": 1},
            f"the prompt is too long: {LIMIT} tokens, and .* maximum context length is {LIMIT} ",
        ),
        ([1], {"stop": ("end",)}, "stop strings need a tokenizer"),
        ([1], {"stop_token_ids": (64,)}, r"token id 64 in stop_token_ids .*0\.\.63"),
        ([1], {"logit_bias": {64: 1.0}}, r"token id 64 in logit_bias .*0\.\.63"),
        ([1], {"bad_words": ("a",)}, "bad_words need a tokenizer"),
        (
            [1],
            {"allowed_token_ids": (5, 6), "stop_token_ids": (5, 6, 7), "min_tokens": 1},
            "no token could be chosen before min_tokens=1: all allowed tokens end the output",
        ),
        (
            [1] * (LIMIT - 4),
            {"max_tokens": None, "min_tokens": 5},
            f"{LIMIT - 4} prompt tokens and min_tokens=5 need {LIMIT + 1}; min_tokens could be at most 4 ",
        ),
    ],
    ids=lambda value: str(value)[:30],
)


@REQUESTS
@pytest.mark.usefixtures("nothing_runs")
def test_requests(target, head, prompt, params, message):
    # The bad request comes last: those before it must not have begun.
    prompts = [GOOD, GOOD, prompt]
    sampling = [SHORT, SHORT, dataclasses.replace(SHORT, **params)]
    with pytest.raises(ValueError, match=message):
        generate(target, prompts, sampling)
    with pytest.raises(ValueError, match=message):
        generate_tree(target, head, prompts, sampling, budget=16)
    with pytest.raises(ValueError, match=message):
        trace_rounds(target, head, prompts[-1], sampling[-1], TreeSettings(budget=16))


@pytest.mark.usefixtures("nothing_runs")
def test_requests_of_an_llm(target, head):
    with_tokenizer = dataclasses.replace(target, tokenizer=word_tokenizer(CONFIG.vocab_size))
    llm = LLM(with_tokenizer, head, budget=16)
    for call in (lambda: llm.generate([GOOD, [64]], SHORT), lambda: llm.stream([64], SHORT)):
        with pytest.raises(ValueError, match="token id 64"):
            call()
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompt"):
        llm.generate([GOOD], [SHORT] * 2)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "ab"}])

    without = LLM(target, head, budget=16)
    for call in (without.generate, without.stream):
        with pytest.raises(ValueError, match="no tokenizer"):
            call("ab", SHORT)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        without.generate([GOOD], SamplingParams(stop="x", max_tokens=4))


@pytest.mark.parametrize(
    ("words", "allowed", "message"),
    [
        (["a", "b"], (0, 1), "no token could be chosen: bad_words forbid all allowed tokens"),
        ([" "], None, "a bad word must have 1 to 16 tokens, and ' ' has 0"),
        (["x" * 65], None, "a bad word must have 1 to 16 tokens, and .* has 65"),
        ([f"{i:b}".replace("1", "a").replace("0", "b") for i in range(1, 1026)], None, "at most 128"),
    ],
    ids=["all", "none", "long", "many"],
)
@pytest.mark.usefixtures("nothing_runs")
def test_bad_words(target, words, allowed, message):
    with_tokenizer = dataclasses.replace(target, tokenizer=letters_tokenizer())
    params = dataclasses.replace(SHORT, bad_words=words, allowed_token_ids=allowed)
    with pytest.raises(ValueError, match=message):
        generate(with_tokenizer, [GOOD, GOOD], [SHORT, params])


def test_bad_words_with_and_without_a_space(target):
    """A word's own spaces do not count, and a form that is another's counts once."""
    with_tokenizer = dataclasses.replace(target, tokenizer=letters_tokenizer())
    assert encode_bad_words(with_tokenizer, ["ab", " ab", "c"]) == ((0, 1), (26, 0, 1), (2,), (26, 2))
    without = dataclasses.replace(target, tokenizer=word_tokenizer(CONFIG.vocab_size))
    assert encode_bad_words(without, ["ab"])[0] == (0, 1)
    assert encode_bad_words(target, ()) == ()


@pytest.mark.parametrize("words", [["a"] * 5000, ["a" * (1 + i % 50) + "b" * (i // 50) for i in range(2500)]])
def test_no_more_bad_words_are_encoded_than_there_may_be(target, words, monkeypatch):
    tokenizer, count = letters_tokenizer(), 0
    encode = tokenizer.encode

    def counted(*args, **settings):
        nonlocal count
        count += 1
        return encode(*args, **settings)

    monkeypatch.setattr(tokenizer, "encode", counted)
    with contextlib.suppress(ValueError):
        encode_bad_words(dataclasses.replace(target, tokenizer=tokenizer), words)
    assert 0 < count <= 1026


def test_words_that_leave_no_token_later(target):
    """Allowed tokens and bad words that only together, and only after some tokens, forbid all."""
    with_tokenizer = dataclasses.replace(target, tokenizer=letters_tokenizer())
    params = SamplingParams(max_tokens=8, allowed_token_ids=(0,), bad_words=("aaa",))
    with pytest.raises(ValueError, match="no token is left to choose: allowed_token_ids, bad_words"):
        generate(with_tokenizer, [GOOD], params)
    [good] = generate(with_tokenizer, [GOOD], dataclasses.replace(params, max_tokens=2))
    assert good.token_ids == [0, 0]


@pytest.mark.usefixtures("nothing_runs")
def test_a_slot_of_less_than_the_context(target):
    params, message = SamplingParams(max_tokens=62), "maximum context length is 64 tokens, but .* need "
    check_request(target, GOOD, params, capacity=65)
    with pytest.raises(ValueError, match=message):
        check_request(target, GOOD, params, capacity=64)
    with pytest.raises(ValueError, match=message):
        LLM(target, capacity=64).generate([GOOD], params)
    for capacity in (0, LIMIT + 1):
        with pytest.raises(ValueError, match=rf"capacity must lie in 1\.\.{LIMIT}"):
            LLM(target, capacity=capacity)


@pytest.mark.usefixtures("nothing_runs")
def test_as_many_params_as_prompts(target, head):
    with pytest.raises(ValueError, match="3 sampling_params for 2 prompts"):
        generate(target, [GOOD, GOOD], [SHORT] * 3)
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        generate_tree(target, head, [GOOD, GOOD], [SHORT])
    with pytest.raises(ValueError, match="max_slots must be at least 1"):
        generate(target, [GOOD], SHORT, max_slots=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0}, r"budget .*1\.\.256.* 0"),
        ({"candidates": 0}, r"candidates .*1\.\.64.* 0"),
        ({"width": 5, "candidates": 4}, "width must be at most candidates, 4, not 5"),
        ({"algorithm": "greedy"}, "unknown tree algorithm 'greedy'.*accum_logp"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("nothing_runs")
def test_tree_settings(target, head, settings, message):
    with pytest.raises(ValueError, match=message):
        generate_tree(target, head, [GOOD], SHORT, **settings)
    # Even where there is nothing to do.
    with pytest.raises(ValueError, match=message):
        generate_tree(target, head, [], **settings)
    with pytest.raises(ValueError, match=message):
        LLM(target, head, **settings)
    with pytest.raises(ValueError, match=message):
        plan_engine(target.config, head.config, TreeSettings(**settings), target.dtype)


@pytest.mark.usefixtures("nothing_runs")
def test_a_head_that_does_not_fit(target):
    config = dataclasses.replace(head_config(CONFIG), num_target_layers=3)
    head = Head(config, {})  # it must be refused before its parameters are looked at
    message = "made for 3 target layers, the target has 1"
    with pytest.raises(ValueError, match=message):
        generate_tree(target, head, [GOOD], SHORT)
    with pytest.raises(ValueError, match=message):
        LLM(target, head)
    with pytest.raises(ValueError, match=message):
        draft_logits(target, head, [GOOD])


def test_an_engine_goes_on_after_an_error(target):
    engine = TinyEngine(target)
    good = engine.submit(GOOD, SamplingParams(max_tokens=30))
    engine.step(2)
    for prompt in ([], [64], [1] * LIMIT):
        with pytest.raises(ValueError, match=r"empty|token id|too long"):
            engine.submit(prompt, SHORT)
    finish(engine)
    assert free_pages(engine.scheduler) == engine.plan.size.num_pages
    assert len(good.tokens) == 30
    [again] = serve(engine, [GOOD], [SamplingParams(max_tokens=30)])
    assert again.token_ids == good.tokens


def test_a_head_that_is_not_finite(target, head):
    """It is refused when it is taken; where it is allowed, tokens are the target's."""
    weights = jax.tree.map(lambda array: array, head.weights)
    weights["layers"][0]["mlp"]["down_proj"] = weights["layers"][0]["mlp"]["down_proj"].at[0, 0].set(math.inf)
    weights["fc"] = weights["fc"].at[1].set(math.nan)
    broken = Head(head.config, weights)
    for take in (
        lambda: LLM(target, broken),
        lambda: generate_tree(target, broken, [GOOD], SHORT),
        lambda: trace_rounds(target, broken, GOOD, SHORT),
    ):
        with pytest.raises(ValueError, match=r"2 parameters .*\(fc, layers\.0\.mlp\.down_proj\).*allow"):
            take()
    expected = generate(target, [GOOD], SHORT)[0].token_ids
    allowed = dataclasses.replace(broken, allow_nonfinite=True)
    assert generate_tree(target, allowed, [GOOD], SHORT, budget=16)[0].token_ids == expected
    with LLM(target, broken, budget=16, allow_nonfinite=True) as llm:
        assert llm.generate([GOOD], SHORT, use_tqdm=False)[0].token_ids == expected
