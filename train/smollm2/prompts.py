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
from train.data.prompt_filters import UNENDED, UserPrompt, fault
from train.data.prompt_sets import PLAIN, PROMPT_SETS, PUBLISHED
from train.data.records import Document
from train.data.regenerate import Prompts
from train.smollm2.recipe import CHAT, CODE, GSM8K, OWN, PHRASES, Writing

# A placeholder for the user's text, to find its position in the template.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


class Beginning(NamedTuple):
    """A prompt's kind and its first words, possibly empty."""

    kind: str
    phrase: str


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
    limits = {name: getattr(writing, name) for name in ("least_words", "ngram", "times")}
    for beginning, document in zip(beginnings(writing), documents, strict=True):
        written = document.tokens[document.learn].tolist()
        ended = bool(written) and written[-1] in end_ids
        text = beginning.phrase + tokenizer.decode(written[:-1] if ended else written)
        if reason := fault(text, **limits) if ended else UNENDED:
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
