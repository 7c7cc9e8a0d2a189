"""Pairs of a target and a draft head that have a name wherever a checkpoint is expected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax.checkpoint.gguf.smollm2 import find_smollm2
from jetspec_jax.demo import DEMO, DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.smollm2 import SMOLLM2, SMOLLM2_DRAFT_HEAD


class Pair(NamedTuple):
    """Where the files of a pair are.

    Attributes:
        find_target: Returns the target's folder or file; raises FileNotFoundError if it is not installed.
        draft_head: The head's folder.
    """

    find_target: Callable[[], Path]
    draft_head: Path


#: By name; a folder of such a name is given as "./demo".
PAIRS = {
    DEMO: Pair(lambda: DEMO_TARGET, DEMO_DRAFT_HEAD),
    SMOLLM2: Pair(find_smollm2, SMOLLM2_DRAFT_HEAD),
}
#: The names as help texts and errors list them.
PAIR_NAMES = " or ".join(PAIRS)


def pair_of(path_or_id: Any) -> Pair | None:
    """The pair that a user's word names, if it names one."""
    return PAIRS.get(path_or_id) if isinstance(path_or_id, str) else None


def draft_head_at(path_or_id: Any) -> Any:
    """Where a draft head is: a pair's name stands for its head here, and for its target everywhere else."""
    pair = pair_of(path_or_id)
    return path_or_id if pair is None else pair.draft_head


def default_draft_head(target: Any) -> str | None:
    """The draft head where only a target is named: the same name, if it is a pair's."""
    return None if pair_of(target) is None else str(target)
