"""Tables of tuned configurations per device kind, as kernels read them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.files import replacing

#: An entry: the kind of call, and its configuration.
Entry = Mapping[str, Any]


def read_table(path: Path) -> dict[str, list[Entry]]:
    """The table; empty without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def has_entry(path: Path, device_kind: str, key: Entry) -> bool:
    """Whether the table has an entry with a key, which is a part of the entry."""
    return any(key.items() <= entry.items() for entry in read_table(path).get(device_kind, []))


def keep(path: Path, device_kind: str, key: Entry, found: Entry) -> None:
    """Adds the entry of a key to the table, or replaces it; a device's entries are sorted by their keys."""
    table = read_table(path)  # another run may have added entries
    others = [entry for entry in table.get(device_kind, []) if not key.items() <= entry.items()]
    entries = sorted([*others, {**key, **found}], key=lambda entry: [entry[name] for name in key])
    write_table(path, {**table, device_kind: entries})


def write_table(path: Path, table: Mapping[str, Sequence[Entry]]) -> None:
    """Writes the table atomically, with an entry per line."""
    devices = [
        f"  {json.dumps(kind)}: [\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in entries) + "\n  ]"
        for kind, entries in sorted(table.items())
    ]
    with replacing(path) as partial:
        partial.write_text("{\n" + ",\n".join(devices) + "\n}\n", encoding="utf-8")
