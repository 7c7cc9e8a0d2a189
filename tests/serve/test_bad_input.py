"""What is refused: in OpenAI's form, by the name of the parameter, with what would work."""

import json
import socket

import openai
import pytest

from jetspec_jax.serve.settings import ServeSettings
from tests.events import PATIENCE
from tests.serve.conftest import small_target
from tests.serve.scripted import Scripted
from tests.serve.servers import served

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]


def schema(own):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": own}}


def refused(response, status, param, *words):
    """Checks an error's form, its parameter and what it says."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"]
    assert response.headers["X-Request-Id"]
    return error


@pytest.mark.parametrize(
    ("raw", "kind", "status", "words"),
    [
        (b"{", "application/json", 400, ["no valid JSON"]),
        (b"[]", "application/json", 400, ["must be a JSON object, not an array"]),
        (b'{"prompt": "a"}', "text/plain", 415, ["application/json, not 'text/plain'"]),
        (b'{"prompt": "\xff"}', "application/json", 400, ["no valid UTF-8", "0xff"]),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", 400, ["NaN is no number"]),
        (b'{"prompt": "a", "temperature": 1e999}', "application/json", 400, ["beyond all floats"]),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "application/json", 400, ["too many digits"]),
        (b'{"prompt": "a", "seed": 1, "seed": 2}', "application/json", 400, ["'seed' 2 times"]),
        (b"[" * 100_000, "application/json", 400, ["nested too deeply"]),
        (b'{"prompt": "' + b"a" * 2**23 + b'"}', "application/json", 413, ["4194304 bytes"]),
    ],
)
def test_bodies(http, raw, kind, status, words):
    got = http.post(COMPLETION, content=raw, headers={"Content-Type": kind})
    refused(got, status, None, *words)


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "prompt", ["prompt is missing"]),
        ({"prompt": ""}, 400, "prompt", ["empty"]),
        ({"prompt": ["a", ""]}, 400, "prompt", ["prompt[1]", "empty"]),
        ({"prompt": "\ud800"}, 400, "prompt", ["surrogate", "U+D800"]),
        ({"prompt": [1, 4096]}, 400, "prompt", ["4096", "0..4095"]),
        ({"prompt": 1}, 400, "prompt", ["a text, token ids"]),
        ({"prompt": "a", "model": "other"}, 404, "model", ["'other'", "'demo'"]),
        ({"prompt": "a", "max_token": 1}, 400, "max_token", ["did you mean max_tokens?"]),
        ({"prompt": "a", "guided_json": {}}, 400, "guided_json", ['{"structured_outputs": {"json": …}}']),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix", ["not supported"]),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature", ["number", "'hot'"]),
        ({"prompt": "a", "n": 5}, 400, "n", ["4 that decode together", "--max-num-seqs"]),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", ["token ids"]),
        ({"prompt": "a", "logit_bias": {"5": 1, "005": 2}}, 400, "logit_bias", ["token 5 twice", "'005'"]),
        ({"prompt": "a", "stop": ["a"] * 65}, 400, "stop", ["64 texts", "has 65"]),
        ({"prompt": "a", "stop": ["a", "b" * 1025]}, 400, "stop", ["1024 characters", "one of 1025"]),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", ["stream=true"]),
        ({"prompt": "a", "return_rounds": True}, 400, "return_rounds", ["stream=true"]),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 0}, 400, "prompt_logprobs", ["leave out stream"]),
        (
            {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
            400,
            "stream_options.x",
            ["not a parameter", "nothing here has a name like it"],
        ),
        ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format.type", ["json_schema"]),
        ({"prompt": "a", "structured_outputs": {}}, 400, "structured_outputs", ["exactly one"]),
        ({"prompt": "a", "priority": 1}, 400, "priority", ["--scheduling-policy priority"]),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, 400, "echo", ["leave out stream"]),
        ({"prompt": "a", "temperature": -1, "what": 1}, 400, "what", ["not a parameter"]),
    ],
)
def test_completions(http, llm, body, status, param, words):
    before = llm.stats()
    content = json.dumps(body)  # with surrogates, which httpx would not send
    got = http.post(COMPLETION, content=content, headers={"Content-Type": "application/json"})
    refused(got, status, param, *words)
    after = llm.stats()
    assert (after.prefix_queries, after.waiting) == (before.prefix_queries, 0)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", ["no messages"]),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", ["assistant"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            ["image_url", '"text" alone'],
        ),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs", ["logprobs=true"]),
        ({"messages": USER, "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", ["two names"]),
        ({"messages": USER, "tool_choice": "auto"}, "tool_choice", ["needs tools"]),
        (
            {"messages": USER, "tools": [{"type": "function", "function": {"name": "a"}}]},
            "tools",
            ["the chat template does not write tools", "--chat-template FILE"],
        ),
        (
            {"messages": USER, "continue_final_message": True},
            "continue_final_message",
            ["a last message of the role \"assistant\", not 'user'"],
        ),
        ({"messages": USER, "functions": []}, "functions", ["tools"]),
        ({"messages": USER, "prompt": "a"}, "prompt", ["/v1/completions"]),
        ({"messages": USER, "logprobs": True, "top_logprobs": 50}, "top_logprobs", ["top_logprobs must"]),
        (
            {"messages": USER, "response_format": schema({"type": "nothing"})},
            "response_format",
            ["response_format: ", "does not compile"],
        ),
        (
            {"messages": USER, "tool_choice": {"type": "function", "function": {}}},
            "tool_choice",
            ["tool_choice.function.name is missing"],
        ),
    ],
)
def test_chats(http, body, param, words):
    refused(http.post(CHAT, json=body), 400, param, *words)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_template_is_the_server_s(http, path):
    got = http.post(path, json={"messages": USER, "chat_template": "{{ messages }}"})
    refused(got, 400, "chat_template", "is not supported", "--chat-template FILE")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("name", ["tokenize", "chat_template", "tools", "self", "conversations"])
def test_a_template_s_arguments_do_not_set_how_it_is_used(http, path, name):
    got = http.post(path, json={"messages": USER, "chat_template_kwargs": {name: "{{ 1 }}"}})
    refused(got, 400, "chat_template_kwargs", f"{name} cannot be template arguments")


def test_documents_of_a_template_are_a_list(http):
    got = http.post(CHAT, json={"messages": USER, "chat_template_kwargs": {"documents": 5}})
    refused(got, 400, "chat_template_kwargs", "documents must be a list, not 5")


def test_tools_need_a_parser():
    tools = [{"type": "function", "function": {"name": "a"}}]
    with served(Scripted(small_target("{{ tools }}"))) as own, own.client() as http:
        got = http.post(CHAT, json={"messages": USER, "tools": tools})
        refused(got, 400, "tools", "--tool-call-parser", "hermes")
        got = http.post(CHAT, json={"messages": USER, "tools": [*tools, *tools], "tool_choice": "required"})
        refused(got, 400, "tools", "two functions")
        got = http.post(
            CHAT,
            json={
                "messages": USER,
                "tools": tools,
                "tool_choice": {"type": "function", "function": {"name": "b"}},
            },
        )
        refused(got, 400, "tool_choice", "'b'")
        for parameters, said in (
            ({"$ref": "#/$defs/b"}, "json does not compile: Pointer '/$defs/b' does not exist"),
            ({"$ref": "http://example.com/b"}, "'http://example.com/b' is not present"),
            ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "json allows no text that ends"),
        ):
            functions = {"name": "b"}, {"name": "c", "parameters": parameters}
            given = {"tools": [{"type": "function", "function": each} for each in functions]}
            for choice in ("required", {"type": "function", "function": {"name": "c"}}):
                got = http.post(CHAT, json={"messages": USER, **given, "tool_choice": choice})
                refused(got, 400, "tools", "the parameters of c: ", said)


def test_what_exceeds_the_context_is_said_in_the_words_that_clients_look_for(http):
    """As LiteLLM and LangChain do."""
    long = "the prompt is too long: 3000 tokens, and this model's maximum context length is 1024"
    room = "this model's maximum context length is 1024 tokens, but 2 prompt tokens and "
    chat = len(http.post("/tokenize", json={"messages": USER}).json()["tokens"])
    cases = (
        (COMPLETION, {"prompt": [5] * 3000}, "prompt", long),
        (COMPLETION, {"prompt": [[5], [5] * 3000]}, "prompt", long),
        *(
            (
                COMPLETION,
                {"prompt": [5, 5], **given},
                name,
                f"{room}{name}={most} need {most + 2}; {name} could be at most 1022",
            )
            for name, most, given in (
                ("max_tokens", 5000, {"max_tokens": 5000}),
                ("max_tokens", 1023, {"max_tokens": 1023, "min_tokens": 1023}),
            )
        ),
        (
            CHAT,
            {"messages": USER, "max_completion_tokens": 5000},
            "max_completion_tokens",
            f"{chat} prompt tokens and max_completion_tokens=5000 need {chat + 5000}; max_completion_tokens ",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "word " * 3000}]},
            "messages",
            "the prompt is too long: ",
        ),
    )
    for path, body, param, words in cases:
        error = refused(http.post(path, json=body), 400, param, words, " (context_length_exceeded)")
        assert error["code"] == "context_length_exceeded"


def test_without_a_chat_template_completions_are_served():
    llm = Scripted(small_target(), "yes")
    llm.llm.target.tokenizer.chat_template = None
    with served(llm) as own, own.client() as http:
        for path in (CHAT, "/tokenize", "/playground/rounds"):
            got = http.post(path, json={"messages": USER})
            refused(got, 400, "messages", "no chat template", COMPLETION, "--chat-template FILE")
        assert http.post(COMPLETION, json={"prompt": "a"}).json()["choices"][0]["text"] == "yes"
        # Tools in a comment are none, and what fails is the client's to know.
        llm.llm.target.tokenizer.chat_template = "{# tools #}{{ 1 // (messages | length - 1) }}"
        got = http.post(CHAT, json={"messages": USER})
        refused(got, 400, "messages", "fails on the conversation", "division", "--chat-template FILE")
        tools = [{"type": "function", "function": {"name": "a"}}]
        got = http.post(CHAT, json={"messages": USER, "tools": tools, "tool_choice": "required"})
        refused(got, 400, "tools", "does not write tools")
        llm.llm.target.tokenizer.chat_template = "{% if messages %}" * 1000 + "{% endif %}" * 1000
        got = http.post(CHAT, json={"messages": USER, "tools": tools, "tool_choice": "required"})
        refused(got, 400, "messages", "the chat template cannot be compiled", "--chat-template FILE")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/v1/audio/speech", "/v1/nothing"])
def test_paths_that_are_not_served(http, path):
    error = refused(http.post(path, json={}), 404, None, "is not served here")
    assert error["code"] == "not_found"
    if path == "/v1/nothing":
        served = error["message"].partition("there are ")[2].split(", ")
        assert served == sorted(served)
        assert {COMPLETION, CHAT, "/v1/models", "/tokenize", "/metrics", "/playground"} <= set(served)


def test_methods(http):
    refused(http.get(COMPLETION), 405, None, "POST")


def test_what_is_no_http(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as own:
        own.sendall(b"nonsense\r\n\r\n")
        got = own.makefile("rb").read()
    assert got.startswith(b"HTTP/1.1 400")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_keys():
    llm = Scripted(small_target(), "yes")
    with served(llm, api_key=["one,two", "three"]) as own:
        for key in ("one", "two", "three"):
            with openai.OpenAI(base_url=f"{own.url}/v1", api_key=key, max_retries=0) as client:
                assert [model.id for model in client.models.list()] == ["demo"]
                assert client.models.retrieve("demo").id == "demo"
        with (
            openai.OpenAI(base_url=f"{own.url}/v1", api_key="four", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="not one of this server's"),
        ):
            client.models.list()
        with own.client() as http:
            got = http.post(COMPLETION, json={"prompt": "a"})
            refused(got, 401, None, "a key is missing", "Authorization: Bearer")
            assert got.headers["WWW-Authenticate"] == "Bearer"
            for path in ("/health", "/metrics", "/version"):
                assert http.get(path).status_code == 200


def test_keys_beyond_ascii():
    """Clients send UTF-8, or Latin-1 where a key has no other characters."""
    with served(Scripted(small_target(), "yes"), api_key=["à", "ключ"]) as own, own.client() as http:
        for key, status in (
            ("à".encode(), 200),
            ("à".encode("latin-1"), 200),
            ("ключ".encode(), 200),
            ("ключ".encode("koi8-r"), 401),
            ("á".encode(), 401),
            (b"\xc3", 401),
        ):
            got = http.get("/v1/models", headers={b"Authorization": b"Bearer " + key})
            assert got.status_code == status, key
    with pytest.raises(ValueError, match="api_key must hold keys without control characters"):
        ServeSettings(api_key=["a\x07"])
