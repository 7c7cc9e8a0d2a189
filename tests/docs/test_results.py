"""Kept reports: a page needs each, what a page names is there, and they stay few and small."""

import functools
import json
import re
from pathlib import Path

import pytest

from bench.page import REAL_MODEL
from bench.plots import BUDGETS, TRACE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    RESULTS / "NOTES.md",
    *(ROOT / "jetspec_jax").glob("*/README.md"),
    ROOT / "train/results/README.md",
]
FILES = {path for path in RESULTS.rglob("*") if path.is_file()}
MOST_FILES, MOST_BYTES = 80, 3_500_000
# A path in a link, or in code; the latter may be a glob. A command's reports are elsewhere.
_LINK = re.compile(r"\]\(([^)#\s]+\.(?:json|svg|png))\)")
_CODE = re.compile(r"(?<![\w/])(bench/results/[\w./*-]+\.(?:json|svg|png))")
_TABLE = re.compile(r"^<!-- decode ([\w./ -]+) -->$", re.M)


def cited(page):
    """What a page names of reports and pictures, as patterns below the repository's root."""
    text = page.read_text("utf-8")
    for link in _LINK.findall(text):
        if not re.match(r"[a-z]+:", link):
            yield (page.parent / link).resolve().relative_to(ROOT).as_posix()
    yield from _CODE.findall(text)
    for reports in _TABLE.findall(text) if page == REAL_MODEL else ():
        yield from (f"bench/results/{report}.json" for report in reports.split())


def _name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_cited_report_is_there(page):
    assert [pattern for pattern in cited(page) if not any(ROOT.glob(pattern))] == []


def test_every_kept_report_is_cited():
    named = {path for page in PAGES for pattern in cited(page) for path in ROOT.glob(pattern)}
    named |= {RESULTS / f"{report}.json" for report in (BUDGETS, TRACE)}
    assert FILES - named == {RESULTS / "NOTES.md"}


# A number of two digits or more that is no part of a name.
_NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?!\w)")
# Seconds in ms and µs, shares in per cent, bytes in GiB, and thousands.
_UNITS = (1, 1e3, 1e6, 100, 1 / 2**30, 1e-3, 1e-6)
#: Numbers beside reports that are none of theirs: quotients of two, sums, and sizes.
DERIVED = {
    "algorithms.md": {"156"},
    "benchmarks.md": {
        "4,079",
        "88",
        "2.31",
        "10.24",
        "15.4",
        "1.89",
        "347",
        "106",
        "349",
        "362",
        "120",
        "364",
        "196",
        "76",
        "66",
    },
    "exactness.md": {"243,536"},
    "real-model.md": {"34,659", "76,478", "173", "384"},
}


def figures(page):
    """The numbers of each paragraph that names reports, and of a table below it; and the reports' values."""
    text = re.sub(
        r"(?ms)^<!-- decode [\w./ -]+ -->$.*?^<!-- end -->$|^```.*?^```$", "", page.read_text("utf-8")
    )
    for block in re.split(r"\n\n+(?!\|)", text):  # a table belongs to the paragraph above
        linked = [page.parent / path for path in _LINK.findall(block) if not re.match(r"[a-z]+:", path)]
        reports = [*linked, *(path for pattern in _CODE.findall(block) for path in ROOT.glob(pattern))]
        values = [value for path in reports if path.suffix == ".json" for value in leaves(path)]
        if values:
            words = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", block)
            yield [number for number in _NUMBER.findall(words) if len(number) > 1], values


@functools.cache
def leaves(path):
    """All numbers of a report."""
    found = []
    json.loads(
        path.read_text("utf-8"),
        parse_float=lambda text: found.append(float(text)),
        parse_int=lambda text: found.append(int(text)),
    )
    return found


def is_of(number, values):
    """Whether a report has the number, in any unit; a larger one may be rounded to three digits."""
    digits = number.replace(",", "")
    zeros = min(len(digits) - len(digits.rstrip("0")), max(len(digits) - 3, 0))
    half = 0.501 * 10.0 ** (zeros if "." not in digits else -len(digits.partition(".")[2]))
    return any(abs(value * unit - float(digits)) <= half for value in values for unit in _UNITS)


# The notes, and those of training, have more quotients than figures.
@pytest.mark.parametrize("page", [page for page in PAGES if "results" not in page.parts], ids=_name)
def test_figures_beside_a_report_are_of_it(page):
    wrong = {number for numbers, values in figures(page) for number in numbers if not is_of(number, values)}
    assert wrong == DERIVED.get(page.name, set())


def test_a_picture_is_shown_by_a_page_and_drawn_from_its_report():
    shown = {
        (page.parent / path).resolve()
        for page in PAGES
        for path in re.findall(r"^!\[[^]]*\]\(([^)\s]+)\)", page.read_text("utf-8"), re.M)
    }
    pictures = {path for path in FILES if path.suffix != ".json"} - {RESULTS / "NOTES.md"}
    assert {path.suffix for path in pictures} == {".svg"}
    assert pictures <= shown
    assert all(path.with_suffix(".json") in FILES for path in pictures)


def test_reports_are_few_and_small_and_lie_by_subject():
    assert len(FILES) <= MOST_FILES
    assert sum(path.stat().st_size for path in FILES) <= MOST_BYTES
    assert {path.relative_to(RESULTS).parts[0] for path in FILES} == {
        "NOTES.md",
        *("demo", "engine", "kernels", "qwen2.5-coder-0.5b", "rounds", "smollm2", "training"),
    }
    assert all(len(path.relative_to(RESULTS).parts) == 2 for path in FILES if path.suffix != ".md")
