"""Prompts for SmolLM2's draft head: GSM8K's training questions in two forms, and prompts by the target.

The target generates a prompt after the tag with which its chat template begins a user's turn, or after the
tag and the first words of a prompt.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jetspec_jax.checkpoint.chat_template import render_chat
from jetspec_jax.sampling.params import SamplingParams
from train.data.prompt_sets import PLAIN, PROMPT_SETS, PUBLISHED
from train.data.records import Document
from train.data.regenerate import Prompts
from train.smollm2.overlap import Evaluated
from train.smollm2.recipe import CHAT, CODE, GSM8K, OWN, PHRASES, Writing

#: Why a prompt is dropped.
UNENDED, SHORT, REPEATS, TWICE, OVERLAPS = (
    "does not end",
    "too short",
    "repeats itself",
    "equals an earlier one",
    "shares a run of words with an evaluated prompt",
)
# A placeholder for the user's text, to find its position in the template.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


class Beginning(NamedTuple):
    """A prompt's kind and its first words, possibly empty."""

    kind: str
    phrase: str


class UserPrompt(NamedTuple):
    """A prompt: its kind, the form that a set has it in ("" for the target's own prompts), and its text."""

    kind: str
    form: str
    text: str


def beginnings(writing: Writing) -> list[Beginning]:
    """The beginning of each prompt that the target writes; the phrases of a kind alternate."""
    found = [Beginning(OWN, "")] * writing.own
    for kind, count in ((CODE, writing.code), (CHAT, writing.chat)):
        phrases = PHRASES[kind]
        found += [Beginning(kind, phrases[i % len(phrases)]) for i in range(count)]
    return found


def to_write(tokenizer: Any, writing: Writing) -> Prompts:
    """The beginnings as prompts that the target continues at temperature 1."""
    text = render_chat(tokenizer, [{"role": "user", "content": _MARK}], {}, tokenize=False)
    before, mark, _ = text.partition(_MARK)
    if not mark:
        raise ValueError("the chat template changes the user's text")
    ids = {
        phrase: np.asarray(tokenizer.encode(before + phrase, add_special_tokens=False), np.int32)
        for phrase in {phrase for _, phrase in beginnings(writing)}
    }
    tokens = [ids[phrase] for _, phrase in beginnings(writing)]
    sampling = SamplingParams(temperature=1.0, max_tokens=writing.max_tokens)
    return Prompts(tokens, [sampling] * len(tokens))


def read_written(
    documents: Iterable[Document], tokenizer: Any, end_ids: Sequence[int], writing: Writing
) -> tuple[list[UserPrompt], Counter[tuple[str, str]]]:
    """The prompts that the target wrote, and the number dropped by kind and reason.

    Args:
        documents: The target's continuations of `to_write`.
        tokenizer: The target's tokenizer.
        end_ids: Tokens that end a turn.
        writing: The limits on prompts.
    """
    prompts, dropped = [], Counter()
    for beginning, document in zip(beginnings(writing), documents, strict=True):
        written = document.tokens[document.learn].tolist()
        ended = bool(written) and written[-1] in end_ids
        text = beginning.phrase + tokenizer.decode(written[:-1] if ended else written)
        if reason := _fault(text.split(), writing) if ended else UNENDED:
            dropped[beginning.kind, reason] += 1
        else:
            prompts.append(UserPrompt(beginning.kind, "", text.strip()))
    return prompts, dropped


def gsm8k_questions(rows: Sequence[Any], count: int | None, rng: np.random.Generator) -> list[UserPrompt]:
    """Questions of GSM8K in a random order, each in the published and in the plain form."""
    gsm8k = PROMPT_SETS["gsm8k"]
    assert gsm8k.plain is not None
    forms = ((PUBLISHED, gsm8k.turns), (PLAIN, gsm8k.plain))
    chosen = [rows[int(number)] for number in rng.permutation(len(rows))[:count]]
    return [UserPrompt(GSM8K, form, turns(row)[0]) for row in chosen for form, turns in forms]


def without_overlap(
    prompts: Iterable[UserPrompt], evaluated: Evaluated
) -> tuple[list[UserPrompt], Counter[tuple[str, str]]]:
    """The distinct prompts that share no run of words with an evaluated prompt."""
    kept, dropped, seen = [], Counter(), set()
    for prompt in prompts:
        if prompt.text in seen:
            dropped[prompt.kind, TWICE] += 1
        elif evaluated.shares_a_run(prompt.text):
            dropped[prompt.kind, OVERLAPS] += 1
        else:
            seen.add(prompt.text)
            kept.append(prompt)
    return kept, dropped


def _fault(words: list[str], writing: Writing) -> str | None:
    if len(words) < writing.least_words:
        return SHORT
    runs = Counter(tuple(words[i : i + writing.ngram]) for i in range(len(words) - writing.ngram + 1))
    return REPEATS if max(runs.values(), default=0) > writing.times else None
