"""Texts of a tokenizer whose decoder removes a space at the beginning of a text, in every way to get them."""

import asyncio
import dataclasses
import io
import json
import re
import sys

import pytest

from jetspec_jax import AsyncLLM, SamplingParams
from jetspec_jax.cli import chatting, generating
from jetspec_jax.cli import command as cli
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.tiny import flat, random_head, random_target
from tests.loading.test_gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, tokenizer_of
from tests.marks import wide
from tests.serve.conftest import SMALL, TREE
from tests.serve.servers import Kept, served
from tests.serve.test_broken_text import joined, streamed

PIECES = ["▁▁▁▁", "▁▁", "▁the", "▁=", "▁1", "▁t", "he", "▁", "t", "h", "e", "=", "1"]
BOS, EOS = 1, 2
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
FOUR, THE, EQUALS, ONE, C3, A9 = map(TOKENS.index, ("▁▁▁▁", "▁the", "▁=", "▁1", "<0xC3>", "<0xA9>"))
#: Most of the possible tokens begin with a space, and two make a character.
ASKED = {"max_tokens": 6, "temperature": 1.0, "seed": 1, "n": 4, "ignore_eos": True}
ASKED["allowed_token_ids"] = [FOUR, THE, EQUALS, ONE, C3, A9]
#: Texts, and the tokens of texts: also of the empty one, which is the token before all texts.
PROMPTS = ["the", "the\n", "", [THE], [THE, EOS], [BOS], [BOS, THE, C3]]
EMPTY = ("", [BOS])
BROKEN = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def tokenizer():
    """Of a GGUF file: Llama 2's decoder."""
    made = tokenizer_of(
        {
            "ggml.model": "llama",
            "ggml.tokens": TOKENS,
            "ggml.scores": [0.0] * 259 + [-float(place) for place in range(len(PIECES))],
            "ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES),
            "ggml.bos_token_id": BOS,
            "ggml.eos_token_id": EOS,
            "ggml.unknown_token_id": 0,
            "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
        }
    )
    assert made.encode("the") == [BOS, THE]
    assert made.decode([BOS, THE, EQUALS, ONE], skip_special_tokens=True) == "the = 1"
    assert made.decode([EQUALS, ONE]) == "= 1"
    return made


@pytest.fixture(scope="module")
def server(tokenizer):
    config = dataclasses.replace(SMALL, vocab_size=len(TOKENS))
    target = random_target(config, 0, tokenizer=tokenizer, eos=(EOS,))
    llm = Kept(target, random_head(config, 0), max_slots=4, **TREE)
    with served(llm) as own:
        yield own
    asyncio.run(AsyncLLM.close(llm))


@pytest.fixture(scope="module")
def http(server):
    with server.client() as own:
        yield own


@pytest.fixture(scope="module")
def llm(server):
    return server.llm.llm


@pytest.fixture(scope="module")
def added(tokenizer):
    """What tokens add to the text of a prompt, without the first byte of a character at its end."""

    def added(prompt, tokens):
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = ids[:-1] if TOKENS[ids[-1]] == "<0x0A>" else ids  # else broken bytes after it would break it
        before = tokenizer.decode(ids, skip_special_tokens=True).removesuffix(BROKEN)
        whole = tokenizer.decode([*ids, *tokens], skip_special_tokens=True)
        assert whole.startswith(before)
        return whole[len(before) :]

    return added


