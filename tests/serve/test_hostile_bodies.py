"""Bodies that nobody would send: an answer or a refusal by name, never an error of the server."""

import json
import random

import pytest
from pydantic import ValidationError

from jetspec_jax.serve.bodies import Body
from jetspec_jax.serve.chat import ChatRequest
from jetspec_jax.serve.completions import CompletionRequest
from jetspec_jax.serve.errors import MOST_CHARACTERS, invalid
from jetspec_jax.serve.messages import ToolCall
from jetspec_jax.serve.playground.routes import RoundsRequest
from jetspec_jax.serve.sampling import ResponseFormat
from jetspec_jax.serve.tokens import DetokenizeRequest, TokenizeRequest
from jetspec_jax.serve.tools import Tool
from tests.serve.conftest import small_target
from tests.serve.scripted import Scripted
from tests.serve.servers import served
from tests.serve.test_chat import TEMPLATE, TOOLS

USER = {"role": "user", "content": "a"}
VALUES = (
    *(None, True, False, 0, 1, -1, 2**63, 10**400, 0.5, -1e308, "", "a", "\x00", "\ud800", "é" * 50, [], {}),
    *([1], [[1]], [None], ["a", 1], {"a": 1}, {"1": 1}, {"": None}, [{"type": "text", "text": "a"}], [USER]),
    *([{"role": "assistant", "content": None}], [{"role": "tool", "content": []}], TOOLS, "required", "auto"),
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "a", "arguments": "[]"}}]}],
    [{"role": "user", "content": [{"type": "text"}, {"type": 1}]}],
    *({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 1}}}),
    *({"json": {"$ref": "#/nowhere"}}, {"regex": "(?=a)b"}, {"grammar": "start: x"}, {"choice": [""]}),
    *({"type": "function", "function": {"name": "look"}}, {"include_usage": True}, {"messages": [USER]}),
)


def bodies(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        kind, path, body = rng.choice(
            (
                (CompletionRequest, "/v1/completions", {"prompt": "a"}),
                (ChatRequest, "/v1/chat/completions", {"messages": [USER]}),
            )
        )
        body = dict(body)
        for _ in range(rng.choice((1, 1, 1, 2))):
            name = rng.choice((*kind.model_fields, "unknown"))
            body[name] = rng.choice(VALUES)
        yield path, body


def test_no_body_is_an_error_of_the_server():
    llm = Scripted(small_target(TEMPLATE), "yes")
    statuses = {}
    with served(llm, tool_call_parser="hermes", reasoning_parser="qwen3") as own, own.client() as http:
        for path, body in bodies(0, 300):
            content = json.dumps(body)
            got = http.post(path, content=content, headers={"Content-Type": "application/json"})
            assert got.status_code in (200, 400, 404, 429), (body, got.text)
            statuses[got.status_code] = statuses.get(got.status_code, 0) + 1
            if got.status_code != 200:
                error = got.json()["error"]
                assert error["message"], body
                assert len(error["message"]) < 1500, body
    assert min(statuses[200], statuses[400]) > 15


def kinds_of(kind):
    return {kind}.union(*map(kinds_of, kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(kinds_of(Body), key=str), ids=lambda kind: kind.__name__)
def test_null_is_a_field_left_out(kind):
    needed = {"messages": [USER], "prompt": "a", "type": "function", "role": "user", "name": "f", "id": "a"}
    needed |= {"function": {"name": "f", "arguments": "{}"}, "schema": {}, "arguments": "{}", "tokens": []}
    names = {own.alias or name: own for name, own in kind.model_fields.items()}
    least = {name: needed[name] for name, own in names.items() if own.is_required()}
    least |= {"type": "text"} if kind is ResponseFormat else {}
    if "function" in least and kind is not ToolCall:
        least["function"] = {"name": "f"}
    nulls = dict.fromkeys([*names, "suffix", "cache_control"])
    assert kind.model_validate(nulls | least) == kind.model_validate(least)
    for name in least:
        with pytest.raises(ValidationError) as raised:
            kind.model_validate(least | {name: None})
        assert [error["type"] for error in raised.value.errors()] == ["missing"]


def test_nulls_of_a_schema_stay():
    schema = {"type": "object", "properties": {"x": {"enum": [1, None], "default": None}}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
    assert tool.function.parameters == schema
    assert tool.model_dump(exclude_none=True)["function"]["parameters"] == schema


MANY = 20_000
ITEMS, FIELDS = [None] * MANY, {f"é {number}": 1 for number in range(MANY)}
CALL = {"id": "a", "function": {"name": "a", "arguments": "{}"}}
LARGE = (
    *({"messages": ITEMS}, {"messages": [0] * MANY}, {"tools": ITEMS}, FIELDS, {"a" * MANY: 1}),
    *({"messages": [USER | FIELDS]}, {"messages": [{}] * MANY}, {"messages": [USER | {"tool_calls": ITEMS}]}),
    *({"messages": [USER | {"tool_calls": [CALL | FIELDS]}]}, {"messages": [USER | {"a" * MANY: 1}]}),
    *({"tools": [{"type": "function", "function": FIELDS}]}, {"response_format": FIELDS}),
    {"model": "a" * MANY},
    *({"logit_bias": FIELDS}, {"logit_bias": {str(number): "a" for number in range(MANY)}}),
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "a" * MANY}}},
    {"response_format": {"type": "text", "a" * MANY: 1}},
    {"seed": [[["a" * 99] * 9] * 9] * 9, **{f"{number} {'a' * 99}": 1 for number in range(30)}},
)


@pytest.mark.parametrize("body", LARGE, ids=lambda body: " ".join(body)[:20])
def test_a_large_body_gets_a_short_answer(http, body):
    got = http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1, **body})
    assert got.status_code in (400, 404)
    assert len(got.json()["error"]["message"]) <= MOST_CHARACTERS
    assert len(got.content) < 3 * MOST_CHARACTERS


def nested(depth):
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [USER], "chat_template_kwargs": %s}',
        '{"messages": [USER], "metadata": %s}',
        '{"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": %s}}}',
        '{"messages": [{"role": "user", "content": %s}]}',
    ],
)
@pytest.mark.parametrize("depth", [101, 400, 960])
def test_what_is_nested_deeply(http, body, depth):
    content = body.replace("USER", json.dumps(USER)) % nested(depth)
    got = http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
    assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_json")
    assert "nested too deeply; at most 100 levels" in got.json()["error"]["message"]


def test_what_is_nested_deeply_in_a_text(http):
    def calls(depth):
        arguments = {"name": "a", "arguments": nested(depth)}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": arguments}]}

    for own in (
        {"messages": [USER, calls(101)]},
        {"messages": [USER, calls(900)]},
        {"structured_outputs": {"json": nested(900)}},
    ):
        got = http.post("/v1/chat/completions", json={"messages": [USER], **own})
        assert got.status_code == 400, got.text


KINDS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, RoundsRequest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [ITEMS, [[]] * MANY, [FIELDS], FIELDS, {"type": ITEMS, "function": FIELDS}])
def test_wrong_items_are_not_all_looked_at(kind: type[Body], wrong):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(dict.fromkeys(kind.model_fields, wrong))
    assert caught.value.error_count() < 200
    told = invalid(caught.value, kind, kind.hints).message
    assert len(told) <= MOST_CHARACTERS
    assert (f"; and {caught.value.error_count() - 8} more" in told) == (caught.value.error_count() > 8)
