"""Checks of arguments: a wrong type raises TypeError, a wrong value ValueError; both name the argument."""

import codecs
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
        """Cuts large dicts first, because reprlib would sort all entries."""
        return super().repr_dict(dict(itertools.islice(x.items(), self.maxdict + 1)), level)

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write integers of thousands of digits."""
        return super().repr_int(x, level) if x.bit_length() < 256 else f"<integer of {x.bit_length()} bits>"


_short = _Short()
# The most characters of a value in an error message.
_WORDS = 300
# Names of this length or more get no suggestion, because comparing long names is slow.
_LONGEST_NAME = 64
#: Similarity of two names, as difflib measures it, from which on one is suggested for the other.
NEAR = 0.7
#: The advice for a name that is unknown altogether. To leave it out may change the result.
NO_OTHER = "nothing here has a name like it"


def shown(value: object) -> str:
    """A value's repr for an error message, at most 300 characters long."""
    return shortened(_short.repr(value), _WORDS)


def shortened(text: str, most: int) -> str:
    """A text cut to at most ``most`` characters; a cut text ends in "…"."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def printable(text: str) -> str:
    """Escapes unprintable characters other than line breaks and tabs, as `repr` does.

    The result cannot control a terminal or change the direction of the text around it.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def skip_bom(content: bytes) -> bytes:
    """A file's content without the byte-order mark that some editors write at the beginning of UTF-8."""
    return content.removeprefix(codecs.BOM_UTF8)


def decode_utf8(content: bytes, where: str) -> str:
    """Decodes a text of a user's, see `skip_bom`; reading in text mode would let other bytes pass."""
    try:
        return skip_bom(content).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no UTF-8 text: {error}") from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest in spelling to ``name``; None if none is close or ``name`` is very long."""
    alike = difflib.get_close_matches(name, known, 1, NEAR) if len(name) < _LONGEST_NAME else ()
    return next(iter(alike), None)


def refuse_unknown(
    call: Callable[..., Any],
    unknown: Iterable[str],
    instead: Mapping[str, str],
    passes_to: Callable[..., Any] | None = None,
) -> None:
    """Raises TypeError if there are unknown keywords, with advice or the nearest known keyword for each.

    ``call`` passes further keywords on to ``passes_to``.
    """
    errors = []
    for name in unknown:
        known = [*parameters_of(call), *(() if passes_to is None else parameters_of(passes_to))]
        near = nearest(name, known)
        advice = instead.get(name) or (near and f"did you mean {near}?") or NO_OTHER
        errors.append(f"{call.__name__} has no argument {name}; {advice}")
    if errors:
        raise TypeError("; ".join(errors))


def parameters_of(call: Callable[..., Any]) -> list[str]:
    """Names of a function's or class's parameters, without ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(call).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


Value = TypeVar("Value")


def either(name: str, value: Value | None, vllm_name: str, vllm_value: Value | None) -> Value | None:
    """A setting that has two names; raises ValueError if both are given."""
    if value is not None and vllm_value is not None:
        raise ValueError(f"give {name} or {vllm_name}, which are two names of one setting, not both")
    return vllm_value if value is None else value


Kind = TypeVar("Kind", bound=type)


def refusing_unknown(instead: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """A decorator for dataclasses that makes unknown keywords raise as `refuse_unknown` does."""

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


class _Absent:
    """A class attribute that does not exist, on the class and on its instances, and the reason."""

    def __init__(self, reason: str):
        self._reason = reason

    def __get__(self, thing: object, kind: type) -> Any:
        raise AttributeError(self._reason)


def refusing_attributes(instead: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """A decorator for classes that adds advice to the AttributeError for some names."""

    def decorated(kind: Kind) -> Kind:
        assert not vars(kind).keys() & instead.keys()
        for name, advice in instead.items():
            setattr(kind, name, _Absent(f"{kind.__name__} has no {name}: {advice}"))
        return kind

    return decorated


def is_redefinition(old: type, new: type) -> bool:
    """Whether a class outside this package is defined again, as by a cell of a notebook that runs twice."""
    places = [(kind.__module__, kind.__qualname__) for kind in (old, new)]
    return places[0] == places[1] and places[0][0].partition(".")[0] != __name__.partition(".")[0]


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or NumPy; bools are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Complaints:
    """Collects errors of several checks, to raise them as one.

    Example::

        complaints = Complaints()
        for name, size in sizes.items():
            with complaints:
                check_integer(name, size, 1)
        complaints.raise_all()
    """

    def __init__(self) -> None:
        self._errors: list[TypeError | ValueError] = []

    def __enter__(self) -> None:
        """Begins a check."""

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if not isinstance(error, TypeError | ValueError):
            return False
        self._errors.append(error)
        return True

    def raise_all(self) -> None:
        """Raises one error with all messages, if there are any: a TypeError if one of the errors is."""
        if self._errors:
            kind = TypeError if any(isinstance(error, TypeError) for error in self._errors) else ValueError
            raise kind("; ".join(map(str, self._errors)))


def check_type(name: str, value: object, kinds: Any, meant: str) -> None:
    """Raises TypeError unless ``value`` is of one of ``kinds``, which ``meant`` describes."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {meant}, not {shown(value)}")


def check_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The value as an int, checked to be in ``least..most``; a bound of None is not checked."""
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer, not {shown(value)}")
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"be at least {least}" if most is None else f"lie in {least}..{most}"
        raise ValueError(f"{name} must {bounds}, not {shown(value)}")
    return int(value)


def check_number(name: str, value: Any) -> float:
    """The value as a float; integers beyond the range of floats become infinity, and NaN is allowed."""
    if not (is_integer(value) or isinstance(value, float | np.floating)):
        raise TypeError(f"{name} must be a number, not {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_flag(name: str, value: Any) -> bool:
    """The value as a bool; raises TypeError if it is not a boolean of Python or NumPy."""
    check_type(name, value, bool | np.bool_, "True or False")
    return bool(value)


def check_text(name: str, text: str) -> None:
    """Raises ValueError for a text that is not valid Unicode, because it has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise ValueError(
            f"{name} is no valid Unicode: half of a surrogate pair, U+{half:04X}, at position {error.start}"
        ) from error
