"""Tables of ``python -m bench kernel --operation experts``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def tables_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A titled table per operation and shape."""
    for key in dict.fromkeys((row["operation"], row["shape"]) for row in rows):
        yield ", ".join(key), [_shown(row) for row in rows if (row["operation"], row["shape"]) == key]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"tokens": row["tokens"]}
    if "experts" in row:
        shown |= {"experts": round(row["experts"], 1)}
    shown["us"] = row["us"]
    if "floor_us" in row:
        shown |= {"floor us": row["floor_us"], "x floor": row["times_floor"]}
    shown["wall us"] = row["wall_us"]
    for name, other in row["others"].items():
        shown |= {f"{name} us": other["micros"], f"x {name}": other["micros"] / row["us"]}
    return shown
