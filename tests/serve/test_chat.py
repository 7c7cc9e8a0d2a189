"""Chats as the `openai` client has them: texts, tools, reasoning."""

import json
import logging

import httpx
import jsonschema
import openai
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.serve.logs import LOG
from tests.serve.conftest import small_target
from tests.serve.scripted import Scripted
from tests.serve.servers import served

MODEL = "demo"
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "def f(x):"}]
#: Writes all that a template may get, so that tests see it in the prompt.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ reasoning_effort }}{{ verbosity }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.x }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% if think %}<think>\n{% endif %}{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/Number"}},
                "required": ["x"],
                "additionalProperties": False,
                "$defs": {"Number": {"enum": [1, 2]}},
            },
        },
    }
]

LOOK = [("look", {"x": 1})]
CUT_CALL = "<function=look>\n<parameter=x>\n1\n</parameter>\n"


@pytest.fixture(scope="module")
def scripted():
    return Scripted(small_target(TEMPLATE))


@pytest.fixture(scope="module")
def tooled(scripted):
    with (
        served(scripted, tool_call_parser="hermes", reasoning_parser="qwen3") as own,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def streamed(client, **given):
    made = {"content": "", "reasoning_content": "", "tool_calls": [], "reason": None, "chunks": 0}
    for chunk in client.chat.completions.create(model=MODEL, stream=True, **given):
        [choice] = chunk.choices
        made["chunks"] += 1
        made["content"] += choice.delta.content or ""
        made["reasoning_content"] += getattr(choice.delta, "reasoning_content", "")
        for call in choice.delta.tool_calls or []:
            assert call.index == len(made["tool_calls"])
            made["tool_calls"].append((call.function.name, json.loads(call.function.arguments)))
        made["reason"] = choice.finish_reason or made["reason"]
    return made


def test_an_answer_is_what_plain_decoding_gives(client, alone, short_dispatches):
    [whole] = alone.chat(MESSAGES, SamplingParams(max_tokens=20, temperature=1.0, seed=4), use_tqdm=False)
    given = {"messages": MESSAGES, "max_completion_tokens": 20, "seed": 4}
    got = client.chat.completions.create(model=MODEL, **given)
    [choice] = got.choices
    assert (choice.message.role, choice.message.content) == ("assistant", whole.text)
    assert choice.finish_reason == whole.finish_reason
    assert choice.message.tool_calls is None
    assert got.usage.prompt_tokens == len(whole.prompt_token_ids)
    made = streamed(client, **given)
    assert (made["content"], made["reason"]) == (whole.text, whole.finish_reason)
    assert made["chunks"] >= 3
    pieces = client.chat.completions.create(
        model=MODEL, stream=True, extra_body={"return_token_ids": True}, **given
    )
    told = [getattr(piece, "prompt_token_ids", None) for piece in pieces]
    assert told == [whole.prompt_token_ids] + [None] * (len(told) - 1)
    # What came back may be sent again, and parts are texts.
    again = [
        *MESSAGES,
        choice.message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    assert (
        client.chat.completions.create(model=MODEL, messages=again, max_tokens=1).usage.completion_tokens == 1
    )


def test_log_probabilities(client, alone):
    params = SamplingParams(max_tokens=5, logprobs=2)
    [whole] = alone.chat(MESSAGES, params, use_tqdm=False)
    given = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True}
    got = client.chat.completions.create(model=MODEL, top_logprobs=2, **given)
    told = got.choices[0].logprobs.content
    rows = [row[token] for token, row in zip(whole.token_ids, whole.logprobs, strict=True)]
    assert [own.token for own in told] == [row.decoded_token for row in rows]
    assert [own.logprob for own in told] == pytest.approx([row.logprob for row in rows], abs=1e-4)
    assert [len(own.top_logprobs) for own in told] == [2] * 5
    assert told[0].top_logprobs[0].token == told[0].token
    chunks = client.chat.completions.create(model=MODEL, stream=True, **given)
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    tokens = [own.token for piece in pieces if piece is not None for own in piece.content]
    assert tokens == [own.token for own in told]


def test_a_function_that_must_be_called(llm):
    """The real engine follows the schema; a chat template that writes tools is all that it needs."""
    target = llm.llm.target
    before, target.tokenizer.chat_template = target.tokenizer.chat_template, TEMPLATE
    try:
        with (
            served(llm) as own,
            openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client,
        ):
            given = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 60, "seed": 1}
            for choice in ({"type": "function", "function": {"name": "look"}}, "required"):
                got = client.chat.completions.create(model=MODEL, tool_choice=choice, **given)
                for call in (calls := got.choices[0].message.tool_calls):
                    assert call.function.name == "look"
                    assert json.loads(call.function.arguments)["x"] in (1, 2)
                    assert call.id.startswith("call_")
                assert got.choices[0].finish_reason == "tool_calls"
                made = streamed(client, tool_choice=choice, **given)
                assert made["tool_calls"] == [
                    (call.function.name, json.loads(call.function.arguments)) for call in calls
                ]
            got = client.chat.completions.create(
                model=MODEL, tool_choice="required", parallel_tool_calls=False, **given
            )
            assert len(got.choices[0].message.tool_calls) == 1
            assert got.choices[0].finish_reason == "tool_calls"
    finally:
        target.tokenizer.chat_template = before


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}, SCHEMA),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "text"}, None),
    ],
)
def test_the_form_of_a_response(client, alone, form, schema):
    # Random weights would write spaces for ever, and objects without an end.
    tokens = [alone.target.tokenizer.decode([token]) for token in range(4096)]
    bias = {token: -100 for token, text in enumerate(tokens) if text.isspace()} | {tokens.index("}"): 50}
    params = {"max_tokens": 60, "seed": 1, "n": 2, "logit_bias": bias if schema else {}}
    given = {"messages": MESSAGES, "response_format": form, **params}
    got = client.chat.completions.create(model=MODEL, **given)
    assert [choice.index for choice in got.choices] == [0, 1]
    texts, reasons = ["", ""], ["", ""]
    *chunks, last = client.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **given
    )
    for chunk in chunks:
        [choice] = chunk.choices
        assert chunk.usage is None
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in got.choices]
    assert reasons == [choice.finish_reason for choice in got.choices]
    assert last.choices == []
    assert last.usage.completion_tokens == got.usage.completion_tokens
    assert last.usage.prompt_tokens == got.usage.prompt_tokens
    if schema is None:
        [whole] = alone.chat(MESSAGES, SamplingParams(temperature=1.0, **params), use_tqdm=False)
        assert texts == [each.text for each in whole.outputs]
    else:
        assert reasons == ["stop", "stop"]
        for text in texts:
            jsonschema.validate(json.loads(text), schema)


