"""Text that is no valid UTF-8, of a vocabulary with byte fallback, in every way of getting text."""

import asyncio
import dataclasses
import json
from collections import defaultdict

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models

from jetspec_jax import SamplingParams
from tests.decode.tiny import flat, random_target
from tests.serve.conftest import SMALL
from tests.serve.servers import Kept, served

#: Half of the tokens are bytes, so that most texts of a random target are broken. Two are one text.
WORDS = {
    "<eos>": b"<eos>",
    "<0x0A>": b"\n",
    "<0xC3>": b"\xc3",
    "<0xA9>": b"\xa9",
    "<0xE6>": b"\xe6",
    "<0x61>": b"a",
    "a": b"a",
    "▁the": b" the",
    "é": "é".encode(),
}
BYTES = list(WORDS.values())
#: As OpenAI's completions name them.
NAMES = ["<eos>", "\n", r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xe6", "a", "a", " the", "é"]
A = 6
PROMPTS = [[A], [A, 7], [8]]
ASKED = {"max_tokens": 24, "temperature": 1.0, "seed": 3, "n": 2}
PARAMS = SamplingParams(**ASKED, logprobs=5)


def byte_fallback():
    """Llama 2's kind, with few tokens."""
    vocab = {word: token for token, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return made


@pytest.fixture(scope="module")
def server():
    config = dataclasses.replace(SMALL, vocab_size=len(WORDS))
    llm = Kept(random_target(config, 0, tokenizer=byte_fallback()), max_slots=8)
    with served(llm) as own:
        yield own
    asyncio.run(super(Kept, llm).close())


@pytest.fixture(scope="module")
def http(server):
    with server.client() as own:
        yield own


@pytest.fixture(scope="module")
def answers(http):
    """Completions of all prompts in one call: what each other way must give."""
    body = {**ASKED, "prompt": PROMPTS, "logprobs": 5, "return_token_ids": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    broken = ["\N{REPLACEMENT CHARACTER}" in choice["text"] for choice in choices]
    assert any(broken)
    return choices


@pytest.fixture(scope="module")
def texts(answers):
    return [choice["text"] for choice in answers]


def streamed(http, path, body):
    parts = defaultdict(list)
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[len("data: ") :])["choices"]:
                    parts[choice["index"]].append(choice)
    return parts


def joined(parts, name):
    return [one for part in parts if part["logprobs"] for one in part["logprobs"][name]]


def added(number, tokens):
    """What tokens add to the text of a choice's prompt."""
    prompt = PROMPTS[number // ASKED["n"]]
    before, whole = (
        byte_fallback().decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + tokens)
    )
    return whole.removeprefix(before)


def test_texts_are_the_tokens_decoded(answers):
    for number, choice in enumerate(answers):
        assert choice["text"] == added(number, choice["token_ids"])


def test_what_is_told_of_tokens(answers):
    seconds = set()
    for number, choice in enumerate(answers):
        told, tokens = choice["logprobs"], choice["token_ids"]
        assert told["tokens"] == [NAMES[token] for token in tokens]
        for row in told["top_logprobs"]:
            assert len(row) in (5, 6)
            seconds |= set(row) - set(NAMES)
        for count, offset in enumerate(told["text_offset"]):
            before = added(number, tokens[:count])
            if "\N{REPLACEMENT CHARACTER}" not in before:
                assert offset == len(before)
    assert seconds
    assert seconds <= {f"token_id:{A - 1}", f"token_id:{A}"}


def test_chats(http, answers):
    texts = [byte_fallback().decode(choice["token_ids"], skip_special_tokens=True) for choice in answers[:2]]
    body = {**ASKED, "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    parts = streamed(http, "/v1/chat/completions", body)
    assert [choice["message"]["content"] for choice in choices] == texts
    for number, whole in enumerate(choices):
        assert "".join(part["delta"].get("content") or "" for part in parts[number]) == texts[number]
        rows = whole["logprobs"]["content"]
        assert joined(parts[number], "content") == rows
        assert [bytes(row["bytes"]) for row in rows] == [
            BYTES[token] for token in answers[number]["token_ids"]
        ]


def test_calls_and_streams(server, texts):
    llm = server.llm.llm
    made = flat(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert [own.text for own in made] == texts
    for row in made[0].logprobs:
        assert all(own.decoded_token == BYTES[token].decode(errors="replace") for token, own in row.items())
    assert ["".join(llm.stream(PROMPTS[0], params)) for params in PARAMS.each()] == texts[:2]
