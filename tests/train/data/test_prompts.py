"""Prompts as they are read, and as token ids: what the target continues, and what is marked as its own."""

import json
import sys
import types

import numpy as np
import pytest

from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_TARGET
from tests.train.folders import learnt
from train.data.prompts import Dropped, Entry, read_entries
from train.data.rendering import Encoder

USER = {"role": "user", "content": "def read(path):"}
ANSWER = {"role": "assistant", "content": "    return open(path)"}
SECOND = [{"role": "user", "content": "class A:"}, {"role": "assistant", "content": "    pass\n    x = 1"}]
SYSTEM = {"role": "system", "content": "Python only."}

#: Marks the answers itself, as some published templates do.
MARKED_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: Ends turns with words alone.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture
def tokenizer():
    return load_tokenizer(DEMO_TARGET)


def chat(*messages):
    return Entry("f:3", "messages", list(messages))


class TestReading:
    def test_all_kinds_in_order(self, tmp_path):
        path = tmp_path / "p.jsonl"
        rows = [
            {"messages": [USER, ANSWER], "text": "not this", "id": 7},
            {"prompt": "x", "text": "a\u2028b", "more": [1]},
            {"prompt": "é = "},
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        entries = read_entries(path)
        assert [(e.where, e.kind, e.value) for e in entries] == [
            (f"{path}:1", "messages", [USER, ANSWER]),
            (f"{path}:2", "text", "a\u2028b"),
            (f"{path}:3", "prompt", "é = "),
        ]

    def test_line_separators_within_strings_and_the_last_newline(self, tmp_path):
        path = tmp_path / "p.jsonl"
        path.write_bytes('{"text": "a\u2028b\x85c"}\r\n{"text": "d"}'.encode())
        assert [entry.value for entry in read_entries(path)] == ["a\u2028b\x85c", "d"]

    def test_a_limit_reads_no_further(self, tmp_path):
        path = tmp_path / "p.jsonl"
        path.write_text('{"text": "a"}\n{"text": "b"}\nnonsense\n')
        assert [entry.value for entry in read_entries(path, 2)] == ["a", "b"]
        with pytest.raises(ValueError, match="at least 1 entry"):
            read_entries(path, 0)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"text": "a"', "not JSON .*every line must be a JSON object"),
            (b"", "an empty line"),
            (b"{}", r"expected one of the keys messages, text, prompt, there are \[\]"),
            (b'{"text": ""}', '"text" is empty'),
            (b'{"text": "\\ud800"}', "half a surrogate pair"),
            (b'{"text": "\xff"}', "not UTF-8: invalid start byte at its byte 10"),
            (b'{"messages": [{"role": "user"}]}', r'messages\[0\] has no "content"'),
        ],
    )
    def test_a_bad_line_is_named_with_its_number(self, tmp_path, line, message):
        path = tmp_path / "p.jsonl"
        path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
        with pytest.raises(ValueError, match=rf"p\.jsonl:2: .*{message}"):
            read_entries(path)

    def test_a_byte_order_mark(self, tmp_path):
        path = tmp_path / "p.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xef\xbb\xbfb"}\n')
        assert [entry.value for entry in read_entries(path)] == ["a", "\ufeffb"]

    def test_rows_that_are_no_entries_are_named_and_the_others_are_kept(self, tmp_path, caplog):
        path = tmp_path / "p.jsonl"
        path.write_text('{"text": "a"}\nnonsense\n{"text": "b"}\n{"messages": []}\n{"text": "c"}\n')
        dropped = Dropped()
        assert [entry.value for entry in read_entries(path, 2, dropped=dropped)] == ["a", "b"]
        assert [entry.value for entry in read_entries(path, dropped=dropped)] == ["a", "b", "c"]
        lines = [reason.removeprefix(f"{path}:")[:2] for reason in dropped.reasons]
        assert lines == ["2:", "2:", "4:"]
        assert [record.getMessage() for record in caplog.records] == [
            f"dropped: {reason}" for reason in dropped.reasons
        ]

    @pytest.mark.parametrize("content", [b"", b"\n"])
    def test_a_file_without_entries(self, tmp_path, content):
        path = tmp_path / "p.jsonl"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"holds no entries|p\.jsonl:1: an empty line"):
            read_entries(path)

    def test_no_such_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no file .*absent\.jsonl"):
            read_entries(tmp_path / "absent.jsonl")


