"""Rewrites the tables of a page of the documentation from kept reports.

A table starts with a line ``<!-- decode smollm2/gsm8k-gpu smollm2/humaneval-gpu -->``, which names reports of
the benchmark "decode" in bench/results, one per prompt set. It ends with a line ``<!-- end -->``. The rest of
the page does not change.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.plots import DOCS, RESULTS, read_report
from jetspec_jax.checkpoint.files import write_text

REAL_MODEL = DOCS / "real-model.md"
_Reports = Sequence[Mapping[str, Any]]
_TABLE = re.compile(r"(?m)^(<!-- ([a-z]+) ([\w./ -]+) -->\n)(?:.*\n)*?(<!-- end -->)$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "pages", nargs="*", type=Path, default=[REAL_MODEL], help="Markdown (default: docs/real-model.md)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the pages.

    Raises:
        FileNotFoundError: A page or a report is missing.
        ValueError: A page has no table, or a table names another kind or a report of another benchmark.
    """
    for path in arguments.pages:
        write_text(path, with_tables(path.read_text(encoding="utf-8"), str(path)))
        print(f"wrote {path}")
    return 0


def with_tables(page: str, name: str) -> str:
    """The text of a page with new tables; see `run` for errors, in which the page has a ``name``."""

    def table(match: re.Match[str]) -> str:
        begin, kind, names, end = match.groups()
        if kind != "decode":
            raise ValueError(f"{name} asks for a table of {kind!r}; all tables are of 'decode'")
        reports = [read_report(RESULTS / f"{report}.json") for report in names.split()]
        for report, found in zip(names.split(), reports, strict=True):
            if (other := found["benchmark"]) != "decode":
                raise ValueError(f"{name}: {report} is a report of {other!r}, not of 'decode'")
        return "\n".join([begin, *_decode(reports), "", *_captions(reports), end])

    made, count = _TABLE.subn(table, page)
    if not count:
        raise ValueError(f"{name} has no table: a line <!-- decode REPORT --> and a line <!-- end -->")
    return made


def _decode(reports: _Reports) -> Iterator[str]:
    """τ and speed relative to plain decoding, by temperature and method: a column per report."""
    each = sorted((row for report in reports for row in report["rows"]), key=lambda row: row["temperature"])
    rows = {(f"{row['temperature']:g}", row["method"]): [] for row in each}
    for report in reports:
        found = {(f"{row['temperature']:g}", row["method"]): row for row in report["rows"]}
        for key, cells in rows.items():
            row = found.get(key)
            cells.append(f"{row['tau']:.2f} / {row['speed-up']:.2f}" if row else "–")
            if row and row["method"] == "plain":
                cells[-1] = f"{row['tokens/s']:,.{0 if row['tokens/s'] > 100 else 1}f} tokens/s"
    names = ["T", "method", *map(_set_of, reports)]
    yield from _table(names, [[*key, *cells] for key, cells in rows.items()])


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table: the first column is text, the others are numbers."""
    yield f"| {' | '.join(names)} |"
    yield f"|---|{'---:|' * (len(names) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _set_of(report: Mapping[str, Any]) -> str:
    """The prompt set of a report, as the page writes it."""
    name = str(report["arguments"]["prompts"]).partition("=")[0]
    return {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt-bench": "MT-Bench"}.get(name, name)


def _captions(reports: _Reports) -> Iterator[str]:
    """A line for the reports of each device and command, but for the prompts."""
    found: dict[str, list[str]] = {}
    for report in reports:
        command = report["command"]
        if len(reports) > 1:
            command = re.sub(r"--prompts \S+", "--prompts SET=FILE", command)
        line = f"{report['device']}, JAX {report['jax']}: `{command}`"
        found.setdefault(line, []).append(_set_of(report) if len(reports) > 1 else "")
    for line, sets in found.items():
        yield f"{', '.join(sets)}: {line}" if len(found) > 1 else line
        yield ""
