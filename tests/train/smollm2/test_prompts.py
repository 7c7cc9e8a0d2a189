"""Prompts for SmolLM2's head: what is kept, what is dropped and why, and in which forms."""

import numpy as np
import pytest

from jetspec_jax import load_target
from jetspec_jax.demo import DEMO_TARGET
from train.data.prompt_filters import REPEATS, SHORT, UNENDED, UserPrompt
from train.data.records import Document
from train.smollm2.prompts import beginnings, gsm8k_questions, read_written, to_write
from train.smollm2.recipe import CHAT, CODE, GSM8K, OWN, PHRASES, SMOLLM2, Writing

END = 0
WRITING = Writing(own=5, code=1, chat=0)


class Words:
    """A tokenizer of whole words and spaces, whose ids are the order in which they were first seen."""

    chat_template = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}"

    def __init__(self):
        self.known = ["<end>"]

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        parts = text.replace(" ", "\0 ").split("\0")
        self.known += [part for part in dict.fromkeys(parts) if part not in self.known]
        return [self.known.index(part) for part in parts]

    def decode(self, ids):
        return "".join(self.known[i] for i in ids)


def document(tokenizer, phrase, text, *, end=True):
    before, after = tokenizer.encode(f"<user>{phrase}", False), tokenizer.encode(text, False)
    tokens = np.array(before + after + [END] * end, np.int32)
    return Document(tokens, np.arange(len(tokens)) >= len(before))


def test_at_most_twenty_phrases():
    assert sum(map(len, PHRASES.values())) <= 20
    assert min(SMOLLM2.writing.own, SMOLLM2.writing.code, SMOLLM2.writing.chat) > 0


def test_phrases_of_a_kind_take_turns():
    found = beginnings(Writing(own=2, code=9, chat=1))
    assert [kind for kind, _ in found] == [OWN] * 2 + [CODE] * 9 + [CHAT]
    assert [phrase for kind, phrase in found if kind == CODE] == [*PHRASES[CODE], *PHRASES[CODE][:2]]


def test_the_target_goes_on_behind_the_mark_of_a_user():
    tokenizer = load_target(DEMO_TARGET).tokenizer
    tokenizer.chat_template = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}"
    prompts = to_write(tokenizer, WRITING)
    assert [tokenizer.decode(ids.tolist()) for ids in prompts.tokens] == [
        *["<user>"] * 5,
        f"<user>{PHRASES[CODE][0]}",
    ]
    assert {(own.temperature, own.max_tokens) for own in prompts.params} == {(1.0, WRITING.max_tokens)}


def test_a_template_that_changes_what_the_user_says_is_refused():
    tokenizer = load_target(DEMO_TARGET).tokenizer
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(ValueError, match="changes the user's text"):
        to_write(tokenizer, WRITING)


def test_what_is_kept_of_what_was_written():
    tokenizer = Words()
    documents = [
        document(tokenizer, "", " What is two and two?"),
        document(tokenizer, "", "Why is it", end=False),
        document(tokenizer, "", "Why?"),
        document(tokenizer, "", "a b c d a b c d a b c d"),
        document(tokenizer, "", "a b c d a b c d a b c"),
        document(tokenizer, PHRASES[CODE][0], " adds two numbers."),
    ]
    prompts, dropped = read_written(documents, tokenizer, (END,), WRITING)
    assert prompts == [
        UserPrompt(OWN, "", "What is two and two?"),
        UserPrompt(OWN, "", "a b c d a b c d a b c"),
        UserPrompt(CODE, "", f"{PHRASES[CODE][0]} adds two numbers."),
    ]
    assert dropped == {(OWN, UNENDED): 1, (OWN, SHORT): 1, (OWN, REPEATS): 1}


def test_each_question_of_gsm8k_has_both_forms():
    rows = [{"question": f"How many are {i}?"} for i in range(7)]
    found = gsm8k_questions(rows, None, np.random.default_rng(0))
    assert [one.form for one in found] == ["published", "plain"] * 7
    assert {one.kind for one in found} == {GSM8K}
    for published, plain in zip(found[::2], found[1::2], strict=True):
        assert published.text.endswith("\\boxed{}.")
        assert published.text.startswith(plain.text)
    assert sorted(one.text for one in found[1::2]) == [row["question"] for row in rows]
    assert gsm8k_questions(rows, 3, np.random.default_rng(0)) == found[:6]