class TestDatasets:
    @pytest.fixture
    def asked(self, monkeypatch):
        """What a stand-in for the library was asked for; it knows one data set."""
        calls = []

        def load_dataset(path, name=None, *, split, streaming):
            calls.append((path, name, split, streaming))
            if path != "owner/chats":
                raise RuntimeError("no such data set")
            return [{"messages": [USER]}, {"text": "a", "label": 1}, {"prompt": "b"}]

        module = types.ModuleType("datasets")
        module.load_dataset = load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)
        return calls

    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("owner/chats", ("owner/chats", None, "train", False)),
            ("owner/chats:test[:10%]", ("owner/chats", None, "test[:10%]", False)),
            ("owner/chats/small:validation", ("owner/chats", "small", "validation", False)),
        ],
    )
    def test_names(self, asked, name, call):
        entries = read_entries(name)
        assert asked == [call]
        assert [(e.where, e.kind) for e in entries] == [
            (f"{name} row {i}", kind) for i, kind in enumerate(("messages", "text", "prompt"))
        ]

    def test_a_data_set_that_cannot_be_loaded(self, asked):
        with pytest.raises(
            FileNotFoundError, match=r"no file owner/other; .* RuntimeError: no such data set"
        ):
            read_entries("owner/other")

    def test_without_the_library(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(
            ValueError, match=r'no file owner/chats; .* pip install "jetspec-jax\[datasets\]"'
        ):
            read_entries("owner/chats")


class TestPrompts:
    @pytest.mark.parametrize(
        "messages", [[USER], [USER, ANSWER], [SYSTEM, USER, ANSWER], [USER, ANSWER, *SECOND]]
    )
    def test_the_last_answer_is_dropped(self, tokenizer, messages):
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        ids = Encoder(tokenizer).prompt(chat(*messages)).tolist()
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in asked)
        assert ids == tokenizer.encode(turns + "<|im_start|>assistant\n", add_special_tokens=False)

    @pytest.mark.parametrize("kind", ["text", "prompt"])
    def test_texts_are_continued_as_they_are(self, tokenizer, kind):
        ids = Encoder(tokenizer).prompt(Entry("here:1", kind, "import os\n"))
        assert ids.dtype == np.int32
        assert ids.tolist() == tokenizer.encode("import os\n")

    def test_template_arguments_reach_the_template(self, tokenizer):
        tokenizer.chat_template = "{{ word }}{{ messages[0]['content'] }}"
        ids = Encoder(tokenizer, template_arguments={"word": "def "}).prompt(chat(USER))
        assert tokenizer.decode(ids.tolist()) == "def def read(path):"
        with pytest.raises(ValueError, match="tokenize cannot be template arguments"):
            Encoder(tokenizer, template_arguments={"tokenize": False, "word": "x"})


class TestDocuments:
    @pytest.mark.parametrize("template", [None, MARKED_TEMPLATE])
    @pytest.mark.parametrize(
        "messages",
        [
            [USER, ANSWER],
            [SYSTEM, USER, ANSWER, *SECOND],
            [USER, ANSWER, {"role": "tool", "content": "1"}, ANSWER, USER],
        ],
    )
    def test_the_answers_and_their_ends_are_marked(self, tokenizer, template, messages):
        if template is not None:
            tokenizer.chat_template = template
        encoder = Encoder(tokenizer)
        [document] = encoder.documents(chat(*messages))
        taught = messages if messages[-1]["role"] == "assistant" else messages[:-1]
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in taught)
        assert document.tokens.tolist() == tokenizer.encode(turns, add_special_tokens=False)
        expected = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert learnt(tokenizer, document, special=True) == expected

    def test_answers_without_an_end_of_turn_token(self, tokenizer):
        tokenizer.chat_template = PLAIN_TEMPLATE
        encoder = Encoder(tokenizer)
        [document] = encoder.documents(chat(USER, {"role": "assistant", "content": "x"}, USER))
        assert learnt(tokenizer, document, special=True) == [" x\n\n"]

    def test_the_end_of_sequence_ends_a_turn_where_it_is_no_special_token(self, tokenizer):
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] + '\\n' + m['content'] + ';\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
        )
        [end] = tokenizer.encode(";", add_special_tokens=False)
        conversation = chat(USER, {"role": "assistant", "content": "x"})
        whole, cut = Encoder(tokenizer), Encoder(tokenizer, end_ids=(end,))
        assert learnt(tokenizer, *whole.documents(conversation), special=True) == ["x;\n"]
        assert learnt(tokenizer, *cut.documents(conversation), special=True) == ["x;"]

    def test_of_a_text_all_but_the_first_token(self, tokenizer):
        [document] = Encoder(tokenizer).documents(Entry("f:3", "text", "import os\n"))
        assert document.tokens.tolist() == tokenizer.encode("import os\n")
        assert document.learn.tolist() == [False] + [True] * (len(document.tokens) - 1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("form", "entry", "message"),
        [
            ("prompt", chat(ANSWER), "no message stands before"),
            ("prompt", chat(SYSTEM), "a message of the system stands before"),
            ("prompt", chat(USER, ANSWER, ANSWER), "a message of the assistant stands before"),
            ("documents", chat(USER), "a document without assistant tokens"),
            ("documents", chat(ANSWER, USER), "the conversation begins with the assistant"),
            ("documents", Entry("f:3", "prompt", "x = "), 'a "prompt" has no continuation'),
            # The newline of the header and those of the answer are one token.
            (
                "documents",
                chat(USER, {"role": "assistant", "content": "\nx = 1"}),
                "where message 1 begins, a token spans both sides",
            ),
        ],
    )
    def test_nothing_to_ask_or_to_learn(self, tokenizer, form, entry, message):
        with pytest.raises(ValueError, match=f"f:3: {message}"):
            getattr(Encoder(tokenizer), form)(entry)

    @pytest.mark.parametrize("form", ["prompt", "documents"])
    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('no tools here') }}", "the chat template refuses .*no tools here"),
            (None, "the target's tokenizer has no chat template"),
        ],
    )
    def test_the_template(self, tokenizer, form, template, message):
        tokenizer.chat_template = template
        encoder = Encoder(tokenizer)
        assert len(encoder.prompt(Entry("f:3", "text", "x")))
        with pytest.raises(ValueError, match=f"f:3: {message}"):
            getattr(encoder, form)(chat(USER, ANSWER))

    def test_no_tokenizer(self):
        with pytest.raises(ValueError, match="no tokenizer"):
            Encoder(None)
