"""The report of `python -m bench decode`: its settings, going on with an older one, the order of its rows."""

import argparse
import json
from pathlib import Path
from typing import Any

from bench.decode_report import best_of, notes_of
from bench.report import machine
from jetspec_jax import Target
from jetspec_jax.config import read_json
from jetspec_jax.tree import algorithm_names

# Arguments that change where things lie, and not what is measured.
_PLACES = ("run", "resume", "compilation_cache", "json", "plot", "plot_budget")
# Those of which a report that is gone on with may have others: it gains methods.
_SELECTION = ("algorithms", "budgets")


def begin_report(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The report without rows, or with those that are there already.

    Raises:
        ValueError: Those were measured with other settings or on another machine.
    """
    given = {key: _plain(value) for key, value in vars(arguments).items() if key not in _PLACES}
    report: dict[str, Any] = {
        "benchmark": "decode",
        **machine(),
        "dtype": str(target.weights["embed_tokens"].dtype),
        "implementation": arguments.implementation,
        "command": _command(given),
        "arguments": given,
        "rows": [],
    }
    if not (arguments.resume and arguments.json.is_file()):
        return report
    old = read_json(arguments.json)
    # As JSON has it: a tuple is a list there.
    for name, ours, theirs in [
        *((key, value, old.get(key)) for key, value in report.items() if not isinstance(value, dict | list)),
        *((key, value, old.get("arguments", {}).get(key)) for key, value in given.items()),
    ]:
        if name not in (*_SELECTION, "command") and json.loads(json.dumps(ours)) != theirs:
            raise ValueError(
                f"{arguments.json} was measured with {name} {shown(theirs)}, and this is {shown(ours)}; "
                "write to another file, or leave --resume out"
            )
    for name in _SELECTION:
        given[name] = list(dict.fromkeys([*old["arguments"][name], *given[name]]))
    report["command"] = _command(given)
    report["rows"] = old["rows"]
    return report


def finish_report(report: dict[str, Any]) -> None:
    """Orders the rows by temperature, algorithm and budget, and says what follows from all of them."""
    order = {name: i for i, name in enumerate([*algorithm_names(), *report["arguments"]["algorithms"]])}
    report["rows"].sort(
        key=lambda row: (
            row["temperature"],
            -2 if row["method"] == "plain" else -1 if row["algorithm"] is None else order[row["algorithm"]],
            row["budget"],
        )
    )
    report["best"] = best_of(report["rows"])
    report["notes"] = notes_of(report)


def _command(given: dict[str, Any]) -> str:
    """The command line of a report, all settings named."""
    words = ["python -m bench decode"]
    for key, value in given.items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif key == "algorithm_option":
            words += [f"--{option} '{own}'" for own in value]
        elif value is not None:
            words.append(f"--{option} {shown(value)}")
    return " ".join(words)


def _plain(value: Any) -> Any:
    """A setting without paths of this machine."""
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).exists()):
        return Path(value).name
    return value


def shown(value: Any) -> str:
    """A setting as a command line has it."""
    if isinstance(value, list):
        return " ".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
