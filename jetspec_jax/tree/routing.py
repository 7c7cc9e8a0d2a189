"""What a caller says of a request, for algorithms that route by it, as arrays of a batch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

#: The classes of `TaskRouter`, in the order of their numbers, and the keys of templates and profiles.
CLASSES = ("decisive_task", "balanced_task", "uncertain_task")
DECISIVE, BALANCED, UNCERTAIN = range(3)
#: Nobody said anything: the draft rows decide.
UNSAID = -1

_CLASS_OF_TASK: Mapping[str, int] = {
    "math": DECISIVE,
    "code": DECISIVE,
    "balanced": BALANCED,
    "chat": UNCERTAIN,
    "open_ended": UNCERTAIN,
}
_REASONING_TASKS = frozenset({"reasoning", "chain_of_thought", "cot", "math", "code"})
_REASONING_MODES = frozenset({"reasoning", "cot"})
_REASONING_TEXT = ("<think>", "step 1", "let me think", "let's think", "first,", "chain of thought")
KEYS = ("task", "mode", "text")
_MEANT = f"a mapping with any of {', '.join(KEYS)}, as {{'task': 'math'}}"

#: What is known of one request: any of `KEYS`.
Hints = Mapping[str, str]


class Routing(NamedTuple):
    """What callers said of the sequences of a batch.

    Attributes:
        task_class: Index into `CLASSES`, or `UNSAID`.
        reasoning: Whether somebody said that the request reasons.
    """

    task_class: Int32[Array, "B"]
    reasoning: Bool[Array, "B"]

    @classmethod
    def unsaid(cls, batch: int) -> "Routing":
        """Nothing was said of any sequence."""
        return cls(jnp.full((batch,), UNSAID, jnp.int32), jnp.zeros((batch,), bool))

    @classmethod
    def of_one(cls, hints: Hints | None) -> "Routing":
        """What was said of one sequence, as NumPy values without the batch axis.

        Raises:
            TypeError: It is no mapping, or a value no string.
            ValueError: A key is unknown.
        """
        given = _checked(hints)
        task, mode, text = (given.get(key, "").lower() for key in KEYS)
        # An unknown task is balanced.
        own = _CLASS_OF_TASK.get(task, BALANCED) if "task" in given else UNSAID
        reasons = (
            task in _REASONING_TASKS
            or mode in _REASONING_MODES
            or any(mark in text for mark in _REASONING_TEXT)
        )
        values: Any = np.int32(own), np.bool_(reasons)
        return cls(*values)

    @classmethod
    def of(cls, hints: Hints | Sequence[Hints | None] | None, batch: int) -> "Routing":
        """Hints for all sequences, or for each of them.

        Raises:
            TypeError: As `hints_of_each`.
            ValueError: Likewise.
        """
        each = [cls.of_one(own) for own in hints_of_each(hints, batch, "sequences")]
        return cls(
            jnp.asarray([own.task_class for own in each], jnp.int32),
            jnp.asarray([own.reasoning for own in each], bool),
        )


def hints_of_each(
    hints: Hints | Sequence[Hints | None] | None, count: int, things: str
) -> list[Hints | None]:
    """What is known of each of ``count`` things: the same, or what a sequence says of it.

    Raises:
        TypeError: One is no mapping of strings.
        ValueError: There are not as many as things, or one has an unknown key.
    """
    if hints is None or isinstance(hints, Mapping):
        own = [hints] * count
    elif isinstance(hints, Sequence) and not isinstance(hints, str):
        own = list(hints)
    else:
        raise TypeError(f"routing is {_MEANT}, for all {things}, or a sequence of these, not {hints!r}")
    if len(own) != count:
        raise ValueError(f"{len(own)} routing hints for {count} {things}")
    for hint in own:
        _checked(hint)
    return own


def check_classes(names: Iterable[Any], where: str) -> None:
    """Raises ValueError for names that are none of `CLASSES`; ``where`` they were found."""
    if unknown := sorted((name for name in names if name not in CLASSES), key=str):
        raise ValueError(f"unknown classes {unknown} in {where}; there are {', '.join(CLASSES)}")


def _checked(hints: Hints | None) -> Hints:
    given = {} if hints is None else hints
    if not isinstance(given, Mapping):
        raise TypeError(f"routing is {_MEANT}, not {given!r}")
    for names, error in (
        ([key for key in given if key not in KEYS], ValueError),
        ([key for key, value in given.items() if not isinstance(value, str)], TypeError),
    ):
        if names:
            raise error(f"routing takes strings under {', '.join(KEYS)}; not valid: {names}")
    return given
