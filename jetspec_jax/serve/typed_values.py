"""Values that a model wrote as bare text, read as the types that a JSON schema allows."""

import ast
import contextlib
import json
import warnings
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple
from urllib.parse import unquote

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
#: As JSON and as Python write them.
_WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}
# Python's syntax tree of a text takes many times its characters in memory.
_LONGEST_LITERAL = 2**16
# Different references that are followed: a chain of them may be as long as a body.
_MOST_REFERENCES = 64


def _parsed(text: str) -> int | float | str | list[Any] | dict[str, Any] | None:
    """A JSON value but its words; None where the text is none."""
    value = None
    with contextlib.suppress(ValueError, RecursionError):
        value = read_json(text, strict=False)
    if value is None and text[:1] in ("[", "{") and len(text) <= _LONGEST_LITERAL:
        with (
            contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError),
            warnings.catch_warnings(action="ignore"),
        ):
            # As Python writes them: its words and quotes.
            value = json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    return value


class _Allowed(NamedTuple):
    """What a schema allows: names of types, and strings that it lists."""

    types: frozenset[str]
    strings: frozenset[str] = frozenset()


_ANYTHING = _Allowed(_ALL)


class ObjectSchema:
    """The schema of an object whose properties a model writes as bare text.

    These keywords tell the types of a property: ``type``, ``enum``, ``const``, ``anyOf``, ``oneOf``,
    ``allOf``, and ``$ref`` to places within the schema.
    """

    def __init__(self, root: Mapping[str, Any] | None):
        """Takes the schema; None allows all."""
        self._root = root or {}
        self._references: dict[str, _Allowed] = {}
        self._properties: dict[str, _Allowed] = {}

    def value(self, name: str, text: str) -> Any:
        """The value of a property.

        If the schema allows strings, a text is a string unless it is a value of another allowed type.
        Otherwise it is read as JSON, and stays a text if it is none.
        """
        if name not in self._properties:
            try:
                self._properties[name] = self._of_property(name)
            except RecursionError:
                self._properties[name] = _ANYTHING
        types, strings = self._properties[name]
        stripped = text.strip()
        for own in (text, stripped):
            if own in strings:
                return own
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
        """Whether the schema lists a property, or lists none at all."""
        listed = [own for part in self._parts() if isinstance(own := part.get("properties"), Mapping)]
        return not any(listed) or any(name in own for own in listed)

    def _parts(self) -> list[Mapping[str, Any]]:
        """The schemas that all hold for the object."""
        found, left = [], [self._root]
        while left and len(found) < _MOST_REFERENCES:
            own = left.pop(0)
            if isinstance(own, Mapping):
                found.append(own)
                left += [self._at(own.get("$ref")), *_listed(own.get("allOf"))]
        return found

    def _of_property(self, name: str) -> _Allowed:
        """What a property may be."""
        for part in self._parts():
            if isinstance(listed := part.get("properties"), Mapping) and name in listed:
                return self._allowed(listed[name])
        return self._allowed(self._root.get("additionalProperties"))

    def _allowed(self, schema: Any) -> _Allowed:
        """What a value may be: what all keywords allow. A keyword that is not understood allows all."""
        if not isinstance(schema, Mapping):
            return _ANYTHING
        every = [self._allowed(own) for own in _listed(schema.get("allOf"))]
        for name in ("anyOf", "oneOf"):
            if branches := [self._allowed(own) for own in _listed(schema.get(name))]:
                types, strings = (frozenset().union(*own) for own in zip(*branches, strict=True))
                every.append(_Allowed(types, strings))
        if values := [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
            types = frozenset(_NAMES.get(type(own), "") for own in values)
            every.append(_Allowed(types, frozenset(own for own in values if isinstance(own, str))))
        if (names := schema.get("type")) is not None:
            own = {name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)}
            # Every integer is a number. OpenAPI says "nullable".
            own |= {"integer"} if "number" in own else set()
            own |= {"null"} if schema.get("nullable") is True else set()
            every.append(_Allowed(frozenset(own)))
        if isinstance(pointer := schema.get("$ref"), str):
            every.append(self._referred(pointer))
        types = reduce(frozenset.intersection, (own.types for own in every), _ALL)
        return _Allowed(types or _ALL, frozenset().union(*(own.strings for own in every)))

    def _referred(self, pointer: str) -> _Allowed:
        """What the schema at a place allows; while that is found out, references to it allow all."""
        if pointer not in self._references:
            if len(self._references) == _MOST_REFERENCES:
                return _ANYTHING
            self._references[pointer] = _ANYTHING
            self._references[pointer] = self._allowed(self._at(pointer))
        return self._references[pointer]

    def _at(self, pointer: Any) -> Any:
        """What stands at a place such as ``#/$defs/Name``; None if nothing does."""
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return None
        own: Any = self._root
        for step in pointer[1:].split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(own, list) and key.isdecimal() and len(key) < 9:
                own = dict(enumerate(own)).get(int(key))
            else:
                own = own.get(key) if isinstance(own, Mapping) else None
        return own


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
