"""Conversations as callers bring them: nothing is rendered here."""

import inspect

import pytest
from transformers import PreTrainedTokenizerBase

from jetspec_jax.checkpoint.chat_template import check_template_arguments, read_chats, render_chat
from jetspec_jax.checkpoint.template_content import walks_parts
from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_TARGET

pytestmark = pytest.mark.usefixtures("no_type_checks")
HELLO = {"role": "user", "content": "hello"}


def part(text, **more):
    return {"type": "text", "text": text, **more}


def test_one_conversation_or_several():
    assert read_chats([HELLO]) == [[HELLO]]
    assert read_chats((HELLO, HELLO)) == [[HELLO, HELLO]]
    assert read_chats([[HELLO], (HELLO, HELLO)]) == [[HELLO], [HELLO, HELLO]]


MACRO = "{% macro say(c, x) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
#: Templates that walk parts, each in a way of its own, and templates that read a text.
WALKS = {
    "macro": MACRO + "{{ say(m.content, 1) }}",
    "macro by name": MACRO + "{{ say(x=1, c=m.content) }}",
    "loop": "{% for p in m.content %}{{ p.text }}{% endfor %}",
    "loop by keys": "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}",
    "name": "{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}",
    "names": "{% set c = m.content or [] %}{% set d = c %}{% for p in d %}{{ p.text }}{% endfor %}",
    "chosen": "{% for p in (m.content if m.content else []) %}{{ p.text }}{% endfor %}",
    "filtered": "{% for p in m.content | selectattr('type', 'eq', 'text') %}{{ p.text }}{% endfor %}",
    "map": "{{ m.content | map(attribute='text') | join('') }}",
    "slice": "{{ m.content[0].text }}{% for p in m.content[1:] %}{{ p.text }}{% endfor %}",
    "break": "{% for p in m.content %}{{ p.text }}{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% generation %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endgeneration %}",
}
READS = {
    "plain": "{{ m.content }}",
    "trimmed": "{{ m['content'] | trim }}",
    "loops over others": "{% for c in m.tool_calls or [] %}{{ c.content }}{% endfor %}{{ m.content }}",
    "characters": "{{ m.content.split('x')[-1] }}{{ m.content[0] }}",
}
TOKENIZER = load_tokenizer(DEMO_TARGET)
PARTS = [{"role": "user", "content": [part("one"), part("two")]}]


def rendered(template, messages):
    TOKENIZER.chat_template = template
    [chat] = read_chats(messages)
    return render_chat(TOKENIZER, chat, {}, tokenize=False)


@pytest.mark.parametrize("name", WALKS)
def test_templates_that_walk_parts_get_what_transformers_gives_them(name):
    template = "{% for m in messages %}" + WALKS[name] + "{% endfor %}"
    assert walks_parts(template)
    assert rendered(template, PARTS) == "onetwo"
    assert TOKENIZER.apply_chat_template(PARTS, tokenize=False) == "onetwo"


@pytest.mark.parametrize("name", READS)
def test_other_templates_get_a_line_for_each_part(name):
    template = "{% for m in messages %}" + READS[name] + "{% endfor %}"
    assert not walks_parts(template)
    assert rendered(template, PARTS) == rendered(template, [{"role": "user", "content": "one\ntwo"}])


def test_parts_are_read_as_they_are():
    messages = [{"role": "user", "content": [part("one"), part("two")], "name": "Ada"}]
    assert read_chats(messages) == [messages]
    assert read_chats([{"role": "user", "content": [part("one", cache_control=None)]}]) == [
        [{"role": "user", "content": [part("one")]}]
    ]


def test_a_developer_is_the_system_where_the_template_knows_none():
    messages = [{"role": "developer", "content": "a"}]
    body = "{% for m in messages %}[{{ m.role }}]{% endfor %}"
    assert rendered(body, messages) == "[system]"
    assert rendered(body + "{# developer #}", messages) == "[developer]"


@pytest.mark.parametrize(("given", "read"), [("", {}), (" \n", {}), ("{}", {}), ('{"x": 1}', {"x": 1})])
def test_arguments_of_calls_become_mappings(given, read):
    call = {"id": "a", "function": {"name": "f", "arguments": given}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    [[got]] = read_chats([message])
    assert got["tool_calls"] == [{"id": "a", "function": {"name": "f", "arguments": read}}]
    assert message["tool_calls"] == [call], "what was given is left as it was"


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
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            ValueError,
            r"arguments of a call in messages\[0\] must be a JSON object, not '\[1\]'",
        ),
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
