"""Rewrites the tables of a page of the documentation from kept reports.

A table starts with a line ``<!-- decode smollm2/gsm8k-gpu -->``, which names its kind and its report in
bench/results, and ends with a line ``<!-- end -->``. The rest of the page does not change.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.plots import DOCS, RESULTS, read_report
from jetspec_jax.checkpoint.files import write_text

#: The page of the pair "smollm2".
REAL_MODEL = DOCS / "real-model.md"
#: The depths in the table of acceptance.
DEPTHS = (1, 2, 3, 4, 6, 8, 11)

_TABLE = re.compile(r"(?m)^(<!-- ([a-z]+) ([\w./-]+) -->\n)(?:.*\n)*?(<!-- end -->)$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "pages", nargs="*", type=Path, default=[REAL_MODEL], help="Markdown (default: docs/real-model.md)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the pages.

    Raises:
        FileNotFoundError: A page or a report is missing.
        ValueError: A page has no table, or a table has an unknown kind or another kind's report.
    """
    for path in arguments.pages:
        write_text(path, with_tables(path.read_text(encoding="utf-8"), str(path)))
        print(f"wrote {path}")
    return 0


def with_tables(page: str, name: str) -> str:
    """A page with new tables; see `run` for errors.

    Args:
        page: The page's text.
        name: The page's name in errors.
    """

    def table(match: re.Match[str]) -> str:
        begin, kind, report, end = match.groups()
        if kind not in KINDS:
            raise ValueError(f"{name} asks for a table of {kind!r}; there are {', '.join(KINDS)}")
        benchmark, make = KINDS[kind]
        found = read_report(RESULTS / f"{report}.json")
        if found["benchmark"] != benchmark:
            raise ValueError(
                f"{name}: {report} is a report of {found['benchmark']!r}; {kind} needs one of {benchmark!r}"
            )
        return "\n".join([begin, *make(found), "", end])

    made, count = _TABLE.subn(table, page)
    if not count:
        raise ValueError(f"{name} has no table: a line <!-- KIND REPORT --> and a line <!-- end -->")
    return made


def _decode(report: Mapping[str, Any]) -> Iterator[str]:
    """τ and speed of all methods, by temperature."""
    rows = [
        [
            f"{row['temperature']:g}",
            row["method"],
            _with_interval(row, "tau", 2),
            _with_interval(row, "tokens/s", 0 if row["tokens/s"] > 100 else 1),
            _with_interval(row, "speed-up", 2),
            f"{row['exact match']:.0%}",
            f"{row['first token ms']:.1f}",
        ]
        for row in report["rows"]
    ]
    yield from _table(["T", "method", "τ", "tokens/s", "times plain", "equal", "first token, ms"], rows)
    yield ""
    yield _caption(report)


def _acceptance(report: Mapping[str, Any]) -> Iterator[str]:
    """Shares of rounds that accept at least a number of drafted tokens."""
    deepest = len(report["rows"][0]["acceptance"])  # all methods of a head have the same depth
    depths = [depth for depth in DEPTHS if depth <= deepest]
    rows = [
        [
            f"{row['temperature']:g}",
            row["method"],
            *(f"{row['acceptance'][depth - 1]:.0%}" for depth in depths),
        ]
        for row in report["rows"]
        if row["method"] != "plain"
    ]
    yield from _table(["T", "method", *map(str, depths)], rows)


def _exactness(report: Mapping[str, Any]) -> Iterator[str]:
    """Compared tokens, and differences."""
    rows = [
        [
            row["dtype"],
            f"{row['T']:g}",
            row["method"],
            f"{row['tokens']:,}",
            str(row["divergences"]),
            _or_dash(row["ties"]),
            _or_dash(row["mistakes"]),
            _or_dash(row["largest_gap"], ".1e"),
        ]
        for row in report["rows"]
    ]
    names = ["type", "T", "method", "tokens", "outputs that part", "ties", "mistakes", "largest gap"]
    yield from _table(names, rows)
    yield ""
    yield _caption(report)


def _phases(report: Mapping[str, Any]) -> Iterator[str]:
    """Times of a round and its phases, with the floor."""
    phases = list(report["rows"][0]["phases_ms"])
    rows = [
        [
            str(row["budget"]),
            f"{row['round_ms']:.3f}",
            *(f"{row['phases_ms'][phase]:.3f}" for phase in phases),
            f"{row['floor_ms']:.3f}",
            f"{row['times_floor']:.1f}",
        ]
        for row in report["rows"]
    ]
    yield from _table(["nodes", "round, ms", *phases, "floor, ms", "times the floor"], rows)
    yield ""
    yield _caption(report)


#: The benchmark and the table's function of each kind.
KINDS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Iterator[str]]]] = {
    "decode": ("decode", _decode),
    "acceptance": ("decode", _acceptance),
    "exactness": ("exactness", _exactness),
    "phases": ("round", _phases),
}


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table: the first column is text, the others are numbers."""
    yield f"| {' | '.join(names)} |"
    yield f"|---|{'---:|' * (len(names) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _with_interval(row: Mapping[str, Any], figure: str, digits: int) -> str:
    value = f"{row[figure]:.{digits}f}"
    if row["method"] == "plain" and figure != "tokens/s":
        return value
    low, high = row[f"{figure} interval"]
    return f"{value} ({low:.{digits}f} to {high:.{digits}f})"


def _or_dash(figure: float | None, form: str = "") -> str:
    return "–" if figure is None else format(figure, form)


def _caption(report: Mapping[str, Any]) -> str:
    """The device and the command of a report."""
    return f"{report['device']}, JAX {report['jax']}: `{report['command']}`"
