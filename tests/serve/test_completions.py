"""Completions as the `openai` client gets them: the same tokens as without a server."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jetspec_jax import Completion, SamplingParams, logits
from jetspec_jax.engine.output import Logprob
from jetspec_jax.engine.prompts import EncodedPrompt
from jetspec_jax.serve.completions import CompletionRequest, CompletionWriter
from jetspec_jax.serve.service import GenerationRequest
from jetspec_jax.serve.settings import ServeSettings
from tests.decode.tiny import flat
from tests.vocabularies import EOS, byte_level

PROMPT = "def read_lines(path):"
MODEL = "demo"


def expected(alone, prompt=PROMPT, **params):
    return flat(alone.generate(prompt, SamplingParams(**params), use_tqdm=False))


def test_a_text_is_what_plain_decoding_gives(client, alone):
    [whole] = expected(alone, max_tokens=24)
    got = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    assert got.object == "text_completion"
    assert got.id.startswith("cmpl-")
    assert got.model == MODEL
    [choice] = got.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (whole.text, whole.finish_reason, None)
    assert got.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert got.usage.completion_tokens == 24
    assert got.usage.total_tokens == 24 + len(whole.prompt_token_ids)
    assert got.metrics["speculative_decoding"] is None
    assert got.metrics["time_to_first_token"] > 0


def test_a_stream_is_the_text_in_pieces(client, alone, short_dispatches):
    [whole] = expected(alone, max_tokens=60, temperature=0.8, seed=3)
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=60,
            temperature=0.8,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.text
    assert len(pieces) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == [whole.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(whole.token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_chunk_has_the_usage_so_far(http, path):
    """As GuideLLM asks for it."""

    def chunks(**options):
        prompt = (
            {"prompt": [PROMPT, "class"]}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": PROMPT}]}
        )
        params = {"max_tokens": 12, "n": 2, "ignore_eos": True, "return_token_ids": True}
        body = {**prompt, **params, "stream": True, "stream_options": options}
        lines = http.post(path, json=body).text.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    *made, last = chunks(include_usage=True, continuous_usage_stats=True)
    tokens = 0
    for chunk in made:
        tokens += sum(len(choice.get("token_ids", [])) for choice in chunk["choices"])
        prompt = last["usage"]["prompt_tokens"]
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        assert chunk["usage"] == counts
    assert last["choices"] == []
    assert last["usage"].items() > counts.items()
    assert tokens == (48 if path == "/v1/completions" else 24)
    assert not any("usage" in chunk for chunk in chunks(include_usage=False, continuous_usage_stats=True))


def test_sixteen_tokens_and_a_temperature_of_one_unless_said(client, alone):
    [whole] = expected(alone, max_tokens=16, temperature=1.0, seed=5)
    assert client.completions.create(model=MODEL, prompt=PROMPT, seed=5).choices[0].text == whole.text


def test_several_prompts_with_several_completions_each(client, alone):
    prompts = [PROMPT, "class Stack:"]
    params = {"max_tokens": 10, "temperature": 1.0, "seed": 2, "n": 2}
    wholes = expected(alone, prompts, **params)
    got = client.completions.create(model=MODEL, prompt=prompts, **params)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in got.choices] == [whole.text for whole in wholes]
    counts = [len(whole.prompt_token_ids) for whole in wholes[::2]]
    assert got.usage.prompt_tokens == sum(counts)
    texts = [""] * 4
    for chunk in client.completions.create(model=MODEL, prompt=prompts, stream=True, **params):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [whole.text for whole in wholes]


def test_token_ids_are_prompts_too(client, alone):
    ids = alone.encode(PROMPT)
    [whole] = expected(alone, max_tokens=8)
    for prompt in (ids, [ids]):
        got = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            echo=True,
            extra_body={"return_token_ids": True},
        )
        assert got.choices[0].text == PROMPT + whole.text
        assert got.choices[0].token_ids == whole.token_ids
        assert got.choices[0].prompt_token_ids == ids
    # In a stream they come with the first piece of each choice.
    given = {"max_tokens": 8, "stream": True, "n": 2, "extra_body": {"return_token_ids": True}}
    told: dict[int, list] = {0: [], 1: [], 2: [], 3: []}
    for chunk in client.completions.create(model=MODEL, prompt=[ids, ids[:1]], **given):
        told[chunk.choices[0].index].append(getattr(chunk.choices[0], "prompt_token_ids", None))
    for choice, prompt in ((0, ids), (1, ids), (2, ids[:1]), (3, ids[:1])):
        assert told[choice] == [prompt] + [None] * (len(told[choice]) - 1)


def test_a_prompt_of_before_is_cached(client):
    prompt = "def f(x):\n    return x\n" * 12
    params = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    first = client.completions.create(**params)
    again = client.completions.create(**params)
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
    assert again.choices[0].text == first.choices[0].text


@pytest.mark.wide
def test_every_sampling_parameter_arrives(client, alone):
    extra = {
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 4,
        "ignore_eos": True,
        "bad_words": ["return"],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    given = {
        "max_tokens": 20,
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "stop": [")"],
    }
    [whole] = expected(alone, **given, **extra, logit_bias={5: -2.0})
    got = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        **given,
        logit_bias={"5": -2.0},
        user="somebody",
        extra_body=extra
        | {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "c"},
    )
    assert (got.choices[0].text, got.choices[0].finish_reason) == (whole.text, whole.finish_reason)


def test_log_probabilities(client, alone):
    [whole] = expected(alone, max_tokens=6, logprobs=2)
    got = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    told = got.choices[0].logprobs
    rows = [row[token] for token, row in zip(whole.token_ids, whole.logprobs, strict=True)]
    whole_tokens = [row.decoded_token for row in rows if "\N{REPLACEMENT CHARACTER}" not in row.decoded_token]
    assert [token for token in told.tokens if not token.startswith("bytes:")] == whole_tokens
    assert told.token_logprobs == pytest.approx([row.logprob for row in rows], abs=1e-4)
    assert [len(row) for row in told.top_logprobs] == [2] * 6
    texts = alone.target.tokenizer
    assert told.text_offset == [len(texts.decode(whole.token_ids[:count])) for count in range(6)]


def test_log_probabilities_of_tokens_within_characters(http):
    """Joined, the bytes are those of the text; no token's name hides another's."""
    text = "日本 🙂"
    asked = {"temperature": 0, "max_tokens": 40, "structured_outputs": {"choice": [text]}}
    body = {**asked, "prompt": PROMPT, "logprobs": 5}
    told = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert told["tokens"][:2] == [r"bytes:\xe6", r"bytes:\x97"]
    assert told["text_offset"] == [0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 4]
    assert {len(row) for row in told["top_logprobs"]} <= {5, 6}
    messages = [{"role": "user", "content": "say"}]
    body = {**asked, "messages": messages, "logprobs": True, "top_logprobs": 1}
    *rows, end = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for row in rows for byte in row["bytes"]) == text.encode()
    assert bytes(end["bytes"]).decode() == end["token"] == "<|endoftext|>"


def test_log_likelihoods_as_a_harness_asks_for_them(client, alone):
    """A context and what follows it, as one prompt: what the model itself would write, or something else."""
    context = alone.encode(PROMPT)
    [greedy] = expected(alone, max_tokens=6, ignore_eos=True)
    prompts = [[*context, *greedy.token_ids], [*context, *range(100, 106)]]
    params = {"temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    for most in (1, 0):
        got = client.completions.create(model=MODEL, prompt=prompts, max_tokens=most, **params)
        assert got.usage.completion_tokens == most * len(prompts)
        assert got.usage.prompt_tokens == sum(map(len, prompts))
        for prompt, choice in zip(prompts, got.choices, strict=True):
            rows = np.asarray(logits(alone.target, [prompt]), np.float64)[0, :-1]
            rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
            told, count = choice.logprobs, len(prompt)
            assert choice.finish_reason == "length"
            assert choice.text.startswith(alone.target.tokenizer.decode(prompt))
            assert {len(own) for own in told.to_dict().values()} == {count + most}
            assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
            assert told.token_logprobs[1:count] == pytest.approx(rows[range(count - 1), prompt[1:]], abs=1e-4)
            best = [max(own.values()) for own in told.top_logprobs[1:count]]
            assert best == pytest.approx(rows.max(-1), abs=1e-4)
            # As harnesses find out whether a continuation is the model's own.
            follows = slice(len(context), count)
            is_greedy = told.token_logprobs[follows] == best[len(context) - 1 :]
            assert is_greedy == (prompt is prompts[0])
    assert choice.text == alone.target.tokenizer.decode(prompt)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("given", ["text", "ids"])
def test_where_tokens_of_an_echoed_prompt_begin(given):
    """A text lacks the token that its tokenizer puts before it, and token ids are all text."""
    tokenizer = byte_level()
    ids, text = [EOS, *(byte + 1 for byte in "aé".encode())], "aé" if given == "text" else None
    told = [None, *({token: Logprob(-1.0, 1)} for token in ids[1:])]
    service = SimpleNamespace(
        llm=SimpleNamespace(llm=SimpleNamespace(target=SimpleNamespace(tokenizer=tokenizer))),
        settings=ServeSettings(),
    )
    body = CompletionRequest(prompt="", echo=True, logprobs=0)
    generation = GenerationRequest(
        [EncodedPrompt(np.array(ids, np.int32), text)], SamplingParams(), (), "prompt"
    )
    writer = CompletionWriter("a", MODEL, body, generation, service)
    after = [ord("b") + 1, ord("c") + 1]
    rows = [{token: Logprob(-2.0, 1)} for token in after]
    own = Completion("bc", after, "length", [2], [2], ids, text, logprobs=rows, prompt_logprobs=told)
    [choice] = writer.whole([own])["choices"]
    shift = len("<eos>") if given == "ids" else 0
    assert choice["text"] == "<eos>" * bool(shift) + "aébc"
    assert choice["logprobs"]["text_offset"] == [0, *(shift + place for place in (0, 1, 1, 2, 3))]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -1.0, -2.0, -2.0]


def test_a_stream_of_the_prompt_alone(client):
    params = {"max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, **params)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 0
    assert last.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_what_ended_an_answer(client, http, alone):
    [whole] = expected(alone, max_tokens=12, ignore_eos=True)
    end = whole.token_ids[5]
    for extra, reason in (
        ({"stop_token_ids": [end]}, end),
        ({"stop": whole.text[8:12]}, whole.text[8:12]),
        ({}, None),
    ):
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **extra}
        [choice] = http.post("/v1/completions", json=body).json()["choices"]
        assert choice["stop_reason"] == reason
        chunks = client.completions.create(model=MODEL, stream=True, extra_body=body, prompt="")
        told = [chunk.choices[0].stop_reason for chunk in chunks]
        assert told == [None] * (len(told) - 1) + [reason]


def test_a_name_for_a_request_comes_back(http):
    body = {"prompt": PROMPT, "max_tokens": 1}
    got = http.post("/v1/completions", json=body, headers={"X-Request-Id": "my-name:7"})
    assert got.headers["X-Request-Id"] == "my-name:7"
    assert got.json()["id"] == "cmpl-my-name:7"
    got = http.post("/v1/completions", json=body, headers={"X-Request-Id": "no name" * 40})
    assert len(got.headers["X-Request-Id"]) == 32
