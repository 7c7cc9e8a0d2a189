"""Conversations as callers bring them: nothing is rendered here."""

import inspect

import pytest
from transformers import PreTrainedTokenizerBase

from jetspec_jax.checkpoint.chat_template import check_template_arguments, read_chats

pytestmark = pytest.mark.usefixtures("no_type_checks")
HELLO = {"role": "user", "content": "hello"}


def part(text, **more):
    return {"type": "text", "text": text, **more}


def test_one_conversation_or_several():
    assert read_chats([HELLO]) == [[HELLO]]
    assert read_chats((HELLO, HELLO)) == [[HELLO, HELLO]]
    assert read_chats([[HELLO], (HELLO, HELLO)]) == [[HELLO], [HELLO, HELLO]]


def test_parts_are_lines():
    messages = [{"role": "user", "content": [part("one"), part("two")], "name": "Ada"}]
    assert read_chats(messages) == [[{"role": "user", "content": "one\ntwo", "name": "Ada"}]]
    assert messages[0]["content"] == [part("one"), part("two")], "what was given is left as it was"
    assert read_chats([{"role": "user", "content": []}])[0][0]["content"] == ""


def test_what_templates_read_is_kept():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    bare = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    assert read_chats([HELLO, call, bare]) == [[HELLO, call, bare]]


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("hello", TypeError, "^messages must be a list such as .*, or several, not 'hello'"),
        (None, TypeError, "^messages must be a list such as .* not None"),
        (HELLO, TypeError, "^messages must be a list such as"),
        (["hello"], TypeError, r"^messages\[0\] must be a list such as .*, not 'hello'"),
        ([None], TypeError, r"^messages\[0\] must be a list"),
        ([[HELLO], "hello"], TypeError, r"^messages\[1\] must be a list"),
        ([[HELLO], HELLO], TypeError, r"^messages\[1\] must be a list"),
        ([HELLO, "hello"], TypeError, r"^messages\[1\] must be a mapping with \"role\""),
        ([HELLO, [HELLO]], TypeError, r"^messages\[1\] must be a mapping"),
        ([[HELLO, None]], TypeError, r"^messages\[0\]\[1\] must be a mapping"),
        ([], ValueError, "^there are no messages to answer"),
        ([[HELLO], []], ValueError, "^there are no messages to answer"),
        ([{"content": "hello"}], TypeError, r'"role" of messages\[0\] must be a string, not None'),
        ([{"role": 1, "content": "hello"}], TypeError, '"role" of .* not 1'),
        ([{"role": "user"}], ValueError, r'messages\[0\] has no "content"'),
        ([{"role": "user", "content": None}], ValueError, 'has no "content"'),
        ([{"role": "user", "content": 5}], TypeError, '"content" of .* must be a string, or a list'),
        ([{"role": "user", "content": {"text": "a"}}], TypeError, '"content" of'),
        ([{"role": "user", "content": b"hello"}], TypeError, '"content" of'),
        ([{"role": "user", "content": ["hello"]}], TypeError, r"content\[0\] of messages\[0\] must be"),
        ([{"role": "user", "content": [{"text": "a"}]}], ValueError, "is of type None"),
        (
            [{"role": "user", "content": [part("a"), {"type": "image_url", "image_url": {"url": "x"}}]}],
            ValueError,
            r"content\[1\] of messages\[0\] is of type 'image_url'; \"text\" alone is supported",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], ValueError, "'input_audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], TypeError, '"text" of .* not None'),
        ([{"role": "user", "content": [part(5)]}], TypeError, '"text" of .* not 5'),
        ([{"role": "user", "content": [part("a", cache=1)]}], ValueError, r"unknown keys: \['cache'\]"),
        ([{"role": "user", "content": "a\ud800"}], ValueError, r"no valid Unicode: .*U\+D800, at position 1"),
        ([{"role": "user", "content": [part("\udc00")]}], ValueError, "no valid Unicode"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_conversation(messages, error, message):
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        read_chats(messages)
    assert type(raised.value) is error
    assert len(str(raised.value)) < 300


def test_what_a_tokenizer_takes_itself_is_no_argument_of_a_template():
    """But for what it gives on to the template; also what later releases take beside."""
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    own = {name for name, parameter in own.items() if parameter.kind is not parameter.VAR_KEYWORD}
    assert "chat_template" in own
    for name in (own | {"messages"}) - {"self", "tools", "documents"}:
        with pytest.raises(ValueError, match=f"^{name} cannot be template arguments"):
            check_template_arguments([name])
    check_template_arguments(["tools", "documents", "enable_thinking"])
