"""What every report shares: the machine it was measured on, a table on the screen, a JSON file."""

import json
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
from rich import box
from rich.console import Console
from rich.table import Table

import jetspec_jax


def machine() -> dict[str, Any]:
    """Device and versions."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "jetspec_jax": jetspec_jax.__version__,
    }


def show(title: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> None:
    """Prints rows of equal keys as a table."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    columns = []
    for key, value in rows[0].items():
        table.add_column(key, justify="left" if isinstance(value, str) else "right", overflow="fold")
        columns.append(_texts([row[key] for row in rows]))
    for texts in zip(*columns, strict=True):
        table.add_row(*texts)
    # Rich would fold columns at 80 where the output is no terminal. Cells may hold any text: none is markup.
    console = Console(width=None if sys.stdout.isatty() else 130, markup=False, emoji=False)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def _texts(values: Sequence[Any]) -> list[str]:
    """The values of a column; floats with two decimals, or three if one of them is below a tenth."""
    small = any(isinstance(value, float) and 0 < abs(value) < 0.1 for value in values)
    digits = 3 if small else 2
    return ["-" if v is None else f"{v:.{digits}f}" if isinstance(v, float) else str(v) for v in values]


def check_writable(*paths: Path) -> None:
    """Finds out, before anything is measured, whether reports can be written; makes their folders.

    Raises:
        OSError: One cannot: its folder, or a file in it, cannot be made.
    """
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; name a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.rename(path)
    print(f"wrote {path}")
