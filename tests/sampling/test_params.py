"""Sampling parameters: their forms, and what is refused by name."""

import dataclasses
import math

import numpy as np
import pytest

from jetspec_jax import SamplingParams, StructuredOutputsParams
from jetspec_jax.arguments import shown
from jetspec_jax.sampling.params import COLDEST, HOTTEST
from jetspec_jax.sampling.slots import Sampling

pytestmark = pytest.mark.usefixtures("no_type_checks")


def test_one_form_of_each_setting():
    plain = SamplingParams()
    for top_k in (None, 0, -1, np.int32(-1)):
        assert SamplingParams(top_k=top_k) == plain
    for stop in (None, (), []):
        assert SamplingParams(stop=stop, stop_token_ids=stop) == plain
    given = SamplingParams(
        temperature=np.float32(0.5), seed=np.uint64(2**64 - 1), stop="ab", stop_token_ids=[np.int64(3)]
    )
    assert given == SamplingParams(temperature=0.5, seed=2**64 - 1, stop=["ab"], stop_token_ids=(3,))
    assert (type(given.temperature), type(given.seed)) == (float, int)
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(temperature=1).temperature == 1.0
    assert hash(given)
    for none in (None, {}, ()):
        assert SamplingParams(logit_bias=none, bad_words=none or None) == plain
    biased = SamplingParams(
        logit_bias={np.int64(7): 2, 3: np.float32(-1)}, bad_words=["a"], allowed_token_ids=[3]
    )
    assert biased.logit_bias == ((3, -1.0), (7, 2.0))
    assert dataclasses.replace(biased, n=2) == dataclasses.replace(biased, n=2)
    assert hash(biased)


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": -0.1},
        {"frequency_penalty": 2},
        {"repetition_penalty": 0.9},
        {"min_tokens": 1},
        {"logit_bias": {0: 0}},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [0]},
    ],
    ids=str,
)
def test_what_changes_logits(settings):
    assert SamplingParams(**settings).adjusts
    others = {"temperature": 1.0, "top_k": 3, "stop": "a", "logprobs": 0, "prompt_logprobs": 20}
    assert not SamplingParams(**others).adjusts


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
NUMBERS = ("temperature", "top_p", "min_p", *PENALTIES)
INTEGERS = ("top_k", "seed", "max_tokens", "n", "min_tokens", "logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
NO_NUMBERS = ("1", [1], {}, True, 1j, b"1")
WRONG_TYPES = [
    *((name, value) for name in NUMBERS for value in NO_NUMBERS),
    *((name, value) for name in INTEGERS for value in (*NO_NUMBERS, 1.0, math.nan)),
    *((name, value) for name in FLAGS for value in (0, 1, None, "yes", [])),
    *((name, None) for name in ("temperature", "n", "min_tokens", *PENALTIES)),
    *(("stop", value) for value in (1, b"a", {"a": 1}, {"a"}, [1], [None], [["a"]], np.array(["a"]))),
    *(("stop_token_ids", value) for value in (1, "1", b"1", {1}, [1.0], ["1"], [True], [None], [[1]])),
    *(("bad_words", value) for value in (1, "a", b"a", {"a": 1}, {"a"}, [1], [None], [["a"]])),
    *(("allowed_token_ids", value) for value in (1, "1", b"1", {1}, [1.0], ["1"], [True], [None])),
    *(
        ("logit_bias", value)
        for value in (1, "1", {1}, [1], [(1, 2.0)], ((1,),), {"1": 1.0}, {1: "1"}, {1: None})
    ),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=str)
def test_wrong_types(name, value):
    with pytest.raises(TypeError, match=rf"{name}\b.* must be .*, not ") as raised:
        SamplingParams(**{name: value})
    assert len(str(raised.value)) < 200


HUGE = 10**5000
OUTSIDE = [
    *(("temperature", value, "0 or lie in .*1e-30, 1e.30") for value in (1e300, 1e31, 1e-31, -1, HUGE)),
    *((name, value, name) for name in NUMBERS for value in (math.nan, math.inf, -math.inf, -HUGE)),
    *(("top_p", value, r"\(0, 1\]") for value in (0, -0.0, 1.0001, HUGE)),
    *(("min_p", value, r"\[0, 1\]") for value in (-1e-9, 1.0001, HUGE)),
    *(("top_k", value, "at least -1") for value in (-2, -HUGE)),
    *(
        ("seed", value, r"-9223372036854775808\.\.18446744073709551615")
        for value in (-(2**63) - 1, 2**64, -HUGE)
    ),
    *(("max_tokens", value, "at least 1") for value in (0, -1, -HUGE)),
    *(("n", value, r"1\.\.16384") for value in (0, -1, 16385, HUGE)),
    *(("stop", value, "not empty") for value in ("", ["a", ""])),
    *(("stop", value, r"no valid Unicode: .*U\+DC80") for value in ("\udc80", ["a", "b\udc80"])),
    *(
        (name, value, "at least 0")
        for name in ("stop_token_ids", "allowed_token_ids")
        for value in ([-1], [3, -HUGE])
    ),
    *((name, value, r"\[-2, 2\]") for name in PENALTIES[:2] for value in (2.1, -2.1, HUGE)),
    *(("repetition_penalty", value, r"lie in \[1e-30, 1e.30\]") for value in (0, -1, 1e31)),
    *(("min_tokens", value, "at least 0") for value in (-1, -HUGE)),
    ("min_tokens", 257, "at most max_tokens, 256, not 257"),
    *((name, value, r"0\.\.20") for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, HUGE)),
    ("allowed_token_ids", [], "is empty, so that no token could be chosen"),
    ("logit_bias", ((5, 1), (5, 2)), "has token 5 twice"),
    ("bad_words", ["a", ""], "not empty"),
    ("bad_words", ["\udc80"], r"no valid Unicode: .*U\+DC80"),
    ("logit_bias", {-1: 0.5}, "at least 0"),
    *(
        ("logit_bias", {3: value}, r"bias of token 3 .*\[-100, 100\]")
        for value in (101, -100.5, math.nan, math.inf)
    ),
]


