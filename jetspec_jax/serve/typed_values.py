"""Converts values that a model wrote as bare text to the types of a JSON schema."""

import ast
import contextlib
import json
import warnings
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

from jetspec_jax.sampling.closed_schema import referred
from jetspec_jax.serve.bodies import read_json

_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    str: "string",
}
_ALL = frozenset(_NAMES.values())
#: Words of JSON and of Python.
_WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}
# Longer texts are not parsed as Python literals, whose syntax trees need much memory.
_LONGEST_LITERAL = 2**16
# Most schemas that apply to an object, and most references that are resolved: a body may have thousands,
# each to a large schema.
_MOST_REFERENCES = 64


def _parsed(text: str) -> int | float | str | list[Any] | dict[str, Any] | None:
    """A value from JSON or a Python literal; None if the text is neither."""
    value = None
    with contextlib.suppress(ValueError, RecursionError):
        value = read_json(text, strict=False)
    if value is None and text[:1] in ("[", "{") and len(text) <= _LONGEST_LITERAL:
        with (
            contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError),
            warnings.catch_warnings(action="ignore"),
        ):
            # A Python literal, with Python's words and quotes.
            value = json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    return value


class _Allowed(NamedTuple):
    """The values that a schema allows: names of types, and listed strings."""

    types: frozenset[str]
    strings: frozenset[str] = frozenset()


_ANYTHING = _Allowed(_ALL)


class ObjectSchema:
    """The schema of an object whose properties a model writes as bare text.

    The types of a property come from the keywords ``type``, ``enum``, ``const``, ``anyOf``, ``oneOf``,
    ``allOf``, and ``$ref`` within the schema.
    """

    def __init__(self, root: Mapping[str, Any] | None):
        self._root = root or {}
        self._references: dict[str, _Allowed] = {}
        self._properties: dict[str, _Allowed] = {}

    def value(self, name: str, text: str) -> Any:
        """The value of a property from its text.

        If the schema allows strings, the text is a string unless it is a value of another allowed type.
        Otherwise the text is parsed as JSON, and is a string if that fails.
        """
        if name not in self._properties:
            try:
                self._properties[name] = self._of_property(name)
            except RecursionError:
                self._properties[name] = _ANYTHING
        types, strings = self._properties[name]
        stripped = text.strip()
        for candidate in (text, stripped):
            if candidate in strings:
                return candidate
        if stripped in _WORDS:
            value = _WORDS[stripped]
            allowed = stripped.islower() if types == _ALL else _NAMES[type(value)] in types
            return value if allowed or "string" not in types else text
        value = _parsed(stripped)
        if isinstance(value, float) and not {"number", "string"} & types and value.is_integer():
            return int(value)
        if types == _ALL or "string" not in types:
            return text if value is None else value
        return value if _NAMES[type(value)] in types - {"null", "string"} else text

    def lists(self, name: str) -> bool:
        """Whether the schema lists a property, or has no list of properties."""
        listed = [
            properties for part in self._parts() if isinstance(properties := part.get("properties"), Mapping)
        ]
        return not any(listed) or any(name in properties for properties in listed)

    def _parts(self) -> list[Mapping[str, Any]]:
        """All schemas that apply to the object: the root, its references and ``allOf``."""
        found, left = [], [self._root]
        while left and len(found) < _MOST_REFERENCES:
            part = left.pop(0)
            if isinstance(part, Mapping):
                found.append(part)
                left += [referred(self._root, part.get("$ref")), *_listed(part.get("allOf"))]
        return found

    def _of_property(self, name: str) -> _Allowed:
        """The allowed values of a property."""
        for part in self._parts():
            if isinstance(listed := part.get("properties"), Mapping) and name in listed:
                return self._allowed(listed[name])
        return self._allowed(self._root.get("additionalProperties"))

    def _allowed(self, schema: Any) -> _Allowed:
        """The values that all keywords of a schema allow; unknown keywords allow everything."""
        if not isinstance(schema, Mapping):
            return _ANYTHING
        every = [self._allowed(branch) for branch in _listed(schema.get("allOf"))]
        for name in ("anyOf", "oneOf"):
            if branches := [self._allowed(branch) for branch in _listed(schema.get(name))]:
                types, strings = (frozenset().union(*sets) for sets in zip(*branches, strict=True))
                every.append(_Allowed(types, strings))
        if values := [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
            types = frozenset(_NAMES.get(type(value), "") for value in values)
            every.append(_Allowed(types, frozenset(value for value in values if isinstance(value, str))))
        if (names := schema.get("type")) is not None:
            typed = {
                name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)
            }
            # Every integer is a number. "nullable" is OpenAPI's keyword.
            typed |= {"integer"} if "number" in typed else set()
            typed |= {"null"} if schema.get("nullable") is True else set()
            every.append(_Allowed(frozenset(typed)))
        if isinstance(pointer := schema.get("$ref"), str):
            every.append(self._referred(pointer))
        types = reduce(frozenset.intersection, (allowed.types for allowed in every), _ALL)
        return _Allowed(types or _ALL, frozenset().union(*(allowed.strings for allowed in every)))

    def _referred(self, pointer: str) -> _Allowed:
        """The values that a referenced schema allows; a reference to itself allows everything."""
        if pointer not in self._references:
            if len(self._references) == _MOST_REFERENCES:
                return _ANYTHING
            self._references[pointer] = _ANYTHING
            self._references[pointer] = self._allowed(referred(self._root, pointer))
        return self._references[pointer]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
