"""Checks of what callers give: a wrong type is a TypeError, a wrong value a ValueError, both by name."""

import difflib
import functools
import inspect
import itertools
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxlevel = 3

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Of many entries the first: the library sorts them all."""
        return super().repr_dict(dict(itertools.islice(x.items(), self.maxdict + 1)), level)

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write integers of thousands of digits."""
        return super().repr_int(x, level) if x.bit_length() < 256 else f"<integer of {x.bit_length()} bits>"


_short = _Short()
# Characters of what is shown, whatever nests in it.
_WORDS = 300
# Characters of a name beyond which nobody has mistyped another one: to compare long names takes long.
_LONGEST_NAME = 64


def shown(value: object) -> str:
    """What an error message says of a value: its repr, cut to a few words."""
    return shortened(_short.repr(value), _WORDS)


def shortened(text: str, most: int) -> str:
    """A text cut to so many characters, the last of which says that more were there."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def printable(text: str) -> str:
    """Text for a message: line breaks and tabs stay, and what else cannot be printed is escaped as in `repr`.

    So nothing in it controls a terminal or turns the direction of the text around it.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like another; None where none is, or the other is very long."""
    alike = difflib.get_close_matches(name, known, 1) if len(name) < _LONGEST_NAME else ()
    return next(iter(alike), None)


def refuse_unknown(
    call: Callable[..., Any],
    unknown: Iterable[str],
    instead: Mapping[str, str],
    passes_to: Callable[..., Any] | None = None,
) -> None:
    """Raises TypeError if there are unknown keywords: for each what to do instead, or the nearest known one.

    Args:
        call: The function or class that was called with them.
        unknown: The keywords that it does not have.
        instead: What to do instead of some of them.
        passes_to: What gets keywords that the call passes on.
    """
    said = []
    for name in unknown:
        known = [*parameters_of(call), *(() if passes_to is None else parameters_of(passes_to))]
        near = nearest(name, known)
        advice = instead.get(name) or ("leave it out" if near is None else f"did you mean {near}?")
        said.append(f"{call.__name__} has no argument {name}; {advice}")
    if said:
        raise TypeError("; ".join(said))


def parameters_of(call: Callable[..., Any]) -> list[str]:
    """Names of the keywords that a function or a class has, without those that ``**`` would take."""
    parameters = inspect.signature(call).parameters.values()
    return [own.name for own in parameters if own.kind not in (own.VAR_POSITIONAL, own.VAR_KEYWORD)]


Value = TypeVar("Value")


def either(name: str, value: Value | None, vllm_name: str, vllm_value: Value | None) -> Value | None:
    """A setting that may be given under either of two names; raises ValueError if it is under both."""
    if value is not None and vllm_value is not None:
        raise ValueError(f"give {name} or {vllm_name}, which are two names of one setting, not both")
    return vllm_value if value is None else value


Kind = TypeVar("Kind", bound=type)


def refusing_unknown(instead: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """A decorator of dataclasses, whose calls with unknown keywords raise what `refuse_unknown` does."""

    def decorated(kind: Kind) -> Kind:
        init = kind.__init__
        names = inspect.signature(init).parameters.keys()

        @functools.wraps(init)
        def checked(self: Any, *given: Any, **named: Any) -> None:
            refuse_unknown(kind, [name for name in named if name not in names], instead)
            init(self, *given, **named)

        kind.__init__ = checked
        return kind

    return decorated


def is_integer(value: object) -> bool:
    """Whether it is an integer; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Complaints:
    """What is wrong with what a caller gives, so that all of it is said at once.

    Example::

        complaints = Complaints()
        for name, size in sizes.items():
            with complaints:
                check_integer(name, size, 1)
        complaints.raise_all()
    """

    def __init__(self) -> None:
        """Nothing is wrong yet."""
        self._errors: list[TypeError | ValueError] = []

    def __enter__(self) -> None:
        """Begins a check."""

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        """Keeps the TypeError or ValueError of a check."""
        if not isinstance(error, TypeError | ValueError):
            return False
        self._errors.append(error)
        return True

    def raise_all(self) -> None:
        """Raises what is wrong, if anything is, as one error: a TypeError if one of them is."""
        if self._errors:
            kind = TypeError if any(isinstance(error, TypeError) for error in self._errors) else ValueError
            raise kind("; ".join(map(str, self._errors)))


def check_type(name: str, value: object, kinds: Any, meant: str) -> None:
    """Raises TypeError unless ``value`` is of some types, which ``meant`` describes."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {meant}, not {shown(value)}")


def check_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The integer that was given, if it lies in ``least..most``; None is no bound.

    Raises:
        TypeError: It is no integer.
        ValueError: It lies outside.
    """
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, not {shown(value)}")
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"be at least {least}" if most is None else f"lie in {least}..{most}"
        raise ValueError(f"{name} must {bounds}, not {shown(value)}")
    return int(value)


def check_number(name: str, value: Any) -> float:
    """The number that was given, an integer beyond all floats as infinity; NaN passes too.

    Raises:
        TypeError: It is no number.
    """
    if not (is_integer(value) or isinstance(value, float | np.floating)):
        raise TypeError(f"{name} must be a number, not {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_flag(name: str, value: Any) -> bool:
    """The boolean that was given; raises TypeError for anything else."""
    check_type(name, value, bool | np.bool_, "True or False")
    return bool(value)


def check_text(name: str, text: str) -> None:
    """Raises ValueError for a text that is no Unicode: one with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise ValueError(
            f"{name} is no valid Unicode: half of a surrogate pair, U+{half:04X}, at position {error.start}"
        ) from error
