"""Prompts in all their forms, and what is none: nothing runs here."""

import re

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.arguments import shown
from jetspec_jax.engine.admission import check_request
from jetspec_jax.engine.prompts import EncodedPrompt, encode_text, read_prompt, read_prompts
from tests.decode.tiny import TINY, random_target, with_windows, word_tokenizer

pytestmark = pytest.mark.usefixtures("no_type_checks")
CONFIG = with_windows(TINY, None)
LIMIT = CONFIG.max_position_embeddings


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 0, tokenizer=word_tokenizer(CONFIG.vocab_size))


@pytest.fixture(scope="module")
def wordless():
    return random_target(CONFIG, 0)


AB, IDS = ([0, 1], "ab"), ([5, 6], None)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", [AB]),
        ({"prompt": "ab"}, [AB]),
        ([5, 6], [IDS]),
        ((5, 6), [IDS]),
        (range(5, 7), [IDS]),
        ([np.int64(5), np.uint8(6)], [IDS]),
        (np.array([5, 6]), [IDS]),
        ({"prompt_token_ids": [5, 6]}, [IDS]),
        ({"prompt_token_ids": np.array([5, 6], np.uint16)}, [IDS]),
        (["ab"], [AB]),
        ([[5, 6]], [IDS]),
        (np.array([[5, 6], [5, 6]]), [IDS, IDS]),
        ((prompt for prompt in ("ab", [5, 6])), [AB, IDS]),
        (
            ["ab", [5, 6], {"prompt": "ab"}, {"prompt_token_ids": (5, 6)}, np.array([5, 6])],
            [AB, IDS] * 2 + [IDS],
        ),
        ([], []),
        ((), []),
    ],
    # An iterator has an address in its name.
    ids=lambda value: shown(value).partition(" at 0x")[0],
)
def test_forms(target, prompts, expected):
    read = read_prompts(target, prompts)
    assert [(one.ids.tolist(), one.text) for one in read] == expected
    assert all(one.ids.dtype == np.int32 for one in read)


def test_what_was_read_is_not_read_again(target):
    prompt = EncodedPrompt(np.array([1], np.int32), "a text of its own")
    assert read_prompt(target, prompt) is prompt
    assert read_prompts(target, prompt) == [prompt] == read_prompts(target, [prompt])


