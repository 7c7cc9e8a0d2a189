"""Reports of all commands: command-line options, settings, machine, tables, JSON and picture."""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
from rich import box
from rich.console import Console
from rich.table import Table

import jetspec_jax
from jetspec_jax.checkpoint.files import check_writable, write_json

# Arguments without influence on what is measured: paths, what is shown, and the default number of prompts.
_PLACES = ("usual_prompts", "run", "draw", "resume", "compilation_cache", "json", "plot", "table")
# Options whose value is yes or no; other yes and no are switches.
_ANSWERED = ("fp8_activations",)
# Options that are repeated for each value.
_RECURRING = ("algorithm_option", "ignore_config_key", "other_head")


def add_report_arguments(parser: argparse.ArgumentParser, name: str, *, picture: bool = True) -> None:
    """Adds the paths of the report and, if the command draws one, of its picture."""
    path = Path(f"results/{name}.json")
    parser.add_argument("--json", type=Path, default=path, help=f"path of the report (default: {path})")
    if picture:
        parser.add_argument(
            "--plot",
            type=Path,
            help="path of the picture, an SVG (default: beside the report)",
        )


def check_report(arguments: argparse.Namespace) -> None:
    """Checks, before anything is measured, that the report and its picture can be written.

    Args:
        arguments: The command line, with `add_report_arguments`; a default ``plot`` is filled in.

    Raises:
        ValueError: The picture's name does not end in .svg, or is the report's.
        OSError: A file cannot be written.
    """
    paths = [arguments.json]
    if "plot" in arguments:
        arguments.plot = arguments.plot or arguments.json.with_suffix(".svg")
        paths.append(arguments.plot)
        if arguments.plot.suffix != ".svg":
            raise ValueError(f"--plot writes an SVG, whose name ends in .svg, not {arguments.plot}")
        if arguments.plot == arguments.json:
            raise ValueError(f"--json and --plot are one file: {arguments.plot}")
    for path in paths:
        check_writable(path, make_folder=True)


def opening_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The first keys of every report: device, versions, settings, and the command that repeats the run."""
    given = settings_of(arguments)
    return {"benchmark": name, **machine(), "command": command_of(name, given), "arguments": given}


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of a command line that influence what is measured, without this machine's folders."""
    return {key: _plain(value) for key, value in vars(arguments).items() if key not in _PLACES}


def command_of(name: str, settings: Mapping[str, Any]) -> str:
    """The command line with all settings named."""
    words = ["python", "-m", "bench", name]
    for key, value in settings.items():
        option = key.replace("_", "-")
        if isinstance(value, bool) and key in _ANSWERED:
            words += [f"--{option}", "yes" if value else "no"]
        elif isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif key in _RECURRING:
            words += [word for setting in value for word in (f"--{option}", setting)]
        elif value is not None:
            words += [f"--{option}", *map(shown, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def shown(value: Any) -> str:
    """A setting as written on a command line."""
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """A setting; a path relative to the working folder if it lies below, else its last part."""
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).exists()):
        path = Path(os.path.abspath(value))
        return path.relative_to(Path.cwd()).as_posix() if Path.cwd() in path.parents else path.name
    return value


def machine() -> dict[str, Any]:
    """The first device and the versions of Python and the libraries."""
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
    """Prints rows with equal keys as a table, and the notes below it."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    columns = []
    for key, value in rows[0].items():
        table.add_column(key, justify="left" if isinstance(value, str) else "right", overflow="fold")
        columns.append(_texts([row[key] for row in rows]))
    for texts in zip(*columns, strict=True):
        table.add_row(*texts)
    # Without a terminal Rich would fold columns at 80 characters. Cells may hold any text, so markup is off.
    console = Console(width=None if sys.stdout.isatty() else 130, markup=False, emoji=False)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def publish(
    arguments: argparse.Namespace,
    report: Mapping[str, Any],
    tables: Iterable[tuple[str, Sequence[Mapping[str, Any]]]],
    notes: Sequence[str] = (),
    *,
    title: str = "",
) -> None:
    """Prints the title, the tables and the notes, writes the report, and draws it if it has a picture.

    Args:
        arguments: The command line, checked by `check_report`.
        tables: At least one, each a title and rows; the notes are printed below the last.
    """
    if title:
        print(f"\n{title}")
    *others, (heading, rows) = tables
    for other in others:
        show(*other)
    show(heading, rows, notes)
    write_report(arguments.json, {**report, "notes": notes})
    if "plot" in arguments:
        arguments.draw(arguments.json, arguments.plot)


def measured_on(report: Mapping[str, Any]) -> str:
    """Type of the weights, devices and version of JAX, for a title."""
    dtype, count = report["dtype"], report.get("devices", 1)
    types = dtype if isinstance(dtype, str) else " and ".join(dtype)
    return f"{types}, {'' if count == 1 else f'{count} x '}{report['device']}, JAX {report['jax']}"


def _texts(values: Sequence[Any]) -> list[str]:
    """A column's cells; floats have two decimals, or three if one of them is below a tenth."""
    small = any(isinstance(value, float) and 0 < abs(value) < 0.1 for value in values)
    digits = 3 if small else 2
    return ["-" if v is None else f"{v:.{digits}f}" if isinstance(v, float) else str(v) for v in values]


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report atomically."""
    write_json(path, report)
    print(f"wrote {path}")
