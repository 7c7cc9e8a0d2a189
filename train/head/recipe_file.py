"""Recipes as TOML files, with a table per dataclass and a key per field.

Unknown keys and wrong types are errors; all of them are reported at once.
"""

import argparse
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from jetspec_jax.arguments import decode_utf8
from jetspec_jax.config.fields import check_size
from train.head.recipe import HeadRecipe

CONFIGS = Path(__file__).parents[1] / "configs"
#: Recipes of `python -m train pair` have this at the end of their names.
PAIR = "-pair"
HEAD_RECIPES = tuple(sorted(p.stem for p in CONFIGS.glob("*.toml") if not p.stem.endswith(PAIR)))
PAIR_RECIPES = tuple(sorted(p.stem for p in CONFIGS.glob(f"*{PAIR}.toml")))

T = TypeVar("T")


def add_set_option(parser: argparse.ArgumentParser, example: str) -> None:
    """Adds the option ``--set``, whose values are the ``changes`` of `read_head_recipe`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"replaces a setting of the recipe, for example {example}; repeatable",
    )


def read_head_recipe(name_or_path: str | Path, changes: Iterable[str] = ()) -> HeadRecipe:
    """Reads the recipe of a draft head.

    Args:
        name_or_path: The name of a recipe in ``configs/``, or a TOML file.
        changes: Settings that replace the file's, as ``fit.steps=100``; the value is TOML.

    Raises:
        FileNotFoundError: There is no such recipe.
        ValueError: The file is not TOML, a key is unknown or missing, or a value has the wrong type.
    """
    path, table = find_table(name_or_path)
    change(table, changes)
    return record_of(HeadRecipe, table, path)


def find_table(name_or_path: str | Path, known: Iterable[str] = HEAD_RECIPES) -> tuple[Path, dict[str, Any]]:
    """A recipe's file and its table.

    Args:
        name_or_path: The name of a recipe in ``configs/``, or a TOML file.
        known: The names to list in an error.

    Raises:
        FileNotFoundError: There is no such recipe.
        ValueError: The file is not TOML.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = CONFIGS / f"{name_or_path}.toml"
    if not path.is_file():
        raise FileNotFoundError(f"no recipe {name_or_path}: name a TOML file or one of {', '.join(known)}")
    try:
        check_size(path)
        return path, tomllib.loads(decode_utf8(path.read_bytes(), "it"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def record_of(kind: type[T], table: Mapping[str, Any], where: Any) -> T:
    """A dataclass from a table.

    Raises:
        ValueError: A key is unknown or missing, or a value has the wrong type; all are listed.
    """
    wrong: list[str] = []
    record = _record(kind, table, "", wrong)
    if wrong:
        raise ValueError(f"{where}: " + "; ".join(wrong))
    return record


def toml_of(table: Mapping[str, Any], name: str = "") -> str:
    """A table as TOML: values first, then tables and lists of tables. Keys of None are omitted."""
    lines, below = [], []
    for key, value in table.items():
        full = f"{name}.{key}" if name else key
        if isinstance(value, Mapping):
            below.append(f"\n[{full}]\n{toml_of(value, full)}")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            below += [f"\n[[{full}]]\n{toml_of(part, full)}" for part in value]
        elif value is not None:
            # JSON's texts, numbers, lists and booleans are TOML's too.
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f"))
    return "".join(lines + below)


def change(table: dict[str, Any], changes: Iterable[str]) -> None:
    """Changes settings of a table, each as ``fit.steps=100``; the value is TOML, and a bare word a string."""
    for each in changes:
        name, equals, text = each.partition("=")
        if not (name and equals):
            raise ValueError(f"a change is KEY=VALUE, as fit.steps=100, not {each!r}")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # a bare word is a string
        *tables, key = name.split(".")
        below = table
        for part in tables:
            below = below.setdefault(part, {})
            if not isinstance(below, dict):
                raise ValueError(f"{part} in {each!r} is no table")
        below[key] = value


def _record(kind: Any, table: Mapping[str, Any], where: str, wrong: list[str]) -> Any:
    """A dataclass from a table; on errors, appends them to ``wrong`` and returns None."""
    hints, known = typing.get_type_hints(kind), {f.name: f for f in fields(kind)}
    before = len(wrong)
    unknown = sorted(table.keys() - known.keys())
    wrong += [f"unknown key {where}{key}; there are {', '.join(known)}" for key in unknown]
    values = {}
    for name, setting in known.items():
        if name in table:
            values[name] = _value(hints[name], table[name], where + name, wrong)
        elif setting.default is MISSING and setting.default_factory is MISSING:
            if is_dataclass(hints[name]):
                values[name] = _record(hints[name], {}, f"{where}{name}.", wrong)
            else:
                wrong.append(f"missing key {where}{name}")
    return kind(**values) if len(wrong) == before else None


def _value(hint: Any, value: Any, where: str, wrong: list[str]) -> Any:
    for kind in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if is_dataclass(kind):
            if isinstance(value, dict):
                return _record(kind, value, f"{where}.", wrong)
        elif (
            (record := _of_list(kind)) and isinstance(value, list) and all(isinstance(v, dict) for v in value)
        ):
            return tuple(_record(record, v, f"{where}[{i}].", wrong) for i, v in enumerate(value))
        elif _is(kind, value):
            return tuple(value) if isinstance(value, list) else value
    wrong.append(f"{where} must be {_name(hint)}, not {value!r}")
    return None


def _of_list(kind: Any) -> Any:
    """The dataclass of a list of tables; None for other types."""
    element = (*typing.get_args(kind), None)[0]
    return element if typing.get_origin(kind) is tuple and is_dataclass(element) else None


def _is(kind: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, list) and all(_is(arguments[0], item) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _name(hint: Any) -> str:
    if is_dataclass(hint):
        return "a table"
    if isinstance(hint, types.UnionType):
        return " or ".join(_name(kind) for kind in typing.get_args(hint) if kind is not types.NoneType)
    if _of_list(hint):
        return "a list of tables"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list of {_name(arguments[0])}"
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}[hint]
