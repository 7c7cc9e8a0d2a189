"""Texts taken apart wherever their pieces begin."""

import json

import pytest

from jetspec_jax.serve.choice import ChoiceText
from jetspec_jax.serve.parsers import REASONING
from jetspec_jax.serve.tools import Function, Tool

TOOLS = [
    Tool(
        type="function",
        function=Function(
            name="look", parameters={"type": "object", "properties": {"s": {"type": "string"}, "x": {}}}
        ),
    )
]
THINKING = "<think>\na < b\n</think>\n\nSo <think>"
HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
JSON_CALL = '<tool_call>\n{"name": "look", "arguments": {"s": "1", "x": 1}}\n</tool_call>'
TAGGED_CALL = (
    "<tool_call>\n<function=look>\n<parameter=s>\n1\n</parameter>\n<parameter=x>\n1\n</parameter>\n"
    "</function>\n</tool_call>"
)


def taken_apart(text, size, *, reasoning=None, parser=None, begun=False, forced=None, several=True):
    markers = None if reasoning is None else REASONING[reasoning]
    own = ChoiceText(markers, begun=begun, parser=parser, tools=TOOLS, forced=forced, several=several)
    content, thought, calls = "", "", []
    for start in range(0, len(text), size):
        told = own.feed(text[start : start + size], last=False)
        content, thought = content + told["content"], thought + told["reasoning_content"]
        calls += told["tool_calls"]
    told = own.feed("", last=True)
    calls = [call["function"] for call in calls + told["tool_calls"]]
    calls = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return content + told["content"], thought + told["reasoning_content"], calls


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
class TestPieces:
    @pytest.mark.parametrize(
        ("reasoning", "text", "begun", "content", "thought"),
        [
            ("qwen3", THINKING, False, "\n\nSo <think>", "\na < b\n"),
            ("deepseek_r1", THINKING.removeprefix("<think>"), True, "\n\nSo <think>", "\na < b\n"),
            ("qwen3", "no <think>x</think>", False, "no <think>x</think>", ""),
            ("qwen3", "  <thin", False, "  <thin", ""),
            ("qwen3", "<think>never </thin", False, "", "never </thin"),
            ("gemma4", "<|channel>thought\nHm.<channel|>Yes.", False, "Yes.", "Hm."),
            ("openai_gptoss", HARMONY, False, "Yes.", "Hm."),
            ("openai_gptoss", "<|channel|>final<|message|>Yes.", False, "Yes.", ""),
            (None, THINKING, False, THINKING, ""),
        ],
    )
    def test_reasoning(self, size, reasoning, text, begun, content, thought):
        assert taken_apart(text, size, reasoning=reasoning, begun=begun) == (content, thought, [])

    @pytest.mark.parametrize(("parser", "call"), [("hermes", JSON_CALL), ("qwen3_coder", TAGGED_CALL)])
    def test_calls(self, size, parser, call):
        own = ("look", {"s": "1", "x": 1})
        assert taken_apart(call, size, parser=parser) == ("", "", [own])
        assert taken_apart(f"a\n\n{call}\n{call}\n b ", size, parser=parser) == ("ab ", "", [own, own])
        broken = f"a <tool_call>b</tool_call> {call}"
        assert taken_apart(broken, size, parser=parser) == ("a <tool_call>b</tool_call>", "", [own])
        assert taken_apart(call[:-3], size, parser=parser) == (call[:-3], "", [])
        assert taken_apart(call + call, size, parser=parser, several=False) == ("", "", [own])
        both = taken_apart(f"<think>x</think>{call}", size, parser=parser, reasoning="qwen3")
        assert both == ("", "x", [own])

    def test_forced_calls(self, size):
        assert taken_apart('{"x": 1}', size, forced="look") == ("", "", [("look", {"x": 1})])
        listed = '[{"name": "look", "arguments": {"x": 1}}, {"name": "look", "arguments": {}}]'
        assert taken_apart(listed, size, forced="") == ("", "", [("look", {"x": 1}), ("look", {})])
        assert taken_apart(listed[:-4], size, forced="") == (listed[:-4], "", [])


@pytest.mark.parametrize(("forced", "parser"), [("", None), (None, "hermes"), (None, "qwen3_coder")])
def test_arguments_that_are_nested_too_deeply_stay_text(forced, parser):
    """Python's JSON calls itself for each level; how many it reads is another number than it writes."""
    found = set()
    for depth in (10, *range(850, 1050, 3), 100_000):
        arguments = '{"a": ' * depth + "1" + "}" * depth
        call = f'{{"name": "look", "arguments": {arguments}}}'
        if parser == "qwen3_coder":
            call = f"<function=look><parameter=x>{arguments}</parameter></function>"
        text = f"[{call}]" if forced == "" else f"<tool_call>{call}</tool_call>"
        own = ChoiceText(None, begun=False, parser=parser, tools=TOOLS, forced=forced, several=True)
        told = own.feed(text, last=True)
        assert bool(told["tool_calls"]) != (told["content"] == text)
        found.add(bool(told["tool_calls"]))
    # What the readers of parameters cannot read as JSON is a text.
    assert found == ({True} if parser == "qwen3_coder" else {True, False})
