"""The prompts of a pair: what the target writes, what is kept, what is dropped and why."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from jetspec_jax import load_target
from jetspec_jax.demo import DEMO_TARGET
from tests.train.pair.tiny import changed
from train.data.prompt_filters import REPEATS, SHORT, UNENDED
from train.data.records import Document
from train.data.rendering import Encoder
from train.pair.prompts import (
    LONG,
    UNUSABLE,
    Beginning,
    Written,
    beginnings,
    evaluated_runs,
    mixed,
    read_sources,
    read_written,
    to_write,
)
from train.pair.recipe import Filters, Writing

FREE, CODE, CHAT = "free", "code", "chat"
END = 0
PHRASES = ("Write a", "Fix")


class Words:
    """A tokenizer of whole words and spaces, whose ids are the order in which they were first seen."""

    chat_template = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}"

    def __init__(self):
        self.known = ["<end>"]

    def encode(self, text, add_special_tokens=True):
        parts = text.replace(" ", "\0 ").split("\0")
        self.known += [part for part in dict.fromkeys(parts) if part not in self.known]
        return [self.known.index(part) for part in parts]

    def decode(self, ids):
        return "".join(self.known[i] for i in ids)

    def get_chat_template(self, tools=None):
        return self.chat_template

    def apply_chat_template(self, messages, tokenize=True, **settings):
        text = "".join(f"<user>{message['content']}<end>" for message in messages)
        return self.encode(text) if tokenize else text


def document(tokenizer, phrase, text, *, end=True):
    before, after = tokenizer.encode(f"<user>{phrase}", False), tokenizer.encode(text, False)
    tokens = np.array(before + after + [END] * end, np.int32)
    return Document(tokens, np.arange(len(tokens)) >= len(before))


@pytest.fixture(scope="module")
def encoder():
    target = load_target(DEMO_TARGET)
    return Encoder(target.tokenizer, target.eos_token_ids)


def test_phrases_of_a_kind_take_turns():
    writing = (Writing(FREE, 2), Writing(CODE, 3, PHRASES), Writing(CHAT, 1, ("Why",)))
    assert beginnings(changed(writing=writing)) == [
        *[Beginning(FREE, "")] * 2,
        *[Beginning(CODE, phrase) for phrase in ("Write a", "Fix", "Write a")],
        Beginning(CHAT, "Why"),
    ]


def test_the_target_goes_on_behind_the_mark_of_a_user(encoder):
    recipe = changed(writing=(Writing(FREE, 2), Writing(CODE, 1, PHRASES)))
    prompts = to_write(encoder, recipe)
    assert [encoder.tokenizer.decode(ids.tolist()) for ids in prompts.tokens] == [
        *["<|im_start|>user\n"] * 2,
        "<|im_start|>user\nWrite a",
    ]
    assert {(params.temperature, params.max_tokens) for params in prompts.params} == {
        (1.0, recipe.filters.max_tokens)
    }


def test_a_template_that_changes_what_the_user_says_is_refused():
    tokenizer = load_target(DEMO_TARGET).tokenizer
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(ValueError, match="changes the user's text"):
        to_write(Encoder(tokenizer), changed(writing=(Writing(FREE, 1),)))


def test_what_is_kept_of_what_was_written():
    tokenizer = Words()
    texts = [
        ("", " What is two and two?", True),
        ("", "Why is it", False),
        ("", "Why?", True),
        ("", "a b c d a b c d a b c d", True),
        ("", "a b c d a b c d a b c", True),
        ("Write a", " function that adds.", True),
    ]
    documents = [document(tokenizer, phrase, text, end=end) for phrase, text, end in texts]
    begun = [Beginning(CODE if phrase else FREE, phrase) for phrase, _, _ in texts]
    written = read_written(documents, begun, Encoder(tokenizer, (END,)), Filters())
    assert [(one.kind, one.text) for one in written.prompts] == [
        (FREE, "What is two and two?"),
        (FREE, "a b c d a b c d a b c"),
        (CODE, "Write a function that adds."),
    ]
    assert tokenizer.decode(written.prompts[2].tokens) == "<user>Write a function that adds.<end>"
    assert written.dropped == {(FREE, UNENDED): 1, (FREE, SHORT): 1, (FREE, REPEATS): 1}
    written.check(0.5)
    with pytest.raises(ValueError, match="3 of 6 are kept, and at least 60% must be") as refused:
        written.check(0.6)
    for shown in (
        "'Why is it' (does not end)",
        "'Why?' (too short)",
        "'a b c d a b c d a b c d' (repeats itse",
    ):
        assert shown in str(refused.value)


def test_a_target_that_writes_nothing_is_refused():
    with pytest.raises(ValueError, match=r"0 of 4 are kept.*\(4 too short\); bring prompts"):
        Written([], Counter({(FREE, SHORT): 4}), ["'' (too short)"] * 3).check(0.0)


def test_sources_are_read_and_what_cannot_be_used_is_counted(tmp_path, encoder):
    chats, texts, sets = tmp_path / "chats.jsonl", tmp_path / "texts.jsonl", tmp_path / "gsm8k.jsonl"
    asked = [{"role": "user", "content": "def a():"}, {"role": "assistant", "content": "return 1"}]
    longer = [*asked, {"role": "user", "content": [{"type": "text", "text": "def b():"}]}]
    rows = [
        {"messages": asked},
        {"messages": longer},
        {"messages": [{"role": "user", "content": "x = 1 " * 2000}]},
        {"other": 1},
    ]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts.write_text(json.dumps({"text": "import os\nimport sys\n" * 40}) + "\n")
    sets.write_text(json.dumps({"question": "How many?"}) + "\n")
    recipe = changed(
        prompts=(str(chats), f"gsm8k={sets}"), documents=(str(texts),), beginning_tokens=5, max_tokens=8
    )
    dropped = Counter()
    [first, second, third] = read_sources(recipe, encoder, 2048, dropped)
    assert [(one.kind, one.text) for one in first] == [
        ("chats.jsonl", "def a():"),
        ("chats.jsonl", "def a():\ndef b():"),
    ]
    assert encoder.tokenizer.decode(first[0].tokens).endswith("def a():<|im_end|>\n<|im_start|>assistant\n")
    assert first[1].text == "def a():\ndef b():"
    assert first[1].root == first[0].root == "def a():"  # a conversation is in one split
    assert dropped == {("chats.jsonl", UNUSABLE): 1, ("chats.jsonl", LONG): 1, ("texts.jsonl", UNUSABLE): 0}
    assert [one.form for one in second] == ["published", "plain"]
    assert {one.root for one in second} == {"How many?"}
    assert second[0].text.endswith("\\boxed{}.")
    assert len(third[0].tokens) == 5
    assert third[0].text == encoder.tokenizer.decode(third[0].tokens)
    with pytest.raises(
        ValueError, match=re.escape(f"{chats} has no prompt that can be used in a context of 9")
    ):
        read_sources(changed(prompts=(str(chats),), max_tokens=8), encoder, 9, Counter())


def test_sets_that_cannot_be_trained_on_are_refused(tmp_path, encoder):
    with pytest.raises(ValueError, match=r"^mt-bench has no training split: name a file of other rows, mt-"):
        read_sources(changed(prompts=("mt-bench",)), encoder, 2048, Counter())
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "one"}) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl: row 0 has no 'question'"):
        read_sources(changed(prompts=(f"gsm8k={rows}",)), encoder, 2048, Counter())


def test_weights_begin_with_what_the_target_writes():
    one, other = ["a", "b"], ["c", "d", "e", "f"]
    assert mixed(changed(writing=(Writing(FREE, 2),)), one, [other]) == [*one, *other]
    assert mixed(changed(writing=(Writing(FREE, 2),), weights=(1.0, 1.0)), one, [other]) == [
        "a",
        "b",
        "d",
        "f",
    ]
    assert mixed(changed(writing=()), [], [other]) == other
    assert mixed(changed(share=0.5), one, [other, ["g"]]) == ["a", "b", "d", "f", "g"]
    with pytest.raises(ValueError, match="1 weights for 2 sources"):
        mixed(changed(writing=(Writing(FREE, 2),), weights=(1.0,)), one, [other])


def test_evaluated_sets_by_name_and_by_file(tmp_path, capsys):
    known, mine = tmp_path / "gsm8k.jsonl", tmp_path / "mine.jsonl"
    known.write_text(
        json.dumps({"question": "one two three four five six seven eight nine ten eleven"}) + "\n"
    )
    mine.write_text(json.dumps({"messages": [{"role": "user", "content": "red green blue"}]}) + "\n")
    runs = evaluated_runs([f"gsm8k={known}", f"mine={mine}"])
    assert runs.shares_a_run("Two, three four five six seven eight nine ten ELEVEN twelve")
    assert runs.shares_a_run("is it red, green, blue?")
    assert not runs.shares_a_run("one two three")
    assert "mine: 1 evaluated texts" in capsys.readouterr().out
    assert evaluated_runs([]).count == 0
    with pytest.raises(
        ValueError, match=r"evaluated sets are SET=FILE, or without a file one of .*, not 'mine'"
    ):
        evaluated_runs(["mine"])
    with pytest.raises(ValueError, match="a row has no 'prompt'"):
        evaluated_runs([f"humaneval={known}"])
    with pytest.raises(FileNotFoundError):
        evaluated_runs([f"gsm8k={tmp_path / 'none.jsonl'}"])
