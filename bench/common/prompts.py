"""Prompts of the benchmarks: the demo's own, a published set, or a JSONL file; and their token ids."""

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
# The argument of chat templates that lets a target think before it answers.
THINKING = "enable_thinking"


@dataclass(frozen=True)
class Prompt:
    """What a target is asked.

    Attributes:
        id: Names it in reports, the same in every run.
        entry: A conversation to answer or a text to continue, and where it was read.
        task: "math", "code" or "chat", where its set says so; for algorithms that route.
        later: What the user says once the target has answered; each turn follows the target's own answer.
    """

    id: str
    entry: Entry
    task: str | None = None
    later: tuple[str, ...] = ()

    def answered(self, answer: str) -> "Prompt":
        """The conversation with an answer and the user's next turn."""
        turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": self.later[0]}]
        entry = Entry(self.entry.where, MESSAGES, [*self.entry.value, *turns])
        return Prompt(f"{self.id}, a turn later", entry, self.task, self.later[1:])


def load_prompts(name: str, part: Part = ALL, form: str = PUBLISHED) -> list[Prompt]:
    """Prompts of a set, each with the id that it has in the whole set.

    Args:
        name: "demo", one of `PROMPT_SETS`, one of them and the file that holds it ("gsm8k=test.jsonl"), or a
            JSONL file of other prompts (see `train.data.prompts`).
        part: Which of them, see `read_set`.
        form: How a published set puts its questions, see `read_set`.

    Raises:
        FileNotFoundError: There is no such file, or a set cannot be loaded.
        ValueError: A line is not what it should be (file and line number), there are too few prompts, or they
            have no such form.
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
    # Without the folder, so that reports of two machines say the same.
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
    """What the target's chat template is told.

    Args:
        target: The target.
        thinking: Whether it may think before it answers; None is no, if its template asks at all.

    Raises:
        ValueError: The template does not ask, and somebody answers.
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

    Conversations take the form of the target's chat template. Without one, the contents of their messages
    stand below each other with an empty line between them, and the target continues that text.

    Args:
        target: The target.
        prompts: The prompts.
        arguments: Of the chat template.

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
    """A message's content as one text, a line for each part."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