@pytest.mark.parametrize(("name", "value", "message"), OUTSIDE, ids=shown)
def test_values_outside(name, value, message):
    with pytest.raises(ValueError, match=name) as raised:
        SamplingParams(**{name: value})
    assert raised.match(message)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("temperature", [0, COLDEST, 1e-8, 0.7, 100, HOTTEST])
@pytest.mark.filterwarnings("error")
def test_temperatures_that_float32_has(temperature):
    assert (Sampling.of(SamplingParams(temperature=temperature)).temperature > 0) == (temperature > 0)


@pytest.mark.parametrize("unknown", ["temprature", "best_of", "presence", "logprob"])
def test_unknown_keywords(unknown):
    with pytest.raises(TypeError, match=unknown):
        SamplingParams(**{unknown: 1})


class TestEach:
    def test_one_is_itself(self):
        for seed in (None, 5):
            params = SamplingParams(temperature=1.0, seed=seed)
            assert params.each() == [params]

    def test_the_first_keeps_the_seed_and_others_fold_it(self):
        params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=9)
        each = params.each()
        assert each[0] == dataclasses.replace(params, n=1)
        assert len({own.seed for own in each}) == 4
        assert each == params.each()
        # A prefix of more, and another seed's are others.
        assert dataclasses.replace(params, n=6).each()[:4] == each
        others = dataclasses.replace(params, seed=6).each()
        assert not {own.seed for own in others} & {own.seed for own in each}
        assert {dataclasses.replace(own, seed=5, n=4) for own in each} == {params}

    def test_without_a_seed_one_is_drawn_once(self, monkeypatch):
        drawn = iter([7])
        monkeypatch.setattr("jetspec_jax.sampling.params.draw_seed", lambda: next(drawn))
        assert SamplingParams(n=3).each() == SamplingParams(n=3, seed=7).each()


def test_a_clone_is_equal_and_another():
    form = StructuredOutputsParams(json={"type": "object", "properties": {"a": {}}})
    params = SamplingParams(
        seed=-3,
        n=2,
        stop=["a"],
        logit_bias={3: 1.5},
        bad_words=["b"],
        structured_outputs=form,
        max_tokens=None,
    )
    assert params.clone() == params
    assert params.clone() is not params
    assert hash(params.clone()) == hash(params)
