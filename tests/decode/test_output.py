"""The output of a request, fed by hand: text that streams, characters that span tokens, and its end."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax import RequestOutput, SamplingParams
from jetspec_jax.engine.output import Output
from jetspec_jax.engine.request import Request
from jetspec_jax.sampling.structured import StructuredOutputsParams
from tests.vocabularies import EOS, HIGH, LATE, byte_fallback, byte_level

TOKENIZERS = pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback], ids=lambda make: make.__name__)

# Much text, some broken characters, some tokens of more than a byte, and now and then an end.
tokens_of_text = st.text("ab é€😀\n", max_size=8).map(lambda text: [b + 1 for b in text.encode()])
broken = st.lists(st.integers(1, LATE), max_size=3)
streams = st.lists(st.one_of(tokens_of_text, tokens_of_text, broken), max_size=6).map(
    lambda parts: [*itertools.chain(*parts)]
)


def output_of(params, tokenizer, stop_ids=(EOS,), prompt=(0,), **attributes):
    return Output(Request(np.array(prompt, np.int32), params, frozenset(stop_ids), **attributes), tokenizer)


def feed(output, tokens, chunk, looks=1):
    """Takes rounds; every text that a stream would have shown that looks so often."""
    seen, request = [], output.request
    for start in range(0, len(tokens), chunk):
        if start // chunk % looks == 0:
            output.update()
            seen.append(output.settled_text)
        request.append_round(tokens[start : start + chunk], 16)
        request.publish()
    output.update()
    return [*seen, output.settled_text]


def check_stream(output, seen):
    for text in seen:
        assert output.text.startswith(text)
    assert seen[-1] == output.text


@TOKENIZERS
@settings(max_examples=150)
@given(tokens=streams.filter(len), chunk=st.integers(1, 9))
def test_text_is_the_whole_decoded(tokenizer, tokens, chunk):
    output = output_of(SamplingParams(max_tokens=len(tokens)), tokenizer())
    seen = feed(output, tokens, chunk)
    assert output.finish_reason == "length"
    assert output.token_ids == tokens
    check_stream(output, seen)
    assert output.text == tokenizer().decode(tokens)


@TOKENIZERS
@settings(max_examples=150)
@given(
    tokens=streams,
    more=streams,
    chunk=st.integers(1, 9),
    looks=st.integers(1, 3),
    stop=st.lists(st.text("ab é€\n", min_size=1), max_size=2),
)
def test_ends(tokenizer, tokens, more, chunk, looks, stop):
    """Also where the request goes on after a stop string, of which it knows nothing."""
    tokens = [*tokens, EOS, *more]
    output = output_of(SamplingParams(max_tokens=1000, stop=stop), tokenizer())
    seen = feed(output, tokens, chunk, looks)
    assert output.finish_reason == "stop"
    assert not any(text in output.text for text in stop)
    check_stream(output, seen)
    length = len(output.token_ids)
    assert output.token_ids == tokens[:length]
    completion = output.completion()
    assert len(completion.accept_lengths) == len(completion.tree_sizes) == -(-length // chunk)
    whole = tokenizer().decode(tokens[:length], skip_special_tokens=True)
    if output.token_ids[-1] == EOS:
        assert output.text == whole
    else:
        assert whole.startswith(output.text)
        assert any(whole[len(output.text) :].startswith(text) for text in stop)


def test_nothing_is_added_after_the_end():
    output = output_of(SamplingParams(max_tokens=3), None, ())
    output.request.append_round([5], 8)
    output.request.append_round([6, 7, 8, 9], 16)
    output.request.append_round([1], 16)
    output.request.publish()
    output.update()
    completion = output.completion()
    assert completion.token_ids == [5, 6, 7]
    assert completion.accept_lengths == [1, 4]
    assert completion.tree_sizes == [8, 16]
    assert completion.text is None


def test_a_tail_that_may_become_a_stop_string_is_held_back():
    output = output_of(SamplingParams(stop=("abc", "b\n\n")), byte_level())

    def take(*tokens):
        output.request.append_round(tokens, 1)
        output.request.publish()
        output.update()
        return output.settled_text

    shown = [take(byte + 1) for byte in b"xab\nabx"]
    assert shown == ["x", "x", "x", "xa", "xab\n", "xab\n", "xab\nabx"]
    assert take(*(byte + 1 for byte in b"ab")) == "xab\nabx"
    assert take(EOS) == "xab\nabxab"


class Sliced(str):
    __slots__ = ()
    slices = 0

    def __getitem__(self, key):
        Sliced.slices += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("stop", ["a" * 999 + "b", "b" + "a" * 999, "c" + "a" * 998 + "b"])
def test_a_long_stop_string_is_not_tried_in_all_its_lengths(stop):
    output = output_of(SamplingParams(stop=[Sliced(stop)], max_tokens=1000), byte_level())
    Sliced.slices = 0
    for letter in b"a" * 60 + b"ca" * 30:
        output.request.append_round([letter + 1], 1)
        output.request.publish()
        output.update()
        assert output.text.startswith(output.settled_text)
    assert len(output.text) == 120
    assert Sliced.slices <= 3 * 120


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("tokenizer", "tokens", "stop", "text"),
    [
        # A token ends the stop string and begins another character.
        (byte_level, [ord("a") + 1, HIGH, LATE], "b", "a"),
        (byte_level, [ord("a") + 1, HIGH, LATE], "ab", ""),
        # A line break is a byte, and held back: a byte behind it may turn both into replacement characters.
        (byte_fallback, [ord("a") + 1, 0x0A + 1, 0xC3 + 1], "\n", "a"),
        (byte_fallback, [257, 0x0A + 1, 0x0A + 1, 258], "\n\n", " the"),
        (byte_fallback, [257, 0xC3 + 1, 0xA9 + 1, 0xC3 + 1], "eé", " th"),
        (byte_fallback, [*(0xC3 + 1, 0xA9 + 1) * 3, ord("a") + 1], ["éé", "é\n"], ""),
    ],
)
def test_stop_strings_are_found_where_characters_are_incomplete(tokenizer, tokens, stop, text, keeps):
    params = SamplingParams(max_tokens=9, stop=stop, include_stop_str_in_output=keeps)
    output = output_of(params, tokenizer())
    check_stream(output, feed(output, tokens, 1))
    kept = stop if isinstance(stop, str) else stop[0]
    assert (output.finish_reason, output.text) == ("stop", text + kept * keeps)
    # It ends with the token that completes the stop string.
    shorter = tokenizer().decode(output.token_ids[:-1])
    assert kept in tokenizer().decode(output.token_ids)
    assert kept not in shorter


def test_a_stop_string_is_found_in_replacement_characters():
    output = output_of(SamplingParams(max_tokens=9, stop="\N{REPLACEMENT CHARACTER} the"), byte_fallback())
    check_stream(output, feed(output, [257, 0x0A + 1, 0xC3 + 1, 257], 1))
    assert (output.finish_reason, output.text) == ("stop", " the\N{REPLACEMENT CHARACTER}")


@TOKENIZERS
def test_what_is_held_back_is_text_at_an_early_end(tokenizer):
    output = output_of(SamplingParams(max_tokens=99, stop="aab"), tokenizer())
    tokens = [ord("a") + 1, ord("a") + 1, 0xC3 + 1]
    assert feed(output, tokens, 1)[-1] == ""
    output.end("abort")
    assert (output.settled_text, output.finish_reason) == (tokenizer().decode(tokens), "abort")


THE, EQUALS, X = 257, 262, 265  # "▁the", "▁=" and "x" of `byte_fallback`
GRAMMAR = StructuredOutputsParams(regex=" the.*")


@pytest.mark.parametrize(
    ("prompt", "continues", "params", "text"),
    [
        ([X], True, {}, " the the"),
        ([EOS, X, EOS], True, {}, " the the"),
        ([X], True, {"stop": " the t"}, ""),
        ([X], True, {"stop": "the t"}, " "),
        ([EOS], True, {}, "the the"),
        ([EOS], True, {"skip_special_tokens": False}, " the the"),
        # An answer to a chat.
        ([X], False, {}, "the the"),
        ([X], False, {"stop": " the t"}, "the the"),
        # The first space is one that the grammar asks for.
        ([X], False, {"structured_outputs": GRAMMAR}, " the the"),
        ([EOS], True, {"structured_outputs": GRAMMAR}, " the the"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2])
def test_the_first_space(prompt, continues, params, text, chunk):
    params = SamplingParams(max_tokens=2, **params)
    output = output_of(params, byte_fallback(strip=True), prompt=prompt, continues=continues)
    check_stream(output, feed(output, [THE, THE], chunk))
    assert output.text == text


@pytest.mark.parametrize(
    ("prompt", "continues", "tokens", "texts", "beginning"),
    [
        ([X], True, [THE, THE], [" the", " the"], ()),
        ([X], False, [THE, THE], ["the", " the"], (0,)),
        ([EOS], True, [EOS, THE, THE], ["<eos>", "the", " the"], (0, 1)),
        ([X], False, [0x0A + 1, THE], ["\n", " the"], (0,)),
    ],
)
@pytest.mark.parametrize("start", [0, 1])
def test_log_probabilities_have_the_texts_of_the_tokens(prompt, continues, tokens, texts, beginning, start):
    params = SamplingParams(max_tokens=9, logprobs=1)
    output = output_of(params, byte_fallback(strip=True), (), prompt, continues=continues)
    rows = [[-1.0], [2], [[EQUALS]], [[-0.5]]]
    output.request.append_round(tokens, 16, [row * len(tokens) for row in rows])
    output.request.publish()
    output.update()
    rows = output.logprobs(start)
    told = [row[token].decoded_token for token, row in zip(tokens[start:], rows, strict=True)]
    assert told == texts[start:]
    # Also of the token that was likelier.
    likelier = [row[EQUALS].decoded_token for row in rows]
    assert likelier == [(" =", "=")[place in beginning] for place in range(start, len(tokens))]


def text_of(letters, stop_ids=(), **params):
    """The text of byte-level tokens; the special one is a zero byte here."""
    tokens = [EOS if byte == 0 else byte + 1 for byte in letters.encode()]
    output = output_of(SamplingParams(max_tokens=len(tokens), **params), byte_level(), stop_ids)
    check_stream(output, feed(output, tokens, 2))
    return output.text


def test_the_stop_string_is_kept_if_asked_for():
    for stop, cut, kept in (("cd", "ab", "abcd"), (["de", "bc"], "a", "abc"), (["bcd", "bc"], "a", "abc")):
        assert text_of("abcdef", stop=stop) == cut
        assert text_of("abcdef", stop=stop, include_stop_str_in_output=True) == kept
    # Also the text of a token that stops.
    stops = {ord("d") + 1}
    assert text_of("abcd", stops) == "abc"
    assert text_of("abcd", stops, include_stop_str_in_output=True) == "abcd"


def test_special_tokens_are_kept_if_asked_for():
    assert text_of("a\0b\0") == "ab"
    assert text_of("a\0b\0", skip_special_tokens=False) == "a<eos>b<eos>"
    assert text_of("a\0", (EOS,), skip_special_tokens=False) == "a"
    kept = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert text_of("a\0", (EOS,), **kept) == "a<eos>"
    assert text_of("a\0", (EOS,), include_stop_str_in_output=True) == "a"


@pytest.mark.parametrize(
    ("letters", "params", "reason"),
    [
        ("abcd", {"stop": "cd"}, "cd"),
        ("abcd", {"stop": ["d", "cd"]}, "cd"),  # both end there, and the longer one begins first
        ("abcd", {"stop": "ab", "stop_token_ids": [ord("c") + 1]}, "ab"),
        ("abcd", {"stop": "bc", "stop_token_ids": [ord("c") + 1]}, ord("c") + 1),  # its text is left out
        ("abcd", {"stop": "d", "stop_token_ids": [ord("b") + 1]}, ord("b") + 1),
        ("ab\0", {"stop_token_ids": [ord("c") + 1]}, None),  # the end of the sequence
        ("ab\0", {"stop_token_ids": [EOS]}, EOS),
        ("abcd", {}, None),  # its length
        ("abcd", {"stop_token_ids": [ord("d") + 1]}, ord("d") + 1),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3])
def test_what_ended_it(letters, params, reason, chunk):
    tokens = [EOS if byte == 0 else byte + 1 for byte in letters.encode()]
    params = SamplingParams(max_tokens=len(tokens), **params)
    output = output_of(params, byte_level(), (EOS, *params.stop_token_ids))
    feed(output, tokens, chunk)
    completion = output.completion()
    assert completion.stop_reason == reason
    assert completion.finish_reason == (
        "length" if letters == "abcd" and not params.stop + params.stop_token_ids else "stop"
    )


def test_what_an_aborted_one_ended_with():
    output = output_of(SamplingParams(stop="b", stop_token_ids=[9]), byte_level())
    feed(output, [ord("a") + 1], 1)
    output.end("abort")
    assert output.completion().stop_reason is None


def test_a_completion_is_read_as_vllm_s_result():
    request = Request(np.array([3], np.int32), SamplingParams(max_tokens=1), request_id="mine")
    output = Output(request, byte_level())
    feed(output, [ord("a") + 1], 1)
    result = RequestOutput([output.completion()])
    [own] = result.outputs
    assert (result.request_id, result.finished, result.prompt_token_ids) == ("mine", True, [3])
    assert (own.index, own.text, own.token_ids, own.finish_reason) == (0, "a", [ord("a") + 1], "length")
    assert (own.stop_reason, own.logprobs, own.cumulative_logprob) == (None, None, None)


def test_a_completion_holds_its_prompt():
    request = Request(np.array([3, 4], np.int32), SamplingParams(max_tokens=1), text="of a text", index=2)
    output = Output(request, None)
    request.append_round([7, 8], 16)
    output.update()
    assert output.finish_reason is None  # who hands tokens out has not done yet
    request.publish()
    output.update()
    completion = output.completion()
    assert (completion.prompt, completion.prompt_token_ids, completion.index) == ("of a text", [3, 4], 2)
    assert repr(completion) == (
        "Completion(index=2, text=None, 1 tokens, finish_reason='length', 1 rounds, 2.00 tokens a round)"
    )


@pytest.mark.parametrize(
    ("stop", "minimum", "ends"),
    [
        ("b", 0, 2),
        ("b", 1, 2),
        ("b", 2, 5),  # the first one ends within the minimum
        ("cab", 3, 5),  # begins before it, and ends after
        ("ca", 4, None),
        ("b", 5, None),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3])
def test_no_stop_string_ends_within_the_minimum(stop, minimum, ends, chunk):
    tokens = [b + 1 for b in b"abcabc"]
    output = output_of(SamplingParams(max_tokens=6, min_tokens=minimum, stop=stop), byte_level())
    check_stream(output, feed(output, tokens, chunk))
    text = "abcabc"
    assert len(output.token_ids) == (6 if ends is None else ends)
    assert output.text == (text if ends is None else text[: ends - len(stop)])
    assert output.finish_reason == ("length" if ends is None else "stop")
