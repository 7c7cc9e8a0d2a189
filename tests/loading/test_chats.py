"""Conversations as callers bring them: nothing is rendered here."""

import inspect
import shutil
from pathlib import Path

import jinja2
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from jetspec_jax import LLM, load_target
from jetspec_jax.checkpoint.chat_template import (
    TEMPLATES,
    Ending,
    TemplateFailed,
    check_template_arguments,
    check_writes_tools,
    read_chat_template,
    read_chats,
    render_chat,
)
from jetspec_jax.checkpoint.template_content import variables_of, walks_parts
from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_TARGET
from tests.decode.tiny import word_tokenizer

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
DEMO_TEMPLATE = TOKENIZER.chat_template
PARTS = [{"role": "user", "content": [part("one"), part("two")]}]
BLOCKS = [("{% if messages %}", "{% endif %}"), ("{% for m in messages %}", "{% endfor %}")]


def rendered(template, messages, **ending):
    TOKENIZER.chat_template = template
    [chat] = read_chats(messages)
    return render_chat(TOKENIZER, chat, {}, tokenize=False, **ending)


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
        (["hello"], TypeError, r"^messages\[0\] must be a list such as .*, not 'hello'"),
        ([HELLO, "hello"], TypeError, r"^messages\[1\] must be a mapping with \"role\""),
        ([], ValueError, "^there are no messages to answer"),
        ([{"role": "user"}], ValueError, r'messages\[0\] has no "content"'),
        ([{"role": "user", "content": 5}], TypeError, '"content" of .* must be a string, or a list'),
        (
            [{"role": "user", "content": [part("a"), {"type": "image_url", "image_url": {"url": "x"}}]}],
            ValueError,
            r"content\[1\] of messages\[0\] is of type 'image_url'; \"text\" alone is supported",
        ),
        ([{"role": "user", "content": [part("a", cache=1)]}], ValueError, r"unknown keys: \['cache'\]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            ValueError,
            r"arguments of a call in messages\[0\] must be a JSON object, not '\[1\]'",
        ),
        ([{"role": "user", "content": "a\ud800"}], ValueError, r"no valid Unicode: .*U\+D800, at position 1"),
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
    calls = PreTrainedTokenizerBase.apply_chat_template, render_jinja_template, jinja2.Template.render
    own = {
        parameter.name
        for call in calls
        for parameter in inspect.signature(call).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    assert own > {"chat_template", "self", "conversations"}
    for name in (own | {"messages"}) - {"tools", "documents"}:
        with pytest.raises(ValueError, match=f"^{name} cannot be template arguments"):
            check_template_arguments({name: 1})
    check_template_arguments({"tools": [], "documents": None, "enable_thinking": 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"documents": 5}, "documents must be a list, not 5"),
        ({"tools": "a"}, "tools must be a list, not 'a'"),
        ({1: 2}, "the name of a template argument must be a string, not 1"),
    ],
)
def test_what_is_no_argument_of_a_template(arguments, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        check_template_arguments(arguments)


BEGUN = {"role": "assistant", "content": "The answer is "}


class TestHowAPromptEnds:
    @pytest.mark.parametrize(
        ("given", "end"),
        [
            ({}, "The answer is <|im_end|>\n<|im_start|>assistant\n"),
            ({"add_generation_prompt": False}, "The answer is "),
            (
                {"add_generation_prompt": False, "continue_final_message": False},
                "The answer is <|im_end|>\n",
            ),
            ({"continue_final_message": True}, "The answer is "),
        ],
        ids=str,
    )
    def test_the_demo_s(self, given, end):
        ending = Ending.of(**given)
        flags = {**ending._asdict(), "continue_final_message": ending.continues([HELLO, BEGUN])}
        text = rendered(DEMO_TEMPLATE, [HELLO, BEGUN], **flags)
        assert text == f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{end}"
        assert text == TOKENIZER.apply_chat_template([HELLO, BEGUN], tokenize=False, **flags)

    def test_a_continued_message_may_be_of_parts_or_empty(self):
        continued = Ending.of(continue_final_message=True)._asdict()
        for content, end in (([part("one"), part("two")], "one\ntwo"), ("", "")):
            message = {"role": "assistant", "content": content}
            text = rendered(DEMO_TEMPLATE, [HELLO, message], **continued)
            assert text.endswith(f"<|im_start|>assistant\n{end}")
        walked = "{% for m in messages %}" + WALKS["loop"] + "!{% endfor %}"
        assert rendered(walked, PARTS, **continued) == "onetwo"

    def test_a_template_that_drops_the_message_cannot_continue_it(self):
        with pytest.raises(
            ValueError, match=r"fails on the conversation: continue_final_message is .*appear"
        ):
            rendered("{{ messages[0].content }}", [HELLO, BEGUN], continue_final_message=True)

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            (
                (True, True),
                ValueError,
                "^continue_final_message and add_generation_prompt cannot both be true",
            ),
            ((None, "yes"), TypeError, "^continue_final_message must be True or False, not 'yes'"),
        ],
    )
    def test_what_is_no_ending(self, given, error, message):
        with pytest.raises(error, match=message):
            Ending.of(*given)

    @pytest.mark.parametrize(
        ("last", "message"),
        [
            (HELLO, "^continue_final_message needs a last message of the role \"assistant\", not 'user'"),
            ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "has content and calls no"),
        ],
        ids=["user", "a call alone"],
    )
    def test_what_cannot_be_continued(self, last, message):
        [chat] = read_chats([HELLO, last])
        with pytest.raises(ValueError, match=message):
            Ending.of(continue_final_message=True).continues(chat)
        assert not Ending.of().continues(chat)
        assert not Ending.of(add_generation_prompt=False).continues(chat)


