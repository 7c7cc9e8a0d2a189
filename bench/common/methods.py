"""Which methods are compared: plain decoding, a chain, and algorithms with their options and budgets."""

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
# The one algorithm that chooses budgets; its trees are another's.
AUTO = "auto"
# The one whose trees do not branch: what every tree is to be compared with.
CHAIN = "chain"


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        name: In reports.
        algorithm: The name of the tree algorithm; None for plain decoding and the chain.
        settings: Of its trees; a budget of 1 is plain decoding.
    """

    name: str
    algorithm: str | None
    settings: TreeSettings


PLAIN_METHOD = Method("plain", None, PLAIN)


def choose_algorithms(
    names: Sequence[str], options: Sequence[str] = (), profile: Path | None = None
) -> dict[str, str | Algorithm]:
    """Algorithms by name, with their options.

    Args:
        names: What they are called, or "all".
        options: Each ``NAME=VALUE`` with a value in JSON, or ``ALGORITHM.NAME=VALUE`` where several
            algorithms are chosen.
        profile: A JSON table of measured acceptance, for the algorithms that take one.

    Raises:
        FileNotFoundError: There is no such profile.
        ValueError: A name, an option, a value or the profile is not valid, or nothing uses it.
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
        own_table = table if name in readers else None
        # Also the one that stays a name is made: what it needs is known before models are loaded.
        made = get_algorithm(name, given.get(name), own_table)
        chosen[name] = made if name in given or own_table is not None else name
    return chosen


def fixed_budget_names() -> tuple[str, ...]:
    """The algorithms whose rounds have the budget that they are given."""
    return tuple(name for name in algorithm_names() if name != AUTO)


def check_fixed_budgets(option: str, names: Sequence[str]) -> None:
    """Raises ValueError for the algorithm that chooses budgets, where each has the one that it is given."""
    if AUTO in names:
        raise ValueError(
            f"{option} {AUTO}: it chooses budgets, and here they are given; name the algorithm of its trees, "
            f"usually {DEFAULT_ALGORITHM}, or measure {AUTO} with `python -m bench decode`"
        )


def takes_profile(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a known algorithm, or one that its options name, takes a table of measured acceptance."""
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
    """All methods but plain decoding, a list for each budget, the smallest first; the chain heads them all.

    Raises:
        ValueError: A setting is out of its range.
    """
    # All that the head drafts, one node a depth.
    chain = Method(CHAIN, None, TreeSettings(head.config.block_size, 1))
    groups = [
        [
            Method(f"{name} {budget}", name, TreeSettings(budget, width, None, algorithm, candidates))
            for name, algorithm in algorithms.items()
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
