"""Prompts of the benchmarks, from the demo, a published set or a JSONL file, and their token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.demo import DEMO, DEMO_PROMPTS
from train.data.prompt_sets import PROMPT_SETS, PUBLISHED, Part, read_set
from train.data.prompts import MESSAGES, Entry, read_entries
from train.data.rendering import Encoder

ALL = Part()
# The argument of chat templates that makes a target think before it answers.
THINKING = "enable_thinking"


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        id: The name in reports, the same in every run.
        entry: A conversation to answer or a text to continue, and its place in the source.
        task: "math", "code" or "chat", if the set has one; for algorithms that route.
        later: The user's further turns, each sent after the target's answer to the turn before.
    """

    id: str
    entry: Entry
    task: str | None = None
    later: tuple[str, ...] = ()

    def answered(self, answer: str) -> "Prompt":
        """The conversation continued by an answer and the user's next turn."""
        turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": self.later[0]}]
        entry = Entry(self.entry.where, MESSAGES, [*self.entry.value, *turns])
        return Prompt(f"{self.id}, a turn later", entry, self.task, self.later[1:])


def load_prompts(name: str, part: Part = ALL, form: str = PUBLISHED) -> list[Prompt]:
    """Prompts of a set; their ids do not depend on the part.

    Args:
        name: "demo", a name of `PROMPT_SETS`, such a name and the set's file ("gsm8k=test.jsonl"), or a JSONL
            file of other prompts (see `train.data.prompts`).
        part: The part of the set, see `read_set`.
        form: The form of a published set's questions, see `read_set`.

    Raises:
        FileNotFoundError: A file is missing, or a set cannot be loaded.
        ValueError: A line is invalid (with file and line number), there are too few prompts, or the set does
            not have this form.
    """
    published, equals, file = name.partition("=")
    if published in PROMPT_SETS:
        return _published(published, part, file if equals else None, form)
    if form != PUBLISHED:
        raise ValueError(
            f"the form {form!r} is for published sets alone: {', '.join(PROMPT_SETS)}; {name} is none of them"
        )
    path = DEMO_PROMPTS if name == DEMO else Path(name)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {name}; prompts are a JSONL file, or a set: {', '.join([DEMO, *PROMPT_SETS])}"
        )
    entries = read_entries(path, part.end)
    part.check(name, len(entries))
    # Without the folder, so that ids are the same on every machine.
    stem = DEMO if name == DEMO else path.name
    numbered = [Prompt(f"{stem}:{number}", entry) for number, entry in enumerate(entries, start=1)]
    return numbered[part.skip :]


def _published(name: str, part: Part, file: str | None, form: str) -> list[Prompt]:
    try:
        questions = read_set(name, part, path=file, form=form)
    except FileNotFoundError as error:
        if file is not None:
            raise FileNotFoundError(f"there is no file {file} with the set {name}") from error
        raise FileNotFoundError(
            f"{error}. The set {name} is fetched over the network, once; without one, name the file that "
            f"holds it: {name}=FILE.jsonl"
        ) from error
    prompts = []
    for question in questions:
        first, *later = question.turns
        where = f"{name}:{question.number}"
        entry = Entry(where, MESSAGES, [{"role": "user", "content": first}])
        prompts.append(Prompt(where, entry, question.task, tuple(later)))
    return prompts


def template_arguments(target: Target, thinking: bool | None) -> dict[str, bool]:
    """The arguments of the target's chat template.

    Args:
        thinking: Whether the target may think before it answers; None means no.

    Raises:
        ValueError: ``thinking`` is set, and the template has no such argument.
    """
    if THINKING in (getattr(target.tokenizer, "chat_template", None) or ""):
        return {THINKING: bool(thinking)}
    if thinking is not None:
        raise ValueError(f"the target's chat template knows no {THINKING}")
    return {}


def encode_prompts(
    target: Target, prompts: Sequence[Prompt], arguments: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of prompts.

    Conversations are rendered by the target's chat template. Without a template, their messages are joined
    with empty lines between them, and the target continues that text.

    Args:
        arguments: Arguments of the chat template.

    Raises:
        ValueError: The target has no tokenizer, or its template refuses a conversation.
    """
    encoder = Encoder(target.tokenizer, template_arguments=dict(arguments or {}))
    has_template = bool(getattr(target.tokenizer, "chat_template", None))
    entries = (prompt.entry if has_template else _as_text(prompt.entry) for prompt in prompts)
    return [encoder.prompt(entry).tolist() for entry in entries]


def _as_text(entry: Entry) -> Entry:
    if entry.kind != MESSAGES:
        return entry
    return Entry(entry.where, "text", "\n\n".join(_text(message["content"]) for message in entry.value))


def _text(content: str | Sequence[Mapping[str, str]] | None) -> str:
    """A message's content as one text, with a line per part."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
