"""Texts taken apart wherever their pieces begin."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax.serve import json_calls, tagged_calls
from jetspec_jax.serve.choice import ChoiceText
from jetspec_jax.serve.parsers import REASONING
from jetspec_jax.serve.pieces import Pieces
from jetspec_jax.serve.tools import Function, Tool

TEXT = {"type": "string"}
SCHEMAS = {"look": {"s": TEXT, "x": {}}, "write": {"text": TEXT, "to": TEXT}, "now": {}}
TOOLS = [
    Tool(
        type="function",
        function=Function(name=name, parameters={"type": "object", "properties": properties}),
    )
    for name, properties in SCHEMAS.items()
]
THINKING = "<think>\na < b\n</think>\n\nSo <think>"
JSON_CALL = '<tool_call>\n{"name": "look", "arguments": {"s": "1", "x": 1}}\n</tool_call>'
TAGGED_CALL = (
    "<tool_call>\n<function=look>\n<parameter=s>\n1\n</parameter>\n<parameter=x>\n1\n</parameter>\n"
    "</function>\n</tool_call>"
)
LOOK = ("look", {"s": "1", "x": 1})
SIZES = (1, 2, 3, 5, 7, 1000)


def put_together(pieces, *, reasoning=None, parser=None, begun=False, forced=None, several=True, cut=False):
    markers = None if reasoning is None else REASONING[reasoning]
    own = ChoiceText(markers, begun=begun, parser=parser, tools=TOOLS, forced=forced, several=several)
    told = [own.feed(piece, last=False) for piece in pieces] + [own.feed("", last=True, cut=cut)]
    calls = [call["function"] for one in told for call in one["tool_calls"]]
    return (
        "".join(one["content"] for one in told),
        "".join(one["reasoning_content"] for one in told),
        [(call["name"], json.loads(call["arguments"])) for call in calls],
    )


def taken_apart(text, size, **settings):
    return put_together([text[start : start + size] for start in range(0, len(text), size)], **settings)


def everywhere(text, **settings):
    """What a text is taken apart to, which its pieces do not change."""
    first, *others = [taken_apart(text, size, **settings) for size in SIZES]
    assert all(other == first for other in others)
    return first


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
            ("qwen3", " \n" * 40 + "no", False, " \n" * 40 + "no", ""),
            (None, THINKING, False, THINKING, ""),
        ],
    )
    def test_reasoning(self, reasoning, text, begun, content, thought):
        assert everywhere(text, reasoning=reasoning, begun=begun) == (content, thought, [])

    @pytest.mark.parametrize(("parser", "call"), [("hermes", JSON_CALL), ("qwen3_coder", TAGGED_CALL)])
    def test_calls(self, parser, call):
        assert everywhere(call, parser=parser) == ("", "", [LOOK])
        assert everywhere(f"a\n\n{call}\n{call}\n b ", parser=parser) == ("ab ", "", [LOOK, LOOK])
        broken = f"a <tool_call>b</tool_call> {call}"
        assert everywhere(broken, parser=parser) == ("a <tool_call>b</tool_call>", "", [LOOK])
        assert everywhere(call[:-3], parser=parser) == ("", "", [LOOK])
        assert everywhere(call[:-30], parser=parser) == (call[:-30], "", [])
        assert everywhere(call + call, parser=parser, several=False) == ("", "", [LOOK])
        both = everywhere(f"<think>x</think>{call}", parser=parser, reasoning="qwen3")
        assert both == ("", "x", [LOOK])

    def test_forced_calls(self):
        assert everywhere('{"x": 1}', forced="look") == ("", "", [("look", {"x": 1})])
        listed = '[{"name": "look", "arguments": {"x": 1}}, {"name": "look", "arguments": {}}]'
        assert everywhere(listed, forced="") == ("", "", [("look", {"x": 1}), ("look", {})])
        second = listed.index(", {")
        for end in (second, second + 1, second + 5, len(listed) - 4, len(listed) - 1):
            cut = everywhere(listed[:end], forced="", cut=True)
            assert cut == ("", "", [("look", {"x": 1})] + [("look", {})] * (end == len(listed) - 1))
        for end in range(second):
            assert everywhere(listed[:end], forced="", cut=True) == (listed[:end], "", [])
        quoted = json.dumps([{"name": "look", "arguments": {"x": '}, {"'}}, {"name": "look"}])
        assert everywhere(quoted[:-1], forced="", cut=True)[2] == [("look", {"x": '}, {"'}), ("look", {})]
        assert everywhere('{"x": 1', forced="look") == ('{"x": 1', "", [])


TAGS = ("<tool_call>", "</parameter>", "</function>", "</tool_call>")
DROPPED = [own for count in range(1, 4) for own in itertools.combinations(TAGS, count)]


class TestTags:
    @pytest.mark.parametrize("dropped", DROPPED, ids=" ".join)
    @pytest.mark.parametrize("with_line", [False, True])
    def test_calls_that_lack_tags(self, dropped, with_line):
        call = TAGGED_CALL + "\n"
        for tag in dropped:
            call = call.replace(tag + "\n" * with_line, "")
        if set(TAGS[1:]) <= set(dropped):
            # No more than the beginning of a value that never ends.
            assert everywhere(call, parser="qwen3_coder")[2] == []
            return
        assert everywhere(call, parser="qwen3_coder") == ("", "", [LOOK])
        assert everywhere(f"a\n{call}{call} b ", parser="qwen3_coder") == ("ab ", "", [LOOK, LOOK])

    @pytest.mark.parametrize("dropped", [(), *((tag,) for tag in TAGS), TAGS[2:]], ids=" ".join)
    def test_calls_on_one_line(self, dropped):
        call = TAGGED_CALL.replace("\n", "")
        for tag in dropped:
            call = call.replace(tag, "")
        assert everywhere(call, parser="qwen3_coder") == ("", "", [LOOK])
        assert everywhere(call + call, parser="qwen3_coder") == ("", "", [LOOK, LOOK])

    @pytest.mark.parametrize(
        "text",
        [
            *(f"a {tag} b" for tag in (*TAGS, "<function=look>", "<parameter=to>", "<parameter=other>")),
            *(f"a\n{tag}\nb" for tag in (*TAGS, "<parameter=to>", "<parameter=other>", "<parameter=text>")),
            *("<tool_call>", "</function>", "a </parameter></function></tool_call> b"),
            *(TAGGED_CALL, f"a\n{TAGGED_CALL}\nb", f"{TAGGED_CALL}\n{TAGGED_CALL}", f"a {TAGGED_CALL} b"),
            TAGGED_CALL.replace("\n", ""),
            TAGGED_CALL.replace("<tool_call>\n", "").replace("\n</tool_call>", ""),
        ],
    )
    def test_values_that_quote_tags(self, text):
        call = (
            f"<tool_call>\n<function=write>\n<parameter=text>\n{text}\n</parameter>\n<parameter=to>\nx\n"
            "</parameter>\n</function>\n</tool_call>"
        )
        written = [("write", {"text": text, "to": "x"})]
        assert everywhere(call, parser="qwen3_coder") == ("", "", written)
        assert everywhere(f"{call}\n{call} a", parser="qwen3_coder") == ("a", "", written * 2)
        turned = (
            "<tool_call>\n<function=write>\n<parameter=to>\nx\n</parameter>\n<parameter=text>\n"
            f"{text}\n</parameter>\n</function>\n</tool_call>"
        )
        assert everywhere(turned, parser="qwen3_coder") == ("", "", written)

    @pytest.mark.parametrize(
        "text",
        [
            *("a <function=look> b", "a `<function=look><parameter=s>1</parameter></function>` b"),
            "```\n" + TAGGED_CALL.removeprefix("<tool_call>\n") + "\n```",
            "<function=unknown><parameter=s>1</parameter></function>",
            *(
                "<tool_call>\n<function=look>\n<parameter=s>\nhal",
                "<tool_call>\n<function=now>",
                "<tool_call>",
            ),
            "<function=look><parameter=s>1</parameter><parameter=s>2</parameter></function>",
        ],
    )
    def test_what_is_no_call_stays_text(self, text):
        assert everywhere(text, parser="qwen3_coder") == (text, "", [])

    def test_a_call_that_is_cut_off_has_all_arguments_or_is_text(self):
        for end in range(len(TAGGED_CALL)):
            text = TAGGED_CALL[:end]
            whole = "</parameter>\n</" in text
            expected = ("", "", [LOOK]) if whole else (text, "", [])
            assert put_together([text], parser="qwen3_coder", cut=True) == expected

    def test_tags_may_be_indented(self):
        call = TAGGED_CALL.replace("\n<", "\n  <")
        assert everywhere(call, parser="qwen3_coder") == ("", "", [LOOK])

    def test_functions_without_parameters(self):
        for text in ("<function=now>\n</function>", "<tool_call><function=now></tool_call>"):
            assert everywhere(text, parser="qwen3_coder") == ("", "", [("now", {})])


class TestJson:
    @pytest.mark.parametrize(
        ("text", "calls"),
        [
            (JSON_CALL.removesuffix("</tool_call>"), [LOOK]),
            (JSON_CALL.replace("}}", "}"), [LOOK]),
            (JSON_CALL.replace("\n</", ' {"name": "now"}\n</'), [LOOK, ("now", {})]),
            (JSON_CALL.replace('{"s": "1", "x": 1}', json.dumps('{"s": "1", "x": 1}')), [LOOK]),
            (JSON_CALL.replace('"1"', '"a\nb"'), [("look", {"s": "a\nb", "x": 1})]),
            (JSON_CALL.replace('"1"', '"\\ud800"'), [("look", {"s": "\ud800", "x": 1})]),
            *(
                (JSON_CALL.replace('"1"', json.dumps(own)), [("look", {"s": own, "x": 1})])
                for own in ("a </tool_call> b", "a <tool_call> b", '"</tool_call>', "\\", JSON_CALL, "}{")
            ),
        ],
    )
    def test_calls(self, text, calls):
        assert everywhere(text, parser="hermes") == ("", "", calls)
        assert everywhere(f"a {text} {JSON_CALL} b", parser="hermes") == ("ab", "", [*calls, LOOK])

    @pytest.mark.parametrize(
        "inside", ["no JSON", '{"name": "look"', '{"name": 1}', "[]", "{1}", '{"x": [}', '{"name": "a" \\ }']
    )
    def test_what_is_no_call_stays_text(self, inside):
        text = f"<tool_call>{inside}</tool_call>"
        assert everywhere(text, parser="hermes") == (text, "", [])
        assert everywhere(f"{text}{JSON_CALL}", parser="hermes") == (text, "", [LOOK])

    def test_a_string_that_never_ends_hides_no_later_call(self):
        broken = JSON_CALL.replace('"1"', '"1')
        assert everywhere(f"{broken}\n{JSON_CALL}", parser="hermes") == (broken, "", [LOOK])


NEXT = "<|end|><|start|>assistant"
THOUGHT, ANSWER = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
PREAMBLE, ASKS = (
    "<|channel|>commentary<|message|>",
    "<|channel|>commentary to=functions.look <|constrain|>json<|message|>",
)


class TestMessages:
    @pytest.mark.parametrize(
        ("text", "content", "thought"),
        [
            (f"{THOUGHT}A{NEXT}{ANSWER}B", "B", "A"),
            (f"{THOUGHT}A{NEXT}{THOUGHT}C{NEXT}{ANSWER}B<|return|>", "B", "A\nC"),
            (f"{THOUGHT}A{NEXT}{PREAMBLE}P{NEXT}{THOUGHT}C{NEXT}{ANSWER}B", "P\nB", "A\nC"),
            (f"{PREAMBLE}P{NEXT}{ANSWER}B", "P\nB", ""),
            (f"{THOUGHT}A{NEXT}<|channel|>final <|constrain|>json<|message|>{{}}", "{}", "A"),
            (f"<|start|>assistant{THOUGHT}A{NEXT}<|message|>B", "B", "A"),
            *((f"{THOUGHT}A", "", "A"), (ANSWER, "", ""), ("<|channel|>anal", "", ""), ("", "", "")),
            *(
                (f"{ANSWER}a <b| <|x|> <|en", "a <b| <|x|> <|en", ""),
                ("no mark", "no mark", ""),
                ("to", "to", ""),
            ),
            (f"{THOUGHT}A{ANSWER}B", "B", "A"),
            (f"{THOUGHT}A{NEXT} to=browser.search<|channel|>analysis<|message|>{{}}<|call|>", "", "A\n{}"),
            (f"{ASKS}{{}}<|call|>", "", "{}"),
        ],
    )
    def test_thoughts_and_answers(self, text, content, thought):
        assert everywhere(text, reasoning="openai_gptoss") == (content, thought, [])

    def test_a_thought_that_the_prompt_has_begun(self):
        text = f"A{NEXT}{ANSWER}B"
        assert everywhere(text, reasoning="openai_gptoss", begun=True) == ("B", "A", [])

    @pytest.mark.parametrize(
        ("text", "content", "thought", "calls"),
        [
            (f'{THOUGHT}A{NEXT}{ASKS}{{"s": "1", "x": 1}}<|call|>', "", "A", [LOOK]),
            (f'{PREAMBLE}P{NEXT} to=functions.look{PREAMBLE}{{"s": "1", "x": 1}}', "P", "", [LOOK]),
            (f' to=functions.look{PREAMBLE}{{"s": "1", "x": 1}}<|call|>', "", "", [LOOK]),
            (f'{ASKS}{{"s": "1", "x": 1}}<|call|><|start|>assistant{ASKS}{{}}', "", "", [LOOK, ("look", {})]),
            (f'{ASKS}{{"s": "1", "x"', '{"s": "1", "x"', "", []),
            (f"{ASKS}{NEXT}{ANSWER}B", "B", "", []),
        ],
    )
    def test_calls(self, text, content, thought, calls):
        told = everywhere(text, reasoning="openai_gptoss", parser="openai")
        assert told == (content, thought, calls)


WORDS = st.sampled_from(
    [
        *(*TAGS, "<function=look>", "<function=write>", "<parameter=s>", "<parameter=x>", "<parameter=text>"),
        *("a", " ", "\n", "<", '"', "\\", "{", "}", '{"name": "look", "arguments": {', "<think>", "</think>"),
        *("```", "`", "<|channel|>", "analysis", "<|message|>", "<|start|>", "to=functions.look", "<|end|>"),
        *(JSON_CALL, TAGGED_CALL, TAGGED_CALL.replace("\n", ""), ASKS, "{}", "<|call|>"),
    ]
)
READERS = [("hermes", "qwen3"), ("hermes", None), ("qwen3_coder", "deepseek_r1"), ("qwen3_xml", None)]


@given(
    words=st.lists(WORDS, max_size=25),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    readers=st.sampled_from([*READERS, ("openai", "openai_gptoss"), (None, "openai_gptoss")]),
    cut=st.booleans(),
)
def test_pieces_do_not_matter_and_no_text_is_lost(words, sizes, readers, cut):
    text, pieces, place = "".join(words), [], 0
    for size in itertools.cycle(sizes):
        pieces.append(text[place : place + size])
        place += size
        if place >= len(text):
            break
    settings = {"parser": readers[0], "reasoning": readers[1], "cut": cut}
    whole = put_together([text], **settings)
    assert put_together(pieces, **settings) == whole
    if readers[1] != "openai_gptoss" and not whole[2] and not whole[1]:
        assert whole[0] == text or readers[1] is not None


HOSTILE = [
    *(
        "<tool_call>",
        '<tool_call>{"',
        '<tool_call>{"","',
        '<tool_call>{"a\\"',
        "<function=",
        "<parameter=a",
        "   ",
    ),
    *(
        "\n<function=look>\n<parameter=s>\n",
        "\n<function=look>\n<parameter=s>\n\n<function=look>\n</function>\n",
    ),
    "x <tool_call><function=look><parameter=s>\n</function>\ny",
    *("<function=look><parameter=s>\n1\n</function>\nx\n", "</parameter>", "</function>\n", "\n</tool_call>"),
    "<tool_call>\n<function=look>\n<parameter=s>\n1\n</parameter>\nx",
]


@pytest.mark.parametrize("block", HOSTILE)
@pytest.mark.parametrize("head", ["", "<function=look>\n<parameter=s>\n", '<tool_call>{"name": "'])
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_each_character_is_read_a_bounded_number_of_times(monkeypatch, block, head, parser):
    read = []

    def counted(own, method):
        def call(self, *arguments):
            before = arguments[1] if method == "read" and own is json_calls._Object else self.place
            result = getattr_of[own, method](self, *arguments)
            read.append((result if own is json_calls._Object else self.place) - before)
            return result

        return call

    getattr_of = {(own, "read"): own.read for own in (Pieces, json_calls._Object)}
    for own, method in getattr_of:
        monkeypatch.setattr(own, method, counted(own, method))
    text = head + block * (2000 // len(block))
    for size in (7, len(text)):
        read.clear()
        taken_apart(text, size, parser=parser)
        assert sum(read) <= (tagged_calls._MOST_OPEN + 2) * len(text)


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
