"""What form a text must have, as a request says it: checked as far as that needs no tokenizer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetspec_jax.arguments import check_flag, check_text, check_type, refusing_unknown, shown
from jetspec_jax.vllm_names import STRUCTURED

#: Of anything in a grammar. Each repeat takes memory, and no output is as long.
MOST_REPEATS = 1_000_000
# Keywords of JSON schemas that count.
_COUNTS = frozenset(
    f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")
)


@refusing_unknown(STRUCTURED)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of a text: exactly one of the first five, under vLLM's names.

    Attributes:
        json: A JSON schema, as a mapping or as text.
        regex: A regular expression that the whole text matches.
        choice: Texts of which it is one.
        grammar: A grammar, in Lark's form or in GBNF.
        json_object: True asks for any JSON object.
        disable_any_whitespace: Of JSON: no spaces and line breaks between its parts. A model may write these
            without end where they are allowed.

    Raises:
        TypeError: Something is of a wrong type.
        ValueError: None of them is given or several are, or one is malformed.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = False
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        """Checks what was given, and brings it into one form: text that can be compared and hashed."""
        if self.json_object is None:
            object.__setattr__(self, "json_object", False)
        for name in ("json_object", "disable_any_whitespace"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        names = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            those = " and ".join(given) if given else "none"
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(names)}; given: {those}")
        if self.disable_any_whitespace and self.json is None and not self.json_object:
            raise ValueError(f"disable_any_whitespace is for json and json_object, not for {given[0]}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                _check_grammar(name, text)

    @property
    def kind(self) -> str:
        """Which of them was given."""
        return self.source[0]

    @property
    def source(self) -> tuple[str, str]:
        """Which of them was given, and its text; choices are a list in JSON."""
        if self.json_object:
            return "json_object", '{"type": "object"}'
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        [own] = [(name, text) for name in ("json", "regex", "grammar") if (text := getattr(self, name))]
        return own


def _schema(schema: Any) -> str:
    """A schema as text in one form."""
    check_type("json", schema, str | Mapping, "a JSON schema: a mapping, or the text of one")
    try:
        # Also what was a mapping is read, so that all keys are strings.
        value = json.loads(schema if isinstance(schema, str) else json.dumps(dict(schema)))
        text, counts = json.dumps(value, allow_nan=False), list(_counts(value))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"json is no JSON schema: {error}; got {shown(schema)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"json must be a JSON schema, an object, not {shown(value)}")
    for name, count in counts:
        if count > MOST_REPEATS:
            raise ValueError(f"{name} in json must be at most {MOST_REPEATS:,}, not {shown(count)}")
    return text


def _counts(value: Any) -> Iterator[tuple[str, float]]:
    """The counts in a schema, which may also stand in what only looks like a keyword."""
    if isinstance(value, dict):
        for key, own in value.items():
            if key in _COUNTS and isinstance(own, int | float):
                yield key, own
            yield from _counts(own)
    elif isinstance(value, list):
        for own in value:
            yield from _counts(own)


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str | bytes) or not isinstance(choices, Sequence):
        raise TypeError(f"choice must be a list of texts, not {shown(choices)}")
    if not choices:
        raise ValueError("choice must hold at least one text")
    for text in choices:
        check_type("a text in choice", text, str, "a text")
        check_text(f"the choice {shown(text)}", text)
    return tuple(choices)


def _check_grammar(name: str, text: Any) -> None:
    check_type(name, text, str, "a text")
    check_text(name, text)
    if not text:
        raise ValueError(f"{name} must not be empty")
    for counts in _repeats(text):
        if any(float(count) > MOST_REPEATS for count in counts):
            found = shown(f"{{{','.join(counts)}}}")
            raise ValueError(f"{name} must repeat nothing more than {MOST_REPEATS:,} times, not {found}")


def _repeats(text: str) -> Iterator[list[str]]:
    """The counts of each ``{3}``, ``{3,}`` and ``{3,5}`` in a regular expression or grammar.

    Each character is read once: a regular expression that searches for them takes time like N⁴ where a client
    sends a brace and many spaces.
    """
    for part in text.split("{")[1:]:
        inside, closed, _ = part.partition("}")
        counts = [count for count in map(str.strip, inside.split(",")) if count]
        if closed and all(map(str.isdecimal, counts)):
            yield counts
