"""Tags of calls and of reasoning are found whether or not the tokenizer declares them as special."""

import dataclasses
import json

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models

from jetspec_jax import Delta
from jetspec_jax.engine.output import Output
from jetspec_jax.serve.errors import ApiError
from jetspec_jax.serve.parsers import REASONING, special_tokens
from jetspec_jax.serve.playground.traces import Traces
from tests.decode.tiny import random_target
from tests.serve.conftest import SMALL
from tests.serve.servers import Kept, served

OTHER = "<|other|>"
CALL = ["<tool_call>", '{"name": "look", "arguments": {"x": 1}}', "</tool_call>"]
TAGGED = [
    *("<tool_call>", "\n", "<function=", "look>\n", "<parameter=", "x>\n1\n", "</parameter>", "\n"),
    *("</function>", "\n", "</tool_call>"),
]
THOUGHT = ["<think>", "it is so", "</think>"]
GEMMA_THOUGHT = ["<|channel>", "thought\n", "it is so", "<channel|>"]
MESSAGES = [
    *("<|channel|>", "analysis", "<|message|>", "it is so", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>", "commentary to=functions.look ", "<|constrain|>", "json", "<|message|>", '{"x": 1}'),
]
TAGS = sorted({word for word in (*CALL, *TAGGED, *THOUGHT, *GEMMA_THOUGHT, *MESSAGES) if word[0] == "<"})
WORDS = list(
    dict.fromkeys(["</s>", OTHER, "ask", "an answer", *CALL, *TAGGED, *THOUGHT, *GEMMA_THOUGHT, *MESSAGES])
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {}}}},
    }
]
ASKED = {"messages": [{"role": "user", "content": "ask"}]}
LOOK = [("look", {"x": 1})]


def words_tokenizer(*, special):
    """A tokenizer whose tokens are `WORDS`; all tags are special, or none of them is."""
    backend = tokenizers.Tokenizer(
        models.BPE({word: token for token, word in enumerate(WORDS)}, [], ignore_merges=True)
    )
    backend.decoder = decoders.Fuse()
    words = ["</s>", OTHER, *(TAGS if special else ())]
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    made.chat_template = "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


class Spoken(Kept):
    """Says words as the engine says tokens, one in each round."""

    def __init__(self, target):
        super().__init__(target, max_slots=1)
        self.words = []

    async def generate(self, checked, **settings):
        [request] = checked.requests(self.llm.settings, self._engines.plan.decoder)
        output, sent = Output(request, self.llm.target.tokenizer), 0
        for word in (*self.words, "</s>"):
            request.append_round([WORDS.index(word)], 1)
            request.publish()
            rounds = output.update_by_round(len(request.tokens))
            text = output.settled_text[sent:]
            sent += len(text)
            reason = output.finish_reason
            whole = None if reason is None else output.completion()
            yield Delta(text, [WORDS.index(word)], finish_reason=reason, completion=whole, rounds=rounds)


@pytest.fixture(scope="module", params=[False, True], ids=["plain tags", "special tags"])
def spoken(request):
    config = dataclasses.replace(SMALL, vocab_size=len(WORDS))
    return Spoken(random_target(config, 0, tokenizer=words_tokenizer(special=request.param), eos=(0,)))


def answers(spoken, words, *, reasoning=None, calls=None, **more):
    """What a whole answer and a stream say: content, reasoning, calls, and why it ended."""
    spoken.words = words
    body, made = ASKED | more, []
    with served(spoken, reasoning_parser=reasoning, tool_call_parser=calls) as own, own.client() as http:
        [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
        with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    pieces = [choice for line in lines for choice in json.loads(line)["choices"]]
    for parts, reason in (
        ([choice["message"]], choice["finish_reason"]),
        ([piece["delta"] for piece in pieces], pieces[-1]["finish_reason"]),
    ):
        called = [call["function"] for part in parts for call in part.get("tool_calls") or []]
        texts = ["".join(part.get(name) or "" for part in parts) for name in ("content", "reasoning_content")]
        made.append((*texts, [(call["name"], json.loads(call["arguments"])) for call in called], reason))
    assert made[0] == made[1]
    return made[0]


@pytest.mark.parametrize(
    ("calls", "reasoning", "words", "thought"),
    [
        ("hermes", None, CALL, ""),
        ("qwen3_coder", None, TAGGED, ""),
        ("qwen3_xml", "deepseek_r1", [*THOUGHT, *TAGGED], "it is so"),
        ("hermes", "qwen3", [*THOUGHT, *CALL], "it is so"),
        ("openai", "openai_gptoss", MESSAGES, "it is so"),
    ],
)
def test_calls(spoken, calls, reasoning, words, thought):
    given = {"calls": calls, "reasoning": reasoning, "tools": TOOLS}
    expected = ("", thought, LOOK, "tool_calls")
    assert answers(spoken, words, **given) == expected
    assert answers(spoken, [*words, OTHER], **given) == expected, "other special tokens are skipped"
    assert answers(spoken, words, **given, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("reasoning", "words"),
    [
        *((reasoning, THOUGHT) for reasoning in ("qwen3", "deepseek_r1", "step3")),
        ("gemma4", GEMMA_THOUGHT),
        ("openai_gptoss", [*MESSAGES[:7], "<|channel|>", "<|message|>"]),
    ],
)
def test_thoughts(spoken, reasoning, words):
    expected = ("an answer", "it is so", [], "stop")
    assert answers(spoken, [*words, OTHER, "an answer"], reasoning=reasoning) == expected
    shown = answers(spoken, [*words, OTHER, "an answer"], reasoning=reasoning, skip_special_tokens=False)
    assert shown == (f"{OTHER}an answer", *expected[1:])


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_a_parser_special_tags_are_skipped(spoken, more):
    special = bool(special_tokens(spoken.llm.target.tokenizer, TAGS))
    expected = "".join(word for word in CALL if not (special and word in TAGS))
    assert answers(spoken, CALL, calls="hermes", reasoning="qwen3", **more) == (expected, "", [], "stop")


def test_tokens_of_tags():
    tokenizer = words_tokenizer(special=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>\n"]})
    assert len(special_tokens(tokenizer, ["<think>"])) == 2
    assert special_tokens(None, TAGS) == frozenset()


def test_the_playground_shows_the_tags_of_thoughts(spoken, monkeypatch):
    prompts = []

    def begin(self, prompt, *rest):
        prompts.append(prompt)
        raise ApiError(429, "")

    monkeypatch.setattr(Traces, "begin", begin)
    with served(spoken, reasoning_parser="qwen3") as own, own.client() as http:
        assert http.post("/playground/rounds", json=ASKED).status_code == 429
    tokenizer = spoken.llm.target.tokenizer
    assert prompts[0].kept_special_tokens == special_tokens(tokenizer, REASONING["qwen3"].tags)
