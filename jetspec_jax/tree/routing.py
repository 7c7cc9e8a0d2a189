"""Routing hints of requests, for algorithms that route by them, as arrays of a batch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

#: The classes of `TaskRouter`, in the order of their indices; also the keys of templates and profiles.
CLASSES = ("decisive_task", "balanced_task", "uncertain_task")
DECISIVE, BALANCED, UNCERTAIN = range(3)
#: No hint: the class is inferred from the draft rows.
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

#: What replaces the argument ``routing`` of calls.
ROUTING_INSTEAD = (
    'give the hints to the tree algorithm, as algorithm=get_algorithm("task_router", '
    '{"routing": {"task": "math"}})'
)
#: The hints of one request, with any of `KEYS`.
Hints = Mapping[str, str]


class Routing(NamedTuple):
    """The routing hints of a batch.

    Attributes:
        task_class: Index into `CLASSES`, or `UNSAID`.
        reasoning: Whether the hints say that the request needs reasoning.
    """

    task_class: Int32[Array, "B"]
    reasoning: Bool[Array, "B"]

    @classmethod
    def unsaid(cls, batch: int) -> "Routing":
        """A batch without hints."""
        return cls(jnp.full((batch,), UNSAID, jnp.int32), jnp.zeros((batch,), bool))

    @classmethod
    def of_one(cls, hints: Hints | None) -> "Routing":
        """The hints of one sequence as NumPy values without the batch axis."""
        given = _checked(hints)
        task, mode, text = (given.get(key, "").lower() for key in KEYS)
        # Unknown tasks are balanced.
        task_class = _CLASS_OF_TASK.get(task, BALANCED) if "task" in given else UNSAID
        reasons = (
            task in _REASONING_TASKS
            or mode in _REASONING_MODES
            or any(mark in text for mark in _REASONING_TEXT)
        )
        values: Any = np.int32(task_class), np.bool_(reasons)
        return cls(*values)

    def or_all(self, hints: Iterable[tuple[str, str]] | None) -> "Routing":
        """The same batch, or these hints for all its sequences; see `hashable_hints`."""
        if hints is None:
            return self
        return jax.tree.map(jnp.full_like, self, self.of_one(dict(hints)))

    @classmethod
    def of(cls, hints: Hints | Sequence[Hints | None] | None, batch: int) -> "Routing":
        """The hints of a batch: one mapping for all sequences, or one for each."""
        each = [cls.of_one(hint) for hint in hints_of_each(hints, batch, "sequences")]
        return cls(
            jnp.asarray([routing.task_class for routing in each], jnp.int32),
            jnp.asarray([routing.reasoning for routing in each], bool),
        )


def hints_of_each(
    hints: Hints | Sequence[Hints | None] | None, count: int, things: str
) -> list[Hints | None]:
    """The hints of each of ``count`` things, from one mapping for all or a sequence of mappings."""
    if hints is None or isinstance(hints, Mapping):
        each = [hints] * count
    elif isinstance(hints, Sequence) and not isinstance(hints, str):
        each = list(hints)
    else:
        raise TypeError(f"routing is {_MEANT}, for all {things}, or a sequence of these, not {hints!r}")
    if len(each) != count:
        raise ValueError(f"{len(each)} routing hints for {count} {things}")
    for hint in each:
        _checked(hint)
    return each


def hashable_hints(hints: Any) -> tuple[tuple[str, str], ...] | None:
    """Hints, or pairs of their names and values, as sorted pairs; None is none."""
    if hints is None:
        return None
    return tuple(sorted(_checked(dict(hints) if isinstance(hints, tuple) else hints).items()))


def check_classes(names: Iterable[Any], where: str) -> None:
    """Raises ValueError for names that are not in `CLASSES`; ``where`` is for the message."""
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