FORMS = re.escape('a text, a list of token ids, {"prompt": a text} or {"prompt_token_ids": token ids}')


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (None, TypeError, f"^prompts must be {FORMS}, or a list of these, not None"),
        (5, TypeError, "^prompts must be .* not 5"),
        (1.5, TypeError, "^prompts must be .* not 1.5"),
        ({5, 6}, TypeError, r"^prompts must be .* not \{5, 6\}"),
        (np.array(5), TypeError, "^prompts must be"),
        (b"ab", TypeError, f"^a prompt must be {FORMS}, not b'ab'"),
        ([None], TypeError, "^a prompt must be .* not None"),
        (["ab", None], TypeError, r"^prompts\[1\]: a prompt must be .* not None"),
        ([5, [6]], TypeError, r"at position 1 it has \[6\], no integer"),
        ([5, None], TypeError, "at position 1 it has None, no integer"),
        ([5, "6"], TypeError, "at position 1 it has '6', no integer"),
        ([5.0, 6.0], TypeError, "at position 0 it has 5.0, no integer"),
        ([True], TypeError, "at position 0 it has True, no integer"),
        ([["5"]], TypeError, "at position 0 it has '5', no integer"),
        ([[[5, 6]]], TypeError, r"at position 0 it has \[5, 6\], no integer"),
        ([[5], [[6]]], TypeError, r"^prompts\[1\]: .*at position 0 it has \[6\]"),
        (np.array([5.0]), TypeError, r"float64 of shape \[1\]"),
        (np.array([True]), TypeError, r"bool of shape \[1\]"),
        (np.zeros((1, 1, 1), int), TypeError, r"int64 of shape \[1, 1\]"),
        (np.array(["a"]), TypeError, r"of shape \[1\]"),
        ("", ValueError, "^the prompt is empty"),
        ([[]], ValueError, "^the prompt is empty"),
        ([[5], []], ValueError, r"^prompts\[1\]: the prompt is empty"),
        (np.zeros(0), ValueError, "^the prompt is empty"),
        ({"prompt": ""}, ValueError, "^the prompt is empty"),
        ({"prompt_token_ids": []}, ValueError, "^the prompt is empty"),
        ([64], ValueError, r"^token id 64 in prompt lies outside the vocabulary 0\.\.63"),
        ([-1], ValueError, "^token id -1 in prompt"),
        ([10**5000], ValueError, "^token id <integer of 16610 bits> in prompt"),
        (np.array([2**63], np.uint64), ValueError, "^token id 9223372036854775808 in prompt"),
        ({}, ValueError, 'either "prompt" or "prompt_token_ids", not neither'),
        ({"prompt": "ab", "prompt_token_ids": [5]}, ValueError, "not both"),
        ({"prompt": "ab", "multi_modal_data": {}}, ValueError, r"unknown: \['multi_modal_data'\]"),
        ({"text": "ab"}, ValueError, r"unknown: \['text'\]"),
        ({1: "ab"}, ValueError, r"unknown: \[1\]"),
        ([{"prompt": "ab"}, {"input_ids": [5]}], ValueError, r"^prompts\[1\]: .*unknown: \['input_ids'\]"),
        ({"prompt": None}, TypeError, '"prompt" of a prompt must be a text, not None'),
        ({"prompt": [5]}, TypeError, r'"prompt" of a prompt must be a text, not \[5\]'),
        ({"prompt_token_ids": "ab"}, TypeError, '"prompt_token_ids" of a prompt must be a list'),
        ({"prompt_token_ids": None}, TypeError, "must be .* not None"),
        ({"prompt_token_ids": {"prompt": "ab"}}, TypeError, '"prompt_token_ids" of a prompt must be a list'),
        ("a\ud800b", ValueError, r"^the prompt is no valid Unicode: .* U\+D800, at position 1"),
        (
            ["a", {"prompt": "\udfff"}],
            ValueError,
            r"^prompts\[1\]: the prompt is no valid Unicode: .*U\+DFFF",
        ),
    ],
    ids=shown,
)
def test_what_is_no_prompt(target, prompts, error, message):
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        read_prompts(target, prompts)
    assert type(raised.value) is error
    assert len(str(raised.value)) < 300


def test_a_text_needs_a_tokenizer(wordless):
    for prompts in ("ab", {"prompt": "ab"}, [[5], "ab"]):
        with pytest.raises(ValueError, match="no tokenizer; pass token ids"):
            read_prompts(wordless, prompts)
    with pytest.raises(ValueError, match="no tokenizer"):
        encode_text(wordless, "ab")


def test_no_end_is_the_context_s(target):
    def most(prompt, capacity=None, **params):
        return check_request(target, prompt, SamplingParams(**params), capacity=capacity).params.max_tokens

    assert most([5] * 3, max_tokens=None) == LIMIT - 3
    assert most([5] * 3, max_tokens=7) == 7
    assert most([5] * 3, max_tokens=None, capacity=32) == 29
    for length in (LIMIT, LIMIT + 100):
        for tokens in (1, None):
            with pytest.raises(
                ValueError,
                match=f"the prompt is too long: {length} tokens, .* maximum context length is {LIMIT} ",
            ):
                most([5] * length, max_tokens=tokens)
    with pytest.raises(ValueError, match=f"max_tokens could be at most {LIMIT - 3} "):
        most([5] * 3, max_tokens=10**100)


@pytest.mark.parametrize("params", [{"temperature": 1.0}, 1, "greedy", SamplingParams], ids=str)
def test_what_are_no_params(target, params):
    with pytest.raises(TypeError, match=r"^sampling_params must be SamplingParams, not "):
        check_request(target, [5], params)