def test_calls_are_found_in_the_text(tooled, scripted):
    scripted.text = (
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {"x": 2}}\n</tool_call>'
    )
    given = {"messages": MESSAGES, "tools": TOOLS}
    got = tooled.chat.completions.create(model=MODEL, **given)
    [choice] = got.choices
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("look", {"x": 1}), ("look", {"x": 2})]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert scripted.asked[-1][0].startswith('[{"')
    assert "Looks." in scripted.asked[-1][0]
    made = streamed(tooled, **given)
    assert (made["content"], made["tool_calls"], made["reason"]) == ("I look.", calls, "tool_calls")
    one = tooled.chat.completions.create(model=MODEL, parallel_tool_calls=False, **given)
    assert len(one.choices[0].message.tool_calls) == 1
    none = tooled.chat.completions.create(model=MODEL, tool_choice="none", **given)
    assert none.choices[0].message.content == scripted.text
    assert scripted.asked[-1][0].startswith("[system]")
    # The result goes back with the call.
    message = choice.message.model_dump()
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "seen"}
    tooled.chat.completions.create(model=MODEL, messages=[*MESSAGES, message, result], tools=TOOLS)
    assert scripted.asked[-1][0].endswith("[assistant]I look.(look 1)(look 2)[tool]seen[assistant]")


