"""The prompts of a pair: those that the target writes as a user, and those of files, data sets and documents.

The target writes a prompt after the tag with which its chat template begins a user's turn, or after the tag
and the first words of a prompt.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jetspec_jax.checkpoint.chat_template import render_chat
from jetspec_jax.progress import Progress
from jetspec_jax.sampling.params import SamplingParams
from train.data.holdout import evenly_spaced
from train.data.mixing import mix
from train.data.prompt_filters import UNENDED, Evaluated, UserPrompt, fault
from train.data.prompt_sets import EVALUATED, FORMS, PLAIN, PROMPT_SETS, set_rows
from train.data.prompts import MESSAGES, Dropped, Entry, read_entries, read_rows
from train.data.records import Document
from train.data.regenerate import Prompts
from train.data.rendering import Encoder
from train.pair.recipe import Filters, PairRecipe

#: Why a prompt of a source is dropped.
UNUSABLE, LONG = "cannot be used", "too long"
#: Sets with a training split on the hub.
TRAINING_SPLITS = ("gsm8k", "mbpp")
# A placeholder for the user's text, to find its position in the template.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
# The number of dropped prompts that an error shows, and of characters of each.
_SHOWN, _LONGEST = 3, 120


class Beginning(NamedTuple):
    """A prompt's kind and its first words, possibly empty."""

    kind: str
    phrase: str


def beginnings(recipe: PairRecipe) -> list[Beginning]:
    """The beginning of each prompt that the target writes; the phrases of a kind alternate."""
    found = []
    for part in recipe.writing:
        phrases = part.phrases or ("",)
        found += [Beginning(part.kind, phrases[i % len(phrases)]) for i in range(part.count)]
    return found


def to_write(encoder: Encoder, recipe: PairRecipe) -> Prompts:
    """The beginnings as prompts that the target continues at temperature 1.

    Raises:
        ValueError: The chat template changes the user's text.
    """
    tokenizer = encoder.tokenizer
    message = [{"role": "user", "content": _MARK}]
    text = render_chat(tokenizer, message, encoder.template_arguments, tokenize=False)
    before, mark, _ = text.partition(_MARK)
    if not mark:
        raise ValueError("the chat template changes the user's text")
    every = beginnings(recipe)
    ids = {
        phrase: np.asarray(tokenizer.encode(before + phrase, add_special_tokens=False), np.int32)
        for phrase in {phrase for _, phrase in every}
    }
    sampling = SamplingParams(temperature=1.0, max_tokens=recipe.filters.max_tokens)
    return Prompts([ids[phrase] for _, phrase in every], [sampling] * len(every))


class Written(NamedTuple):
    """What the target wrote.

    Attributes:
        prompts: The prompts that are kept.
        dropped: The number dropped, by kind and reason.
        examples: The first dropped prompts, with their reasons.
    """

    prompts: list[UserPrompt]
    dropped: Counter[tuple[str, str]]
    examples: list[str]

    def check(self, least: float) -> None:
        """Raises ValueError, with examples, if less than a share of the prompts is kept."""
        count = len(self.prompts) + self.dropped.total()
        if len(self.prompts) >= max(least * count, 1):
            return
        reasons = Counter[str]()
        for (_, reason), number in self.dropped.items():
            reasons[reason] += number
        listed = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
        raise ValueError(
            f"the target does not write prompts: {len(self.prompts)} of {count} are kept, and at least "
            f"{least:.0%} must be ({listed}); bring prompts (--prompts FILE --set writing=[]) or texts "
            f"(--documents FILE). It wrote: {'; '.join(self.examples)}"
        )


def read_written(
    documents: Iterable[Document], begun: Sequence[Beginning], encoder: Encoder, limits: Filters
) -> Written:
    """Sorts the target's continuations of some beginnings into prompts and others."""
    written = Written([], Counter(), [])
    for beginning, document in zip(begun, documents, strict=True):
        tokens = document.tokens[document.learn].tolist()
        ended = bool(tokens) and tokens[-1] in encoder.end_ids
        text = (beginning.phrase + encoder.tokenizer.decode(tokens[:-1] if ended else tokens)).strip()
        reason = UNENDED
        if ended:
            reason = fault(text, least_words=limits.least_words, ngram=limits.ngram, times=limits.times)
        if reason:
            written.dropped[beginning.kind, reason] += 1
            if len(written.examples) < _SHOWN:
                written.examples.append(f"{text[:_LONGEST]!r} ({reason})")
        else:
            message = {"role": "user", "content": text}
            ids = encoder.prompt(Entry("a written prompt", MESSAGES, [message])).tolist()
            written.prompts.append(UserPrompt(beginning.kind, "", text, tuple(ids)))
    return written


