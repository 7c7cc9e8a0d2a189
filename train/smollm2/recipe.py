"""The recipe of SmolLM2's draft head."""

from dataclasses import dataclass

from train.head.recipe import HeadRecipe
from train.head.recipe_file import read_head_recipe

#: Kinds of prompts: GSM8K's training split, and prompts that the target writes as a user, freely or from
#: given first words.
GSM8K, OWN, CODE, CHAT = ("gsm8k", "own", "code", "chat")

#: First words of prompts for the target to continue, written by hand. Two are from the evaluated prompts for
#: completing a function.
PHRASES = {
    CODE: (
        "Write a Python function that",
        "Complete this Python function.\n```python\n",
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n",
        "Implement a function in Python which takes",
        "Write a Python program to",
        "Develop a Python class that",
        "Given a list of integers,",
    ),
    CHAT: (
        "Explain",
        "Describe",
        "Write a short story about",
        "Compose an email to",
        "Imagine that you are",
        "What is the difference between",
        "Give me a list of",
        "Summarize the following text:",
        "Rewrite the following paragraph",
        "Extract",
        "How can I",
        "Why does",
        "Solve",
    ),
}


@dataclass(frozen=True)
class Writing:
    """Prompts that the target writes itself, at temperature 1.

    Attributes:
        own: Number of prompts without given first words.
        code: Number of prompts that begin with one of the code phrases.
        chat: Number of prompts that begin with one of the other phrases.
        max_tokens: Most tokens of a prompt; longer prompts are dropped.
        least_words: Fewest words of a prompt.
        ngram: Words of a run, for counting repetitions.
        times: The number of times that a run may occur in a prompt.
    """

    own: int
    code: int
    chat: int
    max_tokens: int = 192
    least_words: int = 4
    ngram: int = 4
    times: int = 2


@dataclass(frozen=True)
class SmolLM2Recipe:
    """Prompts, answers and the training of the head.

    Attributes:
        writing: The prompts that the target writes.
        questions: The number of GSM8K's questions; None is all.
        max_tokens: Most tokens of an answer.
        temperatures: Temperatures of the answers, in equal shares for each kind and form of prompts.
        heldout: The approximate number of held-out documents.
        slots: Texts generated at a time.
        shard_documents: Most texts per shard.
        head: The head and its training.
        seed: Seed of the sampling and of all choices.
    """

    writing: Writing
    questions: int | None
    max_tokens: int
    temperatures: tuple[float, ...]
    heldout: int
    slots: int
    shard_documents: int
    head: HeadRecipe
    seed: int = 0


SMOLLM2 = SmolLM2Recipe(
    writing=Writing(own=10_000, code=12_000, chat=10_000),
    questions=None,
    max_tokens=256,
    temperatures=(0.0, 1.0),
    heldout=256,
    slots=256,
    shard_documents=1024,
    head=read_head_recipe("smollm2"),
)
