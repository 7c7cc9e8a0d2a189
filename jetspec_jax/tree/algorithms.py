"""The base class of tree algorithms, and the registry of algorithms by name.

All trees grow best-first from the same candidates. An algorithm decides how many children a node may have at
each depth, what is added to their priority, and whether children are inserted together or one by one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeVar

from jaxtyping import Array, Float32, Int32

from jetspec_jax.arguments import is_redefinition
from jetspec_jax.tree.candidates import Candidates
from jetspec_jax.tree.profiles import Profile
from jetspec_jax.tree.routing import Routing


class Plan(NamedTuple):
    """How the trees of a batch grow.

    Attributes:
        caps: Most children of a node at depth d, which are the best of draft row d; clipped to 0..W.
        bonus: Added to the priority of nodes at depth d + 1 and of their descendants; None means 0. It
            changes the order of growth, but not the nodes' scores.
        weight: Factor of the log-probabilities in the priority if there is a bonus. Static.
    """

    caps: Int32[Array, "B D"]
    bonus: Float32[Array, "B D"] | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Algorithm:
    """Base class of tree algorithms: a frozen, hashable dataclass of options with a method `plan`.

    The contract: options are hashable; a plan is traceable, deterministic, and independent of the other
    sequences in the batch. `jetspec_jax.tree.check_algorithm_contract` tests it.

    A new algorithm is a frozen dataclass with its options as fields, registered under a new name::

        @register_algorithm("first_two")
        @dataclass(frozen=True)
        class FirstTwo(Algorithm):
            levels: int = 3

            def plan(self, candidates, routing):
                batch, depth, width = candidates.tokens.shape
                caps = [min(2, width) if d < self.levels else 1 for d in range(depth)]
                return Plan(jnp.broadcast_to(jnp.array([caps], jnp.int32), (batch, depth)))

    Attributes:
        one_by_one: Whether children are inserted individually by priority, instead of all together when
            their parent is expanded.
        usual_candidates: Default number of candidates per draft row.
        table: The table that a given profile must have: "depth_rank_accept", "per_class_histograms", or None
            if neither is required.
    """

    one_by_one: ClassVar[bool] = False
    usual_candidates: ClassVar[int] = 7
    table: ClassVar[str | None] = None

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """Plans the growth of a batch's trees; runs inside a compiled round, so it must be traceable.

        Args:
            candidates: The W best candidates of each row, best first.
            routing: Routing hints of the sequences.
        """
        raise NotImplementedError


_KNOWN: dict[str, type[Algorithm]] = {}
_Kind = TypeVar("_Kind", bound=type[Algorithm])


def register_algorithm(name: str) -> Callable[[_Kind], _Kind]:
    """A decorator that registers an algorithm under a name.

    A class outside this package takes the place of an earlier one of the same module and qualified name, so
    that a cell of a notebook can run again. Instances of the earlier class keep it.

    Raises:
        ValueError: The name is taken by another class, or the class is not a frozen dataclass with a plan.
    """

    def register(kind: _Kind) -> _Kind:
        if name in _KNOWN and not is_redefinition(_KNOWN[name], kind):
            raise ValueError(
                f"the tree algorithm {name!r} is {_KNOWN[name].__qualname__}; choose another name"
            )
        _check_kind(kind)
        _KNOWN[name] = kind
        return kind

    return register


def name_of(algorithm: "Algorithm") -> str:
    """The registered name of an algorithm, or the name of its class."""
    kind = type(algorithm)
    return next((name for name, known in _KNOWN.items() if known is kind), kind.__qualname__)


def algorithm_names() -> tuple[str, ...]:
    """All registered names, those of the reference implementation first."""
    return tuple(_KNOWN)


def check_algorithm(name: str) -> None:
    """Raises ValueError, with the registered names, for an unknown name, and TypeError for other types."""
    if not isinstance(name, str):
        raise TypeError(f"a tree algorithm must be a name, or an Algorithm with its options, not {name!r}")
    if name not in _KNOWN:
        raise ValueError(f"unknown tree algorithm {name!r}; known algorithms: {', '.join(_KNOWN)}")


def algorithm_of(chosen: "str | Algorithm") -> "Algorithm":
    """An algorithm itself, or the algorithm of a name with default options.

    Raises:
        ValueError: The name is unknown, or the algorithm is not a frozen dataclass or not hashable.
    """
    if not isinstance(chosen, Algorithm):
        return get_algorithm(chosen)
    _check_kind(type(chosen))
    _check_options(chosen)
    return chosen


def get_algorithm(
    name: str,
    options: Mapping[str, Any] | None = None,
    profile: Profile | Mapping[str, Any] | None = None,
) -> Algorithm:
    """The algorithm ``name`` with options.

    Args:
        name: One of `algorithm_names`.
        options: Options by name; lists and mappings are accepted for tuples.
        profile: A profile, or its JSON, for an algorithm that reads one. An algorithm on top of others, such
            as "auto", passes it to the algorithms in its options.

    Raises:
        ValueError: The name or an option is unknown, a value or the profile is invalid, or the profile lacks
            the table that the algorithm reads.
    """
    check_algorithm(name)
    kind, given = _KNOWN[name], dict(options or {})
    known = {f.name for f in fields(kind)}
    if unknown := sorted(given.keys() - known | given.keys() & {"profile"}):
        offered = ", ".join(sorted(known - {"profile"})) or "none"
        raise ValueError(f"unknown options {unknown} of the tree algorithm {name!r}; it has: {offered}")
    if profile is not None:
        given |= _with_profile(
            name, kind, given, profile if isinstance(profile, Profile) else Profile.parse(profile)
        )
    missing = [
        f.name
        for f in fields(kind)
        if f.default is MISSING and f.default_factory is MISSING and f.name not in given
    ]
    if missing:
        raise ValueError(f"the tree algorithm {name!r} needs {', '.join(missing)}")
    _check_kinds(name, kind, given)
    made = kind(**given)
    _check_options(made)
    return made


def _with_profile(
    name: str, kind: type[Algorithm], given: Mapping[str, Any], profile: Profile
) -> Mapping[str, Any]:
    """The options that take the profile: ``profile`` itself, or options that are names of algorithms."""
    usual = {option.name: option.default for option in fields(kind)}
    if "profile" in usual:
        if kind.table is not None and not profile.has(kind.table):
            raise ValueError(f"{profile.where} has no {kind.table}, which the tree algorithm {name!r} reads")
        return {"profile": profile}
    below = [option for option, default in usual.items() if isinstance(default, Algorithm)]
    named = [option for option in below if isinstance(given.get(option), str)]
    if not named:
        instead = f" itself; choose an algorithm that does as its {' or '.join(below)}" if below else ""
        raise ValueError(f"the tree algorithm {name!r} takes no profile{instead}")
    return {option: get_algorithm(given[option], None, profile) for option in named}


def _check_kinds(name: str, kind: type[Algorithm], given: Mapping[str, Any]) -> None:
    """Raises ValueError for options whose default is a number, boolean or algorithm and whose value is not.

    Numbers must be finite, unless the default is infinite.
    """
    wrong = []
    for option in fields(kind):
        value, usual = given.get(option.name, option.default), option.default
        if isinstance(usual, bool):
            fits, meant = isinstance(value, bool), "true or false"
        elif isinstance(usual, Real):
            fits, meant = _is_number(value), "a finite number"
            if math.isinf(usual):
                fits, meant = fits or value in (math.inf, -math.inf), "a number"
        elif isinstance(usual, Algorithm):
            fits, meant = isinstance(value, str | Algorithm), "an algorithm or the name of one"
        else:
            continue
        if not fits:
            wrong.append(f"{option.name} must be {meant}, not {value!r}")
    if wrong:
        raise ValueError(f"options of the tree algorithm {name!r}: {'; '.join(wrong)}")


def _is_number(value: Any) -> bool:
    """Whether a value is a number that is finite as a float."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _check_kind(kind: type[Algorithm]) -> None:
    """Raises ValueError unless a class is a dataclass with a plan."""
    # A class that is not a dataclass inherits its parent's equality, so caches could not tell its options.
    if not issubclass(kind, Algorithm) or "__dataclass_fields__" not in vars(kind):
        raise ValueError(f"{kind.__qualname__} must be a frozen dataclass on top of Algorithm")
    if kind.plan is Algorithm.plan:
        raise ValueError(f"{kind.__qualname__} must have a plan of its own")


def _check_options(algorithm: Algorithm) -> None:
    """Raises ValueError for options that are not hashable; compiled programs are cached by options."""
    wrong = []
    for option in fields(algorithm):
        try:
            hash(getattr(algorithm, option.name))
        except TypeError:
            wrong.append(f"{option.name} is a {type(getattr(algorithm, option.name)).__name__}")
    if wrong:
        raise ValueError(
            f"options of the tree algorithm {name_of(algorithm)!r} must be hashable, and {', '.join(wrong)}; "
            "make tuples of lists and arrays in __post_init__"
        )
