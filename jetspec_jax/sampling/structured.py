"""A request's structured-output parameters, checked as far as possible without a tokenizer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jetspec_jax.arguments import check_flag, check_text, check_type, refusing_unknown, shown
from jetspec_jax.sampling.closed_schema import close_objects
from jetspec_jax.vllm_names import STRUCTURED

#: Most repetitions of anything in a grammar. Each takes memory, and no output is as long.
MOST_REPEATS = 1_000_000
# Keywords of JSON schemas whose values are counts.
_COUNTS = frozenset(
    f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")
)


@refusing_unknown(STRUCTURED)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """The required form of a text: exactly one of the first five fields, which have vLLM's names.

    Attributes:
        json: A JSON schema, as a mapping or as text.
        regex: A regular expression that the whole text must match.
        choice: The possible texts.
        grammar: A grammar in Lark form or in GBNF.
        json_object: True for any JSON object.
        disable_any_whitespace: For JSON, allow no whitespace between its parts. Some models write endless
            whitespace where it is allowed.
        disable_additional_properties: For JSON, allow an object that lists keys only these, unless its schema
            says ``additionalProperties``; see `close_objects` for the exceptions. False allows any other key.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: None or several of the five are given, or the given one is malformed.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True

    def __post_init__(self) -> None:
        if self.json_object is None:
            object.__setattr__(self, "json_object", False)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
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

    @cached_property
    def source(self) -> tuple[str, str]:
        """The name of the given field, and its text: choices as a JSON list, a schema with closed objects."""
        if self.json_object:
            return "json_object", '{"type": "object"}'
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        if self.json is not None and self.disable_additional_properties:
            close_objects(schema := json.loads(str(self.json)))
            return "json", json.dumps(schema)
        [given] = [(name, text) for name in ("json", "regex", "grammar") if (text := getattr(self, name))]
        return given


def _schema(schema: Any) -> str:
    """A schema as normalised JSON text."""
    check_type("json", schema, str | Mapping, "a JSON schema: a mapping, or the text of one")
    try:
        # A mapping is also serialised and parsed, so that all keys are strings.
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
    """The values of all keys in a schema that look like count keywords."""
    if isinstance(value, dict):
        for key, nested in value.items():
            if key in _COUNTS and isinstance(nested, int | float):
                yield key, nested
            yield from _counts(nested)
    elif isinstance(value, list):
        for nested in value:
            yield from _counts(nested)


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

    Each character is read once; a regular expression would need O(N⁴) time for a brace and many spaces.
    """
    for part in text.split("{")[1:]:
        inside, closed, _ = part.partition("}")
        counts = [count for count in map(str.strip, inside.split(",")) if count]
        if closed and all(map(str.isdecimal, counts)):
            yield counts
