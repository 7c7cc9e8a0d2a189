"""Kept reports: a page needs each, what a page names is there, and they stay few and small."""

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
_TABLE = re.compile(r"^<!-- [a-z]+ ([\w./-]+) -->$", re.M)


def cited(page):
    """What a page names of reports and pictures, as patterns below the repository's root."""
    text = page.read_text("utf-8")
    for link in _LINK.findall(text):
        if not re.match(r"[a-z]+:", link):
            yield (page.parent / link).resolve().relative_to(ROOT).as_posix()
    yield from _CODE.findall(text)
    for report in _TABLE.findall(text) if page == REAL_MODEL else ():
        yield f"bench/results/{report}.json"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_cited_report_is_there(page):
    assert [pattern for pattern in cited(page) if not any(ROOT.glob(pattern))] == []


def test_every_kept_report_is_cited():
    named = {path for page in PAGES for pattern in cited(page) for path in ROOT.glob(pattern)}
    named |= {RESULTS / f"{report}.json" for report in (BUDGETS, TRACE)}
    assert FILES - named == {RESULTS / "NOTES.md"}


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
        *("demo", "engine", "kernels", "rounds", "smollm2", "training"),
    }
    assert all(len(path.relative_to(RESULTS).parts) == 2 for path in FILES if path.suffix != ".md")
