"""Tables of pages are those of kept reports."""

import itertools
import json
import re

import pytest

from bench import page
from bench.__main__ import main
from bench.common.intervals import ratio_interval
from bench.plots import read_report

PAGE = """# Results

<!-- decode one other -->
old
<!-- end -->

Prose stays.
"""
ROWS = [
    {
        "temperature": 0.0,
        "method": name,
        "tau": tau,
        "tokens/s": 50.0 * tau,
        "speed-up": tau / 2,
    }
    for name, tau in (("plain", 1.0), ("top_nodes 64", 4.0))
]
COMMAND = "python -m bench decode --prompts"
REPORT = {
    "benchmark": "decode",
    "device": "a CPU",
    "jax": "0.11.2",
    "command": f"{COMMAND} gsm8k=file",
    "arguments": {"prompts": "gsm8k=file"},
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    (tmp_path / "one.json").write_text(json.dumps({**REPORT, "rows": ROWS}))
    other = {"device": "a GPU", "arguments": {"prompts": "mine"}, "rows": ROWS[:1]}
    (tmp_path / "other.json").write_text(json.dumps({**REPORT, **other}))
    return tmp_path


def test_tables_take_the_place_of_old_ones(results, capsys):
    path = results / "page.md"
    path.write_text(PAGE)
    assert main(["page", str(path)]) == 0
    made = path.read_text()
    assert "| T | method | GSM8K | mine |" in made
    assert "| 0 | top_nodes 64 | 4.00 / 2.00 | – |" in made
    assert "| 0 | plain | 50.0 tokens/s | 50.0 tokens/s |" in made
    assert f"GSM8K: a CPU, JAX 0.11.2: `{COMMAND} SET=FILE`" in made
    assert f"mine: a GPU, JAX 0.11.2: `{COMMAND} SET=FILE`" in made
    assert "old" not in made
    assert "Prose stays." in made
    assert main(["page", str(path)]) == 0
    assert path.read_text() == made


def test_tables_of_the_pages_are_those_of_their_reports():
    pages = [path for path in page.DOCS.glob("**/*.md") if page._TABLE.search(path.read_text("utf-8"))]
    assert page.REAL_MODEL in pages
    for path in pages:
        text = path.read_text("utf-8")
        assert page.with_tables(text, path.name) == text, f"run: python -m bench page {path}"


# A row of a table of rounds: its report, the rest of its first cell, and its cells.
_ROUNDS = re.compile(r"^\| \[[^]]+\]\([./]*bench/results/(rounds/[\w.-]+)\.json\)([^|]*)\|(.*)\|$")


@pytest.mark.parametrize(("name", "count"), [("README.md", 6), ("docs/benchmarks.md", 14)])
def test_tables_of_rounds_are_those_of_their_reports(name, count):
    """In a loop on the device, and of the tree algorithm that the row names."""
    text, found = (page.DOCS.parent / name).read_text("utf-8"), 0
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        first, *titles = (cell.strip() for cell in table.splitlines()[0].strip("|").split("|"))
        # "plain step" is a tree of one node; columns of other things have no such number.
        budgets = [re.fullmatch(r"(plain)( step)?|(?:tree of )?(\d+)( nodes)?", title) for title in titles]
        for row, after in itertools.pairwise([*table.splitlines(), ""]):
            if (match := _ROUNDS.match(row)) is None or not any(budgets):
                continue
            report, named, cells = match.groups()
            floors = after.startswith("| its floor |") and after.removeprefix("| its floor |").strip("|")
            rows = read_report(page.RESULTS / f"{report}.json")["rows"]
            kinds = {own.get("algorithm") for own in rows} - {"plain", "chain"}
            kind = "top_nodes" if "top_nodes" in named or "accum_logp" not in kinds else "accum_logp"
            by_budget = {own["budget"]: own for own in rows if own.get("algorithm") in (kind, "plain", None)}
            shown = [(cells, "times_floor" if "times its floor" in first else "round_ms")]
            for line, key in [*shown, *([(floors, "floor_ms")] if floors else [])]:
                for budget, cell in zip(budgets, line.split("|"), strict=False):
                    if budget and cell.strip():
                        digits = len(cell.strip().partition(".")[2])
                        assert digits
                        value = by_budget[1 if budget[1] else int(budget[3])][key]
                        assert cell.strip() == f"{value:.{digits}f}", (report, budget[0], key)
            found += 1
    assert found == count


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Nothing", "has no table"),
        (
            PAGE + "<!-- shape one -->\n<!-- end -->",
            "asks for a table of 'shape'; all tables are of 'decode'",
        ),
        ("<!-- decode three -->\n<!-- end -->", "three is a report of 'round', not of 'decode'"),
        ("<!-- decode two -->\n<!-- end -->", "two.json"),
    ],
)
def test_a_page_that_cannot_be_made_stays(results, capsys, text, said):
    (results / "three.json").write_text(json.dumps({**REPORT, "benchmark": "round", "rows": []}))
    path = results / "page.md"
    path.write_text(text)
    assert main(["page", str(path)]) == 2
    assert said in capsys.readouterr().err
    assert path.read_text() == text


def test_intervals_hold_the_figure_and_narrow_with_prompts():
    tokens, seconds = [30.0, 50.0, 40.0, 80.0], [1.0, 2.0, 1.0, 3.0]
    low, high = ratio_interval(tokens, seconds)
    assert low < sum(tokens) / sum(seconds) < high
    narrow = ratio_interval(tokens * 50, seconds * 50)
    assert low < narrow[0] < narrow[1] < high
    # Drawn with its base, a prompt that is slow for both says nothing of the ratio.
    assert ratio_interval(tokens, seconds, tokens, [2 * one for one in seconds]) == pytest.approx([2.0, 2.0])