def test_a_call_in_tags_that_is_cut_off_is_text(scripted):
    given = {"messages": MESSAGES, "tools": TOOLS}
    scripted.text = CUT_CALL
    with (
        served(scripted, tool_call_parser="qwen3_coder") as own,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for reason, content, calls in (("stop", "", LOOK), ("length", CUT_CALL, [])):
            scripted.reason = reason
            [choice] = client.chat.completions.create(model=MODEL, **given).choices
            assert choice.message.content == (content or None)
            told = [call.function for call in choice.message.tool_calls or []]
            assert [(function.name, json.loads(function.arguments)) for function in told] == calls
            assert choice.finish_reason == ("tool_calls" if calls else reason)
            made = streamed(client, **given)
            assert (made["content"], made["tool_calls"]) == (content, calls)
            assert made["reason"] == choice.finish_reason
    scripted.reason = "stop"


def test_of_calls_that_are_cut_off_the_complete_ones_are_given(tooled, scripted):
    scripted.text = '[{"name":"look","arguments":{"x":1}},{"name":"look","argu'
    scripted.reason = "length"
    given = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    [choice] = tooled.chat.completions.create(model=MODEL, **given).choices
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == LOOK[0]
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    made = streamed(tooled, **given)
    assert (made["content"], made["tool_calls"], made["reason"]) == ("", LOOK, "length")
    scripted.reason = "stop"


def test_reasoning_is_split_off(tooled, scripted):
    scripted.text = "<think>\n1 < 2\n</think>\n\nYes <think>."
    for text, begun in ((scripted.text, False), (scripted.text.removeprefix("<think>\n"), True)):
        scripted.text = text
        given = {"messages": MESSAGES, "extra_body": {"chat_template_kwargs": {"think": begun}}}
        message = tooled.chat.completions.create(model=MODEL, **given).choices[0].message
        assert message.content == "\n\nYes <think>."
        assert message.reasoning_content.strip() == "1 < 2"
        made = streamed(tooled, **given)
        assert (made["content"], made["reasoning_content"]) == (message.content, message.reasoning_content)
    scripted.text = "No reasoning."
    message = tooled.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message
    assert (message.content, hasattr(message, "reasoning_content")) == ("No reasoning.", False)


def test_what_says_how_to_answer_reaches_the_template(tooled, scripted):
    tooled.chat.completions.create(model=MODEL, messages=MESSAGES, verbosity="low", reasoning_effort="high")
    assert scripted.asked[-1][0].startswith("highlow[system]")


def test_a_template_that_reads_none_of_it_is_named_once(http, caplog):
    body = {"messages": MESSAGES, "max_tokens": 1, "verbosity": "low", "reasoning_effort": "high"}
    with caplog.at_level(logging.WARNING, LOG.name):
        for path in ("/v1/chat/completions", "/tokenize"):
            given = body if path != "/tokenize" else body | {"max_tokens": None}
            assert http.post(path, json=given).status_code == 200
    said = [record.getMessage() for record in caplog.records if "template" in record.getMessage()]
    assert said == [
        f"the chat template does not read {name}: it has no effect"
        for name in ("reasoning_effort", "verbosity")
    ]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"reasoning_effort": "high", "verbosity": "low"},
        {"tools": TOOLS},
        {"chat_template_kwargs": {"think": True}, "add_generation_prompt": False},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Sure"}], "continue_final_message": True},
    ],
)
def test_the_tokens_of_a_chat_are_its_prompt(tooled, extra):
    given = {"messages": [{"role": "developer", "content": "Be short."}, *MESSAGES], **extra}
    got = tooled.chat.completions.create(
        model=MODEL, extra_body={**given, "return_token_ids": True}, messages=[]
    )
    told = httpx.post(f"{tooled.base_url}".replace("/v1/", "/tokenize"), json=given).json()
    assert told["tokens"] == got.prompt_token_ids


def test_the_last_message_is_continued(tooled, scripted):
    scripted.text = "</think> Yes."
    for content, reasoning, answer in (
        ("Sure", "", "</think> Yes."),
        ("<think>\n1 < 2", "", " Yes."),
        ([{"type": "text", "text": "<think>1</think>"}], "", "</think> Yes."),
    ):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        given = {"messages": messages, "extra_body": {"continue_final_message": True}}
        message = tooled.chat.completions.create(model=MODEL, **given).choices[0].message
        assert (message.content, getattr(message, "reasoning_content", "")) == (answer, reasoning)
        end = content if isinstance(content, str) else content[0]["text"]
        assert scripted.asked[-1][0].endswith(f"[assistant]{end}")
        made = streamed(tooled, **given)
        assert (made["content"], made["reasoning_content"]) == (answer, reasoning)
