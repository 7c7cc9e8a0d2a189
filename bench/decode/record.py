"""The report of `python -m bench decode`: its settings, resuming an older report, the order of its rows."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bench.common.given_profile import profile_notes
from bench.common.report import command_of, opening_of, shown
from bench.decode.report import best_of, notes_of
from jetspec_jax.config import read_json
from jetspec_jax.tree import algorithm_names

# Settings that may differ when a report is resumed: the report gains methods.
_SELECTION = ("algorithms", "budgets")
# Settings that are not compared: they do not change the measurement. A profile is compared by its hash.
_WORDS = ("command", "ignore_config_key", "profile")


def begin_report(arguments: argparse.Namespace, about: Mapping[str, Any]) -> dict[str, Any]:
    """A report without rows, or the report to resume; ``about`` describes the pair and the profile.

    Raises:
        ValueError: The report to resume has other settings, or another machine.
    """
    report: dict[str, Any] = {
        **opening_of("decode", arguments),
        **about,
        "implementation": arguments.implementation,
        "rows": [],
    }
    given = report["arguments"]
    if not (arguments.resume and arguments.json.is_file()):
        return report
    # Older reports lack the number of devices, which was one.
    old = {"devices": 1, **read_json(arguments.json)}
    # Values are compared in JSON's form, where a tuple is a list.
    for name, ours, theirs in [
        *((key, value, old.get(key)) for key, value in report.items() if not isinstance(value, dict | list)),
        *((key, value, old.get("arguments", {}).get(key)) for key, value in given.items()),
    ]:
        if name not in (*_SELECTION, *_WORDS) and json.loads(json.dumps(ours)) != theirs:
            raise ValueError(
                f"{arguments.json} was measured with {name} {shown(theirs)}, and this is {shown(ours)}; "
                "write to another file, or leave --resume out"
            )
    for name in _SELECTION:
        given[name] = list(dict.fromkeys([*old["arguments"][name], *given[name]]))
    report["command"] = command_of("decode", given)
    report["rows"] = old["rows"]
    return report


def finish_report(report: dict[str, Any]) -> None:
    """Sorts the rows by temperature, algorithm and budget, and adds the best methods and the notes."""
    order = {name: i for i, name in enumerate([*algorithm_names(), *report["arguments"]["algorithms"]])}
    report["rows"].sort(
        key=lambda row: (
            row["temperature"],
            -2 if row["method"] == "plain" else -1 if row["algorithm"] is None else order[row["algorithm"]],
            row["budget"],
        )
    )
    report["best"] = best_of(report["rows"])
    report["notes"] = [*notes_of(report), *profile_notes(report)]


def finished_methods(rows: Sequence[Mapping[str, Any]], repeats: int) -> set[str]:
    """The methods with all of their timed runs; after an interrupt some methods have fewer."""
    names = {row["method"] for row in rows}
    return names - {row["method"] for row in rows if len(row["seconds"]) < repeats}


def with_measured(
    rows: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Rows updated by measured ones, except where a row already has more timed runs."""
    found = {(row["method"], row["temperature"]): row for row in rows}
    for row in measured:
        kept = found.get((row["method"], row["temperature"]))
        if kept is None or len(kept["seconds"]) <= len(row["seconds"]):
            found[row["method"], row["temperature"]] = row
    return list(found.values())