def complete(http, path="/v1/completions", **body):
    response = http.post(path, json={**ASKED, "return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


@pytest.fixture(scope="module")
def answers(http):
    """Completions of each prompt, which have all kinds of first tokens."""
    made = [complete(http, prompt=prompt, logprobs=2) for prompt in PROMPTS]
    assert {choice["token_ids"][0] for choices in made for choice in choices} >= {FOUR, THE, A9}
    return made


def test_a_completion_continues_its_prompt(http, answers, added):
    for prompt, choices in zip(PROMPTS, answers, strict=True):
        for choice in choices:
            assert choice["text"] == added(prompt, choice["token_ids"])
            spaced = choice["token_ids"][0] in (FOUR, THE, EQUALS, ONE)
            assert choice["text"].startswith(" ") == (spaced and prompt not in (*EMPTY, [BOS, THE, C3]))
    together = complete(http, prompt=[prompt for prompt in PROMPTS if isinstance(prompt, list)])
    assert [choice["text"] for choice in together] == [
        choice["text"]
        for prompt, choices in zip(PROMPTS, answers, strict=True)
        if isinstance(prompt, list)
        for choice in choices
    ]


def test_four_spaces_after_a_line_break(http):
    [choice] = complete(http, prompt="the\n", allowed_token_ids=[FOUR], max_tokens=1, n=1)
    assert choice["text"] == "    "


def test_plain_decoding_and_streams_have_the_same_texts(http, answers):
    for prompt, choices in zip(PROMPTS, answers, strict=True):
        assert [choice["text"] for choice in complete(http, prompt=prompt, budget=1)] == [
            choice["text"] for choice in choices
        ]
        parts = streamed(http, "/v1/completions", {**ASKED, "prompt": prompt, "logprobs": 2})
        for number, choice in enumerate(choices):
            assert "".join(part["text"] for part in parts[number]) == choice["text"]
            assert all(joined(parts[number], name) == told for name, told in choice["logprobs"].items())


def test_log_probabilities_agree_with_the_text(answers, added):
    for prompt, choices in zip(PROMPTS, answers, strict=True):
        for choice in choices:
            told, text = choice["logprobs"], choice["text"]
            for count, offset in enumerate(told["text_offset"]):
                before = added(prompt, choice["token_ids"][:count])
                if BROKEN not in before:
                    assert offset == len(before)
            if BROKEN not in text and prompt != [BOS, THE, C3] and "é" not in text:
                assert "".join(told["tokens"]) == text


def test_an_echo_is_one_text_with_the_completion(http, answers, tokenizer):
    for prompt, choices in zip(PROMPTS, answers, strict=True):
        echoed = complete(http, prompt=prompt, echo=True, logprobs=2)
        for choice, alone in zip(echoed, choices, strict=True):
            if isinstance(prompt, str):
                assert choice["text"] == prompt + alone["text"]
            elif prompt != [BOS]:
                # Special tokens are echoed if the prompt is given as tokens.
                assert choice["text"] == tokenizer.decode([*prompt, *alone["token_ids"]])
            begin = len(choice["text"]) - len(alone["text"])
            offsets = choice["logprobs"]["text_offset"][-ASKED["max_tokens"] :]
            assert offsets == [begin + offset for offset in alone["logprobs"]["text_offset"]]
        [choice] = complete(http, prompt=prompt, echo=True, max_tokens=0, n=1)
        assert choice["text"] == (prompt if isinstance(prompt, str) else tokenizer.decode(prompt))


def test_stop_strings_begin_with_a_space_where_the_text_does(http):
    body = {"allowed_token_ids": [THE], "stop": [" the the the"], "n": 1}
    for prompt, ends, text in (("the", 3, ""), ([BOS, THE], 3, ""), ("", 4, "the")):
        [choice] = complete(http, prompt=prompt, **body)
        assert (len(choice["token_ids"]), choice["text"]) == (ends, text)
    [choice] = complete(http, "/v1/chat/completions", messages=chat(), **body)
    assert (len(choice["token_ids"]), choice["message"]["content"]) == (4, "the")


def chat(*contents):
    messages = [{"role": "user", "content": "the ="}]
    return messages + [{"role": "assistant", "content": content} for content in contents]


def test_an_answer_to_a_chat_begins_a_text(http, tokenizer):
    body = {"messages": chat(), "logprobs": True, "top_logprobs": 2, "allowed_token_ids": [THE, EQUALS, ONE]}
    choices = complete(http, "/v1/chat/completions", **body)
    parts = streamed(http, "/v1/chat/completions", {**ASKED, **body})
    for number, choice in enumerate(choices):
        content, rows = choice["message"]["content"], choice["logprobs"]["content"]
        assert content == tokenizer.decode(choice["token_ids"])
        assert "".join(part["delta"].get("content") or "" for part in parts[number]) == content
        assert joined(parts[number], "content") == rows
        assert "".join(row["token"] for row in rows) == content
        assert b"".join(bytes(row["bytes"]) for row in rows).decode() == content


def test_a_continued_message_is_continued(http, tokenizer, added):
    body = {"messages": chat("the"), "add_generation_prompt": False, "continue_final_message": True}
    choices = complete(http, "/v1/chat/completions", **body)
    ids = tokenizer.encode("the =the", add_special_tokens=False)
    texts = [choice["message"]["content"] for choice in choices]
    assert texts == [added(ids, choice["token_ids"]) for choice in choices]
    assert any(text.startswith(" ") for text in texts)
    parts = streamed(http, "/v1/chat/completions", {**ASKED, **body})
    for number, text in enumerate(texts):
        assert "".join(part["delta"].get("content") or "" for part in parts[number]) == text


@pytest.mark.parametrize("regex", [" the( =| 1)*", wide("the( =| 1)*"), wide(" ?= 1")])
def test_a_text_is_one_of_its_grammar(http, regex):
    body = {"structured_outputs": {"regex": regex}, "ignore_eos": False, "allowed_token_ids": None}
    for prompt in ("the", "", [BOS]):
        for choice in complete(http, prompt=prompt, **body):
            assert re.match(regex, choice["text"])
    for choice in complete(http, "/v1/chat/completions", messages=chat(), **body):
        assert re.match(regex, choice["message"]["content"])


@pytest.mark.wide
def test_in_a_program(llm, answers, tokenizer, added):
    params = SamplingParams(**ASKED)
    made = flat(llm.generate(PROMPTS, params, use_tqdm=False))
    texts = [choice["text"] for choices in answers for choice in choices]
    assert [own.text for own in made] == texts
    for prompt, choices in zip(PROMPTS, answers, strict=True):
        first = next(iter(params.each()))
        assert "".join(llm.stream(prompt, first)) == choices[0]["text"]
    trace = trace_rounds(llm.target, llm.draft_head, "the", first, llm.settings)
    pieces = [trace.text for _ in trace]
    assert (pieces[-1], trace.completion.text) == (texts[0],) * 2
    for own in flat(llm.chat(chat(), params, use_tqdm=False)):
        assert own.text == tokenizer.decode(own.token_ids)
    for own in flat(llm.chat(chat("the"), params, use_tqdm=False, continue_final_message=True)):
        assert own.text == added(own.prompt_token_ids, own.token_ids)


def test_the_commands(llm, capsys, monkeypatch):
    monkeypatch.setattr(generating, "load_llm", lambda *_: llm)
    monkeypatch.setattr(chatting, "load_llm", lambda *_: llm)
    options = ["--max-tokens", "3", "--temperature", "1", "--allowed-token-ids", str(THE)]

    def printed(command, *words):
        assert cli.main([command, *options, *words]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    assert printed("generate", "the") == " the the the"
    assert printed("generate", "--chat", "the =") == "the the the"
    assert json.loads(printed("generate", "--json", "--chat", "the ="))["text"] == "the the the"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the =\n")))
    assert printed("chat") == "the the the"
