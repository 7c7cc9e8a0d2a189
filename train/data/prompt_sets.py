"""The prompt sets of the published evaluations, with their prompt formats.

JetSpec's evaluation (hao-ai-lab/JetSpec, ``bench/reference/benchmark.py``) follows DFlash's (z-lab/dflash),
the source of the formats. Both send a prompt as a user message through the target's chat template, without
thinking. A part of a set is the beginning of its rows as ``datasets`` shuffles them with seed 0.

A set is read from the hub, or from a JSONL file of its rows. Some sets also have a plain form, without an
instruction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.data.prompts import load_rows, read_rows

Row = Mapping[str, Any]
SEED = 0
#: The prompt formats: that of the published evaluations, and the plain form.
PUBLISHED, PLAIN = FORMS = ("published", "plain")

_BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_HUMANEVAL = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{prompt}\n```"
)
# LiveCodeBench's own generic instruction, sections and code fences.
_LIVECODEBENCH = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will "
    "generate a correct Python program that matches the specification and passes all tests. You will NOT "
    "return anything except for the program\n\n"
    "### Question:\n{question}\n\n"
    "### Format: {format}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)
_COMPLETE = "Complete this Python function.\n```python\n{prompt}\n```"
_LCB_FILES = "hf://datasets/livecodebench/code_generation_lite/test{}.jsonl"
# MT-Bench's categories that are a task of ours; all others are chat.
_MT_BENCH_TASKS = {"math": "math", "coding": "code"}


@dataclass(frozen=True)
class PromptSet:
    """Where a set is stored, and how its rows become prompts.

    Attributes:
        path: The data set's name on the Hugging Face hub, or "json" for ``files``.
        turns: Maps a row to the user's turns.
        task: "math", "code" or "chat"; or a function from a row to one of these.
        plain: Maps a row to the turns of the plain form, if the set has it: only the question, a function to
            complete, or the first of several turns.
        files: Files on the hub, for a set that current versions of ``datasets`` cannot load by name.
    """

    path: str
    split: str
    turns: Callable[[Row], Sequence[str]]
    task: str | Callable[[Row], str]
    plain: Callable[[Row], Sequence[str]] | None = None
    config: str | None = None
    files: tuple[str, ...] = ()


def _boxed(column: str) -> Callable[[Row], Sequence[str]]:
    return lambda row: [_BOXED.format(question=row[column])]


def _livecodebench(row: Row) -> Sequence[str]:
    """The prompt with the starter code if the row has it (LeetCode), else for standard input and output."""
    starter = row["starter_code"]
    form = "Use the following code structure:" if starter else "Write your code in the following format:"
    code = starter or "# YOUR CODE HERE"
    return [_LIVECODEBENCH.format(question=row["question_content"], format=form, code=code)]


def mt_bench_turns(row: Row) -> Sequence[str]:
    """The user's turns of MT-Bench: under "turns" in LMSYS's file, under "prompt" on the hub."""
    return row["turns" if "turns" in row else "prompt"]


PROMPT_SETS: Mapping[str, PromptSet] = {
    "gsm8k": PromptSet(
        "openai/gsm8k",
        "test",
        _boxed("question"),
        "math",
        plain=lambda row: [row["question"]],
        config="main",
    ),
    "math500": PromptSet("HuggingFaceH4/MATH-500", "test", _boxed("problem"), "math"),
    "aime25": PromptSet("MathArena/aime_2025", "train", _boxed("problem"), "math"),
    "humaneval": PromptSet(
        "openai/openai_humaneval",
        "test",
        lambda row: [_HUMANEVAL.format(prompt=row["prompt"])],
        "code",
        plain=lambda row: [_COMPLETE.format(prompt=row["prompt"].rstrip())],
    ),
    "mbpp": PromptSet(
        "google-research-datasets/mbpp", "test", lambda row: [row["prompt"]], "code", config="sanitized"
    ),
    # Its releases 1 to 6. The files hold the hidden tests as well: some gigabytes.
    "livecodebench": PromptSet(
        "json",
        "test",
        _livecodebench,
        "code",
        files=tuple(_LCB_FILES.format(part) for part in ("", 2, 3, 4, 5, 6)),
    ),
    # Both turns: the second follows the target's own answer to the first.
    "mt-bench": PromptSet(
        "HuggingFaceH4/mt_bench_prompts",
        "train",
        mt_bench_turns,
        lambda row: _MT_BENCH_TASKS.get(row["category"], "chat"),
        plain=lambda row: mt_bench_turns(row)[:1],
    ),
}


def _column(name: str) -> Callable[[Row], Sequence[str]]:
    return lambda row: [row[name]]


#: The texts of a set's rows without instructions, by which overlaps with training prompts are found.
EVALUATED: Mapping[str, Callable[[Row], Sequence[str]]] = {
    **dict.fromkeys(("math500", "aime25"), _column("problem")),
    **dict.fromkeys(("humaneval", "mbpp"), _column("prompt")),
    "gsm8k": _column("question"),
    "livecodebench": _column("question_content"),
    "mt-bench": mt_bench_turns,
}


@dataclass(frozen=True)
class Question:
    """A row of a set as a prompt.

    Attributes:
        turns: The user's turns, at least one.
        task: "math", "code" or "chat".
    """

    number: int
    turns: tuple[str, ...]
    task: str


@dataclass(frozen=True)
class Part:
    """A range of a set's prompts.

    Attributes:
        skip: The number of prompts to skip.
        count: The number of prompts after these; None is all.
        fewer: Whether a set with fewer prompts is accepted.
    """

    skip: int = 0
    count: int | None = None
    fewer: bool = False

    @property
    def end(self) -> int | None:
        """The end of the range; None is the end of the set."""
        return None if self.count is None else self.skip + self.count

    def check(self, name: str, held: int) -> None:
        """Raises ValueError if a set holds too few prompts."""
        if held <= self.skip:
            raise ValueError(f"{name} holds {held} prompts, asked to skip {self.skip}")
        if not self.fewer and self.end is not None and held < self.end:
            after = f" after the first {self.skip}" if self.skip else ""
            raise ValueError(f"{name} holds {held} prompts, asked for {self.count}{after}")


def set_rows(name: str, path: str | Path | None = None, *, split: str | None = None) -> Sequence[Row]:
    """All rows of a published set.

    Args:
        name: One of `PROMPT_SETS`.
        path: A JSONL file of the rows, as they are on the hub or were first published; None fetches them from
            the hub.
        split: The split on the hub; None is the split of the published evaluations.

    Raises:
        FileNotFoundError: The rows cannot be loaded, or there is no such file.
        ValueError: The library is not installed, or a line of the file is no JSON object.
    """
    if path is not None:
        return read_rows(Path(path))
    prompt_set = PROMPT_SETS[name]
    return load_rows(
        prompt_set.path, prompt_set.config, split=split or prompt_set.split, files=prompt_set.files
    )


def read_set(
    name: str, part: Part = Part(), *, path: str | Path | None = None, form: str = PUBLISHED
) -> list[Question]:
    """Questions of a published set: all in its order, or a part of them.

    Args:
        name: One of `PROMPT_SETS`.
        part: Which of them: from the hub, in the order of the published evaluations, which shuffle with seed
            0; from a file, in the file's order.
        path: As for `set_rows`.
        form: "published" or "plain".

    Raises:
        FileNotFoundError: The set cannot be loaded, or there is no such file.
        ValueError: The library ``datasets`` is not installed, a row is invalid, the set has too few rows, or
            it has no such form.
    """
    prompt_set = PROMPT_SETS[name]
    if form not in FORMS or (form == PLAIN and prompt_set.plain is None):
        plain = ", ".join(other for other, its in PROMPT_SETS.items() if its.plain is not None)
        raise ValueError(
            f"{name} has no form {form!r}: all sets have {PUBLISHED!r}, and {plain} have {PLAIN!r} too"
        )
    rows = set_rows(name, path)
    part.check(name, len(rows))
    order = np.arange(len(rows))
    if part.skip or (part.end is not None and part.end < len(rows)):
        # As `Dataset.shuffle(seed)` does. Two parts that do not overlap share no question.
        order = order if path is not None else np.random.default_rng(SEED).permutation(len(rows))
        order = order[part.skip : part.end]
    turns = prompt_set.turns if form == PUBLISHED or prompt_set.plain is None else prompt_set.plain
    return [_question(name, int(number), rows[int(number)], turns, prompt_set.task) for number in order]


def _question(
    name: str,
    number: int,
    row: Row,
    turns_of: Callable[[Row], Sequence[str]],
    task_of: str | Callable[[Row], str],
) -> Question:
    where = f"{name} row {number}"
    try:
        turns = turns_of(row)
        task = task_of if isinstance(task_of, str) else task_of(row)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} has no {error}; its columns are {', '.join(sorted(row))}") from error
    # A string would be read as a list of its characters.
    if isinstance(turns, str) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where} has no question, or a question that is not a text")
    return Question(number, tuple(turns), task)
