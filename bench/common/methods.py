"""The methods that a benchmark compares: plain decoding, a chain, and algorithms with options and budgets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jetspec_jax import Head, Target
from jetspec_jax.cli.options import parse_option
from jetspec_jax.config import read_json
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.tree import DEFAULT_ALGORITHM, Algorithm, Profile, algorithm_names, get_algorithm
from jetspec_jax.tree.algorithms import check_algorithm

ALL = "all"
# The only algorithm that chooses budgets; another algorithm grows its trees.
AUTO = "auto"
# The algorithm whose trees do not branch: the baseline of all trees.
CHAIN = "chain"


@dataclass(frozen=True)
class Method:
    """A way to decode; ``algorithm`` is None for plain decoding, which has a budget of 1, and the chain."""

    name: str
    algorithm: str | None
    settings: TreeSettings


PLAIN_METHOD = Method("plain", None, PLAIN)


def choose_algorithms(
    names: Sequence[str], options: Sequence[str] = (), profile: Path | None = None
) -> dict[str, str | Algorithm]:
    """Algorithms by name, with their options.

    Args:
        names: The names, or "all".
        options: Each ``NAME=VALUE`` with a value in JSON, or ``ALGORITHM.NAME=VALUE`` if several
            algorithms are chosen.
        profile: A JSON table of measured acceptance, for the algorithms that take one.

    Raises:
        FileNotFoundError: There is no such profile.
        ValueError: A name, an option, a value or the profile is invalid or unused.
    """
    names = list(dict.fromkeys(algorithm_names() if ALL in names else names))
    for name in names:
        check_algorithm(name)
    given: dict[str, dict[str, Any]] = {}
    for option in options:
        path, value = parse_option(option, "[ALGORITHM.]NAME=VALUE")
        owner, _, name = path.rpartition(".")
        if not owner and len(names) > 1:
            raise ValueError(
                f"--algorithm-option {option!r}: say whose: one of {', '.join(names)}, a dot, {path}"
            )
        owner = owner or names[0]
        if owner not in names:
            raise ValueError(f"--algorithm-option {option!r}: {owner} is not among {', '.join(names)}")
        given.setdefault(owner, {})[name] = value
    raw = None if profile is None else read_json(profile)
    readers = {name for name in names if takes_profile(name, given.get(name, {}))}
    if raw is not None and not readers:
        raise ValueError(f"--profile: none of {', '.join(names)} takes a profile")
    table = None if raw is None else Profile.parse(raw, where=str(profile))
    chosen: dict[str, str | Algorithm] = {}
    for name in names:
        profile_table = table if name in readers else None
        # Algorithms that stay names are made too: their errors must come before models are loaded.
        made = get_algorithm(name, given.get(name), profile_table)
        chosen[name] = made if name in given or profile_table is not None else name
    return chosen


def fixed_budget_names() -> tuple[str, ...]:
    """The algorithms that use the given budget in every round."""
    return tuple(name for name in algorithm_names() if name != AUTO)


def check_fixed_budgets(option: str, names: Sequence[str]) -> None:
    """Raises ValueError if the algorithm that chooses budgets is among those of a command with fixed ones."""
    if AUTO in names:
        raise ValueError(
            f"{option} {AUTO}: {AUTO} chooses budgets, and here they are fixed; name the algorithm of its "
            f"trees, usually {DEFAULT_ALGORITHM}, or measure {AUTO} with `python -m bench decode`"
        )


def takes_profile(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a known algorithm, or one named in its options, reads a table of measured acceptance."""
    if name not in algorithm_names():
        return False
    below = [value for value in (options or {}).values() if isinstance(value, str)]
    return "profile" in {f.name for f in fields(type(get_algorithm(name)))} or any(map(takes_profile, below))


def choose_methods(
    target: Target,
    head: Head,
    algorithms: Mapping[str, str | Algorithm],
    budgets: Sequence[int],
    width: int | None = None,
    candidates: int | None = None,
) -> list[list[Method]]:
    """All methods except plain decoding: a list per budget, in ascending order, with the chain at the front.

    Raises:
        ValueError: A setting is out of range.
    """
    # All drafts of the head, one node per depth.
    selected = head.config.selected
    chain = Method(CHAIN, None, TreeSettings(head.config.block_size, 1).for_selected(selected))
    groups = [
        [
            Method(f"{name} {budget}", name, settings.for_selected(selected))
            for name, algorithm in algorithms.items()
            for settings in [TreeSettings(budget, width, None, algorithm, candidates)]
        ]
        for budget in sorted(set(budgets))
    ]
    groups[0].insert(0, chain)
    for group in groups:
        for method in group:
            try:
                method.settings.check(target.config, head.config.depth)
            except ValueError as error:
                raise ValueError(f"{method.name}: {error}") from error
    return groups