class TestTemplatesThatAreGiven:
    def test_a_file_or_a_text(self, tmp_path):
        file = tmp_path / "own.jinja"
        file.write_text(DEMO_TEMPLATE, encoding="utf-8")
        for given in (file, str(file), DEMO_TEMPLATE):
            assert read_chat_template(given) == DEMO_TEMPLATE
        odd = tmp_path / "{own}"
        odd.write_text(DEMO_TEMPLATE, encoding="utf-8")
        assert read_chat_template(odd) == DEMO_TEMPLATE
        odd.write_text("\ufeff" + DEMO_TEMPLATE, encoding="utf-8")
        assert read_chat_template(odd) == DEMO_TEMPLATE

    def test_one_of_this_package_by_name(self, tmp_path, monkeypatch):
        """A file of that name wins."""
        monkeypatch.chdir(tmp_path)
        tokenizer = word_tokenizer(19)
        tokenizer.chat_template = read_chat_template("chatml-tools")
        check_writes_tools(tokenizer)
        calls = [{"function": {"name": "look", "arguments": {"x": 1}}}]
        messages = [HELLO, {"role": "assistant", "content": None, "tool_calls": calls}]
        messages.append({"role": "tool", "content": "2"})
        tools = [{"type": "function", "function": {"name": "look"}}]

        def rendered(*chat, **given):
            return render_chat(tokenizer, chat, given, tokenize=False, add_generation_prompt=True)

        start, end = "<|im_start|>", "<|im_end|>\n"
        turns = f"{start}user\n{HELLO['content']}{end}{start}assistant\n"
        assert rendered(HELLO) == turns
        system = {"role": "system", "content": "Be brief."}
        assert rendered(system, HELLO) == f"{start}system\nBe brief.{end}{turns}"
        text = rendered(system, *messages, tools=tools)
        assert text.startswith(f"{start}system\nBe brief.\n\nYou can call")
        assert text.count("system\n") == 1
        assert '<tools>\n{"name": "look"}\n</tools>' in text
        assert text.endswith(
            f'{turns}<tool_call>{{"name": "look", "arguments": {{"x": 1}}}}</tool_call>{end}'
            f"{start}tool\n2{end}{start}assistant\n"
        )
        (tmp_path / "chatml-tools").write_text("{{ messages }}", encoding="utf-8")
        assert read_chat_template("chatml-tools") == "{{ messages }}"

    def test_pages_and_docstrings_name_them(self):
        pages = [page.read_text() for page in Path(__file__).parents[2].glob("docs/*.md")]
        texts = [LLM.__init__.__doc__, load_target.__doc__, *(p for p in pages if "--chat-template`" in p)]
        assert all(name in text for name in TEMPLATES for text in texts)

    def test_too_large(self, tmp_path):
        (tmp_path / "long").write_text("{{ messages }}" + "a" * 2**20)
        with pytest.raises(ValueError, match=r"long has 1,048,590 bytes; it may have 1,048,576 \(1 MiB\)"):
            read_chat_template(tmp_path / "long")
        (tmp_path / "many").write_text("{{ messages }}" + "{{a}}" * 2**13)
        with pytest.raises(ValueError, match="many has more than 16,384 values in its 40,974 bytes"):
            read_chat_template(tmp_path / "many")

    @pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tools.jinja"])
    def test_a_byte_order_mark_in_a_checkpoint(self, tmp_path, name):
        """transformers would put it into every prompt."""
        tokenizer = word_tokenizer(19)
        tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ messages }}"}
        tokenizer.save_pretrained(tmp_path)
        path = tmp_path / name
        path.write_text("\ufeff{{ messages }}", encoding="utf-8")
        templates = load_tokenizer(tmp_path).chat_template
        assert templates == {"default": "{{ messages }}", "tools": "{{ messages }}"}
        shutil.rmtree(tmp_path / "additional_chat_templates")
        (tmp_path / "chat_template.jinja").write_text("\ufeff{{ messages }}", encoding="utf-8")
        assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            (
                "no/such.jinja",
                FileNotFoundError,
                "^chat_template is 'no/such.jinja', which is no file and none of chatml-tools; a Jinja",
            ),
            ("{% if %}{{ messages }}", ValueError, "^chat_template is no Jinja template: line 1: "),
            ("{# messages #}{{ tools }}", ValueError, "^chat_template does not read `messages`"),
            (5, TypeError, "^chat_template must be a file or a Jinja text, not 5"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_what_is_no_template(self, given, error, message):
        with pytest.raises(error, match=message):
            read_chat_template(given)

    def test_errors_in_a_file_name_it(self, tmp_path):
        file = tmp_path / "own.jinja"
        file.write_text("{{ messages }}\n{% endfor %}")
        with pytest.raises(ValueError, match=r"own\.jinja is no Jinja template: line 2: "):
            read_chat_template(file)
        file.write_bytes(b"\xff{{ messages }}")
        with pytest.raises(ValueError, match=r"own\.jinja is no UTF-8 text: "):
            read_chat_template(file)
        with pytest.raises(ValueError, match="is a folder, not a file"):
            read_chat_template(tmp_path)

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("{{ messages[0].x + 1 }}", "has no attribute 'x'"),
            ("{{ 1 // (messages | length - 1) }}", "division"),
            ("{{ '{a}'.format(messages) }}", "'a'"),
            ("{% for m in messages %}", "Unexpected end of template"),
        ],
    )
    def test_one_that_fails_is_named_with_what_to_do(self, template, said):
        with pytest.raises(TemplateFailed, match=f"^the chat template fails on the conversation: .*{said}"):
            rendered(template, [HELLO])

    @pytest.mark.parametrize(
        "template",
        [
            *(begin * 100_000 + "{{ messages }}" + end * 100_000 for begin, end in BLOCKS),
            "{{ " + "(" * 100_000 + "messages" + ")" * 100_000 + " }}",
            "{{ messages" + ".a" * 3000 + " }}",
            # What Jinja reads and Python does not compile.
            "{% for m in messages %}" * 25 + "{% endfor %}" * 25,
        ],
        ids=lambda template: f"{template[:6]} {len(template)}",
    )
    def test_one_that_is_nested_too_deeply_is_blamed_itself(self, template):
        why = "it has more than 16,384 values" if template.count("{") > 2**14 else "it is nested too deeply"
        with pytest.raises(TemplateFailed, match=r"^the chat template cannot be compiled: " + why):
            rendered(template, [HELLO])
        with pytest.raises(ValueError, match=r"^chat_template cannot be compiled: " + why):
            read_chat_template(template)
        TOKENIZER.chat_template = template
        check_writes_tools(TOKENIZER)  # the error is the rendering's

    def test_one_that_calls_itself_without_end(self):
        template = "{% macro f() %}{{ f() }}{% endmacro %}{{ messages and f() }}"
        with pytest.raises(
            ValueError, match=r"^the chat template recurses too deeply: it calls itself without end"
        ):
            rendered(template, [HELLO])

    def test_names_that_a_template_reads(self):
        template = "{# tools #}{% set a = messages %}{% for m in a %}{{ m.tools }}{{ b }}{% endfor %}"
        assert variables_of(template) == {"messages", "b"}
        assert "tools" in variables_of("{% if tools %}{{ tools | tojson }}{% endif %}")

    def test_tools_need_a_template_that_writes_them(self):
        TOKENIZER.chat_template = "{# tools #}{{ messages }}"
        with pytest.raises(ValueError, match=r"^the chat template does not write tools: .*--chat-template"):
            check_writes_tools(TOKENIZER)
        # Of several templates the one that is meant for tools.
        for template in ({"default": DEMO_TEMPLATE, "tool_use": "{{ tools }}"}, "{{ tools }}", "{% if %}"):
            TOKENIZER.chat_template = template
            check_writes_tools(TOKENIZER)
