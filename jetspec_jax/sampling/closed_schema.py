"""Closes the objects of a JSON schema, so that a text has only the keys that the schema lists."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

# Keywords with schemas by name, and keywords with a schema or a list of schemas.
_DEFINITIONS = frozenset({"$defs", "definitions"})
_NAMED = _DEFINITIONS | {"properties", "patternProperties", "dependentSchemas", "dependencies"}
_LISTED = frozenset({"additionalProperties", "items", "additionalItems", "prefixItems", "anyOf", "oneOf"})
# Keywords under which schemas always combine with others for the same value.
_COMBINING = frozenset(
    {"allOf", "not", "if", "then", "else", "contains", "propertyNames", "dependentSchemas"}
    | {"dependencies", "unevaluatedProperties", "unevaluatedItems"}
)
# Keywords whose schemas combine with whatever stands beside them, and the keywords that may.
_ALTERNATIVES = frozenset({"anyOf", "oneOf", "$ref"})
_ASSERTING = frozenset(
    {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}
    | {"dependentRequired", "items", "additionalItems", "prefixItems"}
)
# Keywords of objects that say which other keys they have, or that may need other keys.
_OPEN = _COMBINING | _ALTERNATIVES
_OPEN |= {"additionalProperties", "minProperties", "dependentRequired", "enum", "const"}


def close_objects(schema: dict[str, Any]) -> None:
    """Adds ``"additionalProperties": false`` in place to objects that list keys and say nothing of others.

    Objects whose keys several schemas list together stay open, as each schema would forbid the keys of the
    others: what is below or beside ``allOf``, or beside ``anyOf``, ``oneOf`` or ``$ref``, also through
    references. So do objects that require a key which they do not list. A schema that allowed a text before
    still allows one.
    """
    objects: dict[int, dict[str, Any]] = {}
    combined: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    # Schemas with the document that their pointers are relative to, and whether they are combined.
    left: list[tuple[Any, Any, bool]] = [(schema, schema, False)]
    while left:
        node, document, combines = left.pop()
        if not isinstance(node, dict) or (id(node), combines) in seen:
            continue
        seen.add((id(node), combines))
        objects[id(node)] = node
        if combines:
            combined.add(id(node))
        document = node if "$id" in node else document
        within = combines or _combines(node)
        for key, part in _parts(node):
            left.append((part, document, key not in _DEFINITIONS and (within or key in _COMBINING)))
        if "$ref" in node:
            target = referred(document, node["$ref"])
            if target is None and within:
                return  # the reference may mean any schema, so none is known to be alone
            left.append((target, document, within))
    for place, node in objects.items():
        if place not in combined and _lists_its_keys(node):
            node["additionalProperties"] = False


def _parts(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly within a schema, with their keywords."""
    for key, value in node.items():
        if key in _NAMED and isinstance(value, dict):
            yield from ((key, part) for part in value.values())
        elif key in _LISTED or key in _COMBINING:
            yield from ((key, part) for part in (value if isinstance(value, list) else [value]))


def _combines(node: dict[str, Any]) -> bool:
    """Whether several keywords of a schema may list keys of one object."""
    alternatives = sum(_may_list(node[key]) for key in _ALTERNATIVES & node.keys())
    return (
        bool({"allOf", "enum", "const"} & node.keys())
        or alternatives > 1
        or (alternatives == 1 and bool(_ASSERTING & node.keys()))
        or {"properties", "patternProperties"} <= node.keys()
    )


def _may_list(alternatives: Any) -> bool:
    """Whether alternatives, or the target of a reference, may list keys, and not only require some."""
    return not isinstance(alternatives, list) or any(
        not isinstance(branch, dict) or bool(branch.keys() - {"required", "type"}) for branch in alternatives
    )


def _lists_its_keys(node: dict[str, Any]) -> bool:
    """Whether a schema lists keys of an object, needs no others, and says nothing of others."""
    if not {"properties", "patternProperties"} & node.keys() or _OPEN & node.keys():
        return False
    listed, required = node.get("properties", {}), node.get("required", [])
    return (
        isinstance(listed, dict)
        and isinstance(required, list)
        and all(isinstance(key, str) and key in listed for key in required)
    )


def referred(document: Any, reference: Any) -> Any:
    """The schema at a pointer such as ``#/$defs/a``; None if there is none, or for another reference."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target = document
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            place = int(name) if name.isdecimal() and len(name) < 9 else len(target)
            target = target[place] if place < len(target) else None
        else:
            target = target.get(name) if isinstance(target, dict) else None
    return target