def read_sources(
    recipe: PairRecipe, encoder: Encoder, context: int, dropped: Counter[tuple[str, str]]
) -> list[list[UserPrompt]]:
    """The prompts of each source of a recipe, without those that the target writes.

    Args:
        context: Limit on the tokens of a prompt with its answer.
        dropped: Counts dropped prompts by source and reason.

    Raises:
        FileNotFoundError: There is no such file or data set.
        ValueError: A source has no usable row.
    """
    found = []
    for source in recipe.prompts:
        name, _, _ = source.partition("=")
        entries = _of_set(source) if name in PROMPT_SETS else _of_entries(source, dropped)
        found.append(_encoded(entries, encoder, context - recipe.max_tokens, None, dropped))
    for source in recipe.documents:
        entries = _of_entries(source, dropped)
        room = context - recipe.max_tokens
        found.append(_encoded(entries, encoder, room, min(recipe.beginning_tokens, room), dropped))
    for source, prompts in zip([*recipe.prompts, *recipe.documents], found, strict=True):
        if not prompts:
            raise ValueError(f"{source} has no prompt that can be used in a context of {context} tokens")
    return found


class _Source(NamedTuple):
    """An entry of a source as `UserPrompt` describes it."""

    kind: str
    form: str
    entry: Entry
    root: str = ""


def _of_set(source: str) -> list[_Source]:
    """The training split of a prompt set, in each of its forms."""
    name, _, path = source.partition("=")
    if not path and name not in TRAINING_SPLITS:
        raise ValueError(f"{name} has no training split: name a file of other rows, {name}=FILE")
    known, found = PROMPT_SETS[name], []
    for number, row in enumerate(set_rows(name, path or None, split="train")):
        try:
            root = " ".join(EVALUATED[name](row))
            for form in FORMS:
                turns = known.plain if form == PLAIN else known.turns
                if turns is not None:
                    message = {"role": "user", "content": turns(row)[0]}
                    entry = Entry(f"{name} row {number}", MESSAGES, [message])
                    found.append(_Source(name, form, entry, root))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{source}: row {number} has no {error}") from error
    return found


def _of_entries(source: str, dropped: Counter[tuple[str, str]]) -> list[_Source]:
    refused, kind = Dropped(), Path(source).name or source
    entries = read_entries(source, dropped=refused)
    dropped[kind, UNUSABLE] += len(refused.reasons)
    return [_Source(kind, "", entry, said(entry, opening=True)) for entry in entries]


def _encoded(
    sources: Sequence[_Source],
    encoder: Encoder,
    room: int,
    beginning: int | None,
    dropped: Counter[tuple[str, str]],
) -> list[UserPrompt]:
    found, first = [], None
    for kind, form, entry, root in Progress(sources, desc="encode", unit=" prompts", delay=1, leave=False):
        try:
            ids = encoder.prompt(entry).tolist()[:beginning]
        except ValueError as error:
            first = first or error
            dropped[kind, UNUSABLE] += 1
            continue
        text = said(entry) if beginning is None else encoder.tokenizer.decode(ids)
        if len(ids) > room:
            dropped[kind, LONG] += 1
        else:
            found.append(UserPrompt(kind, form, text, tuple(ids), root))
    if first is not None and not found:
        raise first
    return found


def said(entry: Entry, *, opening: bool = False) -> str:
    """All that the user says in an entry, or all before the first answer."""
    if entry.kind != MESSAGES:
        return entry.value
    turns = itertools.takewhile(lambda message: not opening or message["role"] != "assistant", entry.value)
    contents = [message.get("content") for message in turns if message["role"] == "user"]
    parts = [[part["text"] for part in text] if isinstance(text, list) else [text or ""] for text in contents]
    return "\n".join(text for part in parts for text in part)


def mixed(recipe: PairRecipe, written: list[UserPrompt], sources: list[list[UserPrompt]]) -> list[UserPrompt]:
    """All prompts by the weights of the recipe, from its share of each source."""
    parts = [
        [source[i] for i in evenly_spaced(len(source), max(1, round(recipe.share * len(source))))]
        for source in sources
    ]
    return mix([written, *parts] if recipe.writing else parts, recipe.weights)


def evaluated_runs(evaluated: Sequence[str]) -> Evaluated:
    """The runs of words of all evaluated sets; prints a line per set.

    Args:
        evaluated: The sets, as SET or SET=FILE. A set that is not in `train.data.prompt_sets` needs a file,
            in any form of `train.data.prompts`.

    Raises:
        FileNotFoundError: A set cannot be loaded.
        ValueError: A set is unknown and has no file, or a row is invalid.
    """
    texts = []
    for given in evaluated:
        name, _, path = given.partition("=")
        if (texts_of := EVALUATED.get(name)) is not None:
            rows = read_rows(Path(path)) if path else set_rows(name)
            try:
                found = [text for row in rows for text in texts_of(row)]
            except (KeyError, TypeError) as error:
                raise ValueError(f"{given}: a row has no {error}") from error
        elif path:
            found = [said(entry) for entry in read_entries(path)]
        else:
            known = ", ".join(EVALUATED)
            raise ValueError(f"evaluated sets are SET=FILE, or without a file one of {known}, not {given!r}")
        print(f"  {name}: {len(found):,} evaluated texts")
        texts += found
    return Evaluated(texts)


def drop_words(dropped: Counter[tuple[str, str]]) -> dict[str, int]:
    """Counts by kind and reason, for JSON."""
    return {f"{kind}: {reason}": count for (kind, reason), count in sorted(dropped.items()) if count}
