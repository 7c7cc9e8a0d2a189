"""The prompt sets of the published evaluations, and the form in which each puts its questions.

JetSpec's evaluation (hao-ai-lab/JetSpec, ``bench/reference/benchmark.py``) follows DFlash's (z-lab/dflash),
from which the forms are. Both send a prompt as a user's message through the target's chat template, without
thinking. A part of a set is the beginning of its rows as ``datasets`` shuffles them with seed 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.data.prompts import load_rows

Row = Mapping[str, Any]
SEED = 0

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
_LCB_FILES = "hf://datasets/livecodebench/code_generation_lite/test{}.jsonl"
# What MT-Bench calls its categories, where that is a task; all others are chat.
_MT_BENCH_TASKS = {"math": "math", "coding": "code"}


@dataclass(frozen=True)
class PromptSet:
    """Where a set lies, and what is asked of a row.

    Attributes:
        path: On the Hugging Face hub, or "json" for ``files``.
        split: Of the data set.
        turns: What the user says, turn by turn.
        task: "math", "code" or "chat"; or what says so of a row.
        config: Of the data set.
        files: Files on the hub, for a set that no current version of the library loads by its name.
    """

    path: str
    split: str
    turns: Callable[[Row], Sequence[str]]
    task: str | Callable[[Row], str]
    config: str | None = None
    files: tuple[str, ...] = ()


def _boxed(column: str) -> Callable[[Row], Sequence[str]]:
    return lambda row: [_BOXED.format(question=row[column])]


def _livecodebench(row: Row) -> Sequence[str]:
    """With the starter code where there is one (LeetCode), else for standard input and output."""
    starter = row["starter_code"]
    form = "Use the following code structure:" if starter else "Write your code in the following format:"
    code = starter or "# YOUR CODE HERE"
    return [_LIVECODEBENCH.format(question=row["question_content"], format=form, code=code)]


PROMPT_SETS: Mapping[str, PromptSet] = {
    "gsm8k": PromptSet("openai/gsm8k", "test", _boxed("question"), "math", config="main"),
    "math500": PromptSet("HuggingFaceH4/MATH-500", "test", _boxed("problem"), "math"),
    "aime25": PromptSet("MathArena/aime_2025", "train", _boxed("problem"), "math"),
    "humaneval": PromptSet(
        "openai/openai_humaneval", "test", lambda row: [_HUMANEVAL.format(prompt=row["prompt"])], "code"
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
        lambda row: row["prompt"],
        lambda row: _MT_BENCH_TASKS.get(row["category"], "chat"),
    ),
}


@dataclass(frozen=True)
class Question:
    """A row of a set in its published form.

    Attributes:
        number: Of the row.
        turns: What the user says, at least one turn.
        task: "math", "code" or "chat".
    """

    number: int
    turns: tuple[str, ...]
    task: str


@dataclass(frozen=True)
class Part:
    """Which prompts of a set are taken.

    Attributes:
        skip: So many are left out, the first ones.
        count: So many follow; None is all.
        fewer: Whether a set that holds fewer will do.
    """

    skip: int = 0
    count: int | None = None
    fewer: bool = False

    @property
    def end(self) -> int | None:
        """How many prompts the skipped and the taken ones are; None is all."""
        return None if self.count is None else self.skip + self.count

    def check(self, name: str, held: int) -> None:
        """Raises ValueError if a set holds too few prompts."""
        if held <= self.skip:
            raise ValueError(f"{name} holds {held} prompts, asked to skip {self.skip}")
        if not self.fewer and self.end is not None and held < self.end:
            after = f" after the first {self.skip}" if self.skip else ""
            raise ValueError(f"{name} holds {held} prompts, asked for {self.count}{after}")


def read_set(name: str, part: Part) -> list[Question]:
    """Questions of a published set: all in its order, or some of them in the order of seed 0's shuffle.

    Raises:
        FileNotFoundError: The set cannot be loaded.
        ValueError: The library is not installed, a row is not what it should be, or there are too few.
    """
    own = PROMPT_SETS[name]
    rows = load_rows(own.path, own.config, split=own.split, files=own.files)
    part.check(name, len(rows))
    order = np.arange(len(rows))
    if part.skip or (part.end is not None and part.end < len(rows)):
        # As `Dataset.shuffle(seed)` does. Two parts that do not overlap share no question.
        order = np.random.default_rng(SEED).permutation(len(rows))[part.skip : part.end]
    return [_question(own, name, int(number), rows[int(number)]) for number in order]


def _question(own: PromptSet, name: str, number: int, row: Row) -> Question:
    where = f"{name} row {number}"
    try:
        turns = own.turns(row)
        task = own.task if isinstance(own.task, str) else own.task(row)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} has no {error}; its columns are {', '.join(sorted(row))}") from error
    # A text would be taken for a list of its letters.
    if isinstance(turns, str) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where} asks nothing, or something that is no text")
    return Question(number, tuple(turns), task)
