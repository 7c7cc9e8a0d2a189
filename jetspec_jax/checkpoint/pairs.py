"""Named pairs of a target and a draft head; a pair's name is accepted wherever a checkpoint is expected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax.checkpoint.gguf.smollm2 import find_smollm2
from jetspec_jax.demo import DEMO, DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.smollm2 import SMOLLM2, SMOLLM2_DRAFT_HEAD


class Pair(NamedTuple):
    """The files of a pair. ``find_target`` raises FileNotFoundError if the target is not installed."""

    find_target: Callable[[], Path]
    draft_head: Path


#: The pairs by name; a local folder of the same name must be written as "./demo".
PAIRS = {
    DEMO: Pair(lambda: DEMO_TARGET, DEMO_DRAFT_HEAD),
    SMOLLM2: Pair(find_smollm2, SMOLLM2_DRAFT_HEAD),
}
#: The names for help texts and errors.
PAIR_NAMES = " or ".join(PAIRS)


def pair_of(path_or_id: Any) -> Pair | None:
    """The pair of this name; None if it is not a pair's name."""
    return PAIRS.get(path_or_id) if isinstance(path_or_id, str) else None


def draft_head_at(path_or_id: Any) -> Any:
    """The location of a draft head; a pair's name, which elsewhere means its target, here means its head."""
    pair = pair_of(path_or_id)
    return path_or_id if pair is None else pair.draft_head


def default_draft_head(target: Any) -> str | None:
    """The draft head for a target without one: the same name if it is a pair's, else None."""
    return None if pair_of(target) is None else str(target)
