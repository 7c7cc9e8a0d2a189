"""Tables of pages are those of kept reports."""

import json
import re

import pytest

from bench import page
from bench.__main__ import main
from bench.common.intervals import ratio_interval
from bench.plots import read_report

PAGE = """# Results

<!-- decode one -->
old
<!-- end -->

Prose stays.

<!-- acceptance one -->
<!-- end -->
"""
ROWS = [
    {
        "temperature": 0.0,
        "method": name,
        "tau": tau,
        "tau interval": [tau - 0.5, tau + 0.5],
        "tokens/s": 50.0 * tau,
        "tokens/s interval": [40.0 * tau, 60.0 * tau],
        "speed-up": tau,
        "speed-up interval": [tau - 0.25, tau + 0.25],
        "first token ms": 12.0,
        "exact match": 0.25,
        "acceptance": [0.75, 0.5],
    }
    for name, tau in (("plain", 1.0), ("top_nodes 64", 4.0))
]
REPORT = {"benchmark": "decode", "device": "a CPU", "jax": "0.11.2", "command": "python -m bench decode"}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    (tmp_path / "one.json").write_text(json.dumps({**REPORT, "rows": ROWS}))
    return tmp_path


def test_tables_take_the_place_of_old_ones(results, capsys):
    path = results / "page.md"
    path.write_text(PAGE)
    assert main(["page", str(path)]) == 0
    made = path.read_text()
    assert (
        "| 0 | top_nodes 64 | 4.00 (3.50 to 4.50) | 200 (160 to 240) | 4.00 (3.75 to 4.25) | 25% | 12.0 |"
        in made
    )
    assert "| 0 | plain | 1.00 | 50.0 (40.0 to 60.0) | 1.00 | 25% | 12.0 |" in made
    assert "| T | method | 1 | 2 |" in made
    assert "| 0 | top_nodes 64 | 75% | 50% |" in made
    assert "a CPU, JAX 0.11.2: `python -m bench decode`" in made
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


def test_rounds_in_the_readme_are_those_of_their_reports():
    text = (page.DOCS.parent / "README.md").read_text("utf-8")
    row = re.compile(
        r"^\| \[[^]]+\]\(bench/results/(rounds/[\w.-]+)\.json\)(.*?) \|(.*)\|$\n(?:^\| its floor \|(.*)\|$)?",
        re.M,
    )
    found = row.findall(text)
    assert len(found) == 5
    for report, named, times, floors in found:
        rows = read_report(page.RESULTS / f"{report}.json")["rows"]
        algorithm = "top_nodes" if "top_nodes" in named else "accum_logp"
        by_budget = {own["budget"]: own for own in rows if own["algorithm"] in (algorithm, "plain")}
        for shown, key in ((times, "round_ms"), (floors, "floor_ms")):
            for budget, cell in zip((1, 64, 128, 256), shown.split("|"), strict=False):
                if cell.strip():
                    value = by_budget[budget][key]
                    assert cell.strip() == f"{value:.{1 if value >= 9.95 else 2}f}", (report, budget, key)


def test_tables_of_other_reports(results):
    compared = {"dtype": "float32", "T": 0.0, "method": "top_nodes 16", "tokens": 1234, "divergences": 1}
    alike = {**compared, "T": 1.0, "divergences": 0, "ties": None, "mistakes": None, "largest_gap": None}
    rows = [{**compared, "ties": 1, "mistakes": 0, "largest_gap": 2e-6}, alike]
    (results / "two.json").write_text(json.dumps({**REPORT, "benchmark": "exactness", "rows": rows}))
    phases = {"propose": 0.25, "verify": 0.5}
    row = {"budget": 64, "round_ms": 0.75, "phases_ms": phases, "floor_ms": 0.1, "times_floor": 7.5}
    (results / "three.json").write_text(json.dumps({**REPORT, "benchmark": "round", "rows": [row]}))
    text = "".join(f"<!-- {kind} -->\n<!-- end -->\n" for kind in ("exactness two", "phases three"))
    made = page.with_tables(text, "a page").splitlines()
    assert "| float32 | 0 | top_nodes 16 | 1,234 | 1 | 1 | 0 | 2.0e-06 |" in made
    assert "| float32 | 1 | top_nodes 16 | 1,234 | 0 | – | – | – |" in made
    assert "| nodes | round, ms | propose | verify | floor, ms | times the floor |" in made
    assert "| 64 | 0.750 | 0.250 | 0.500 | 0.100 | 7.5 |" in made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# Nothing", "has no table"),
        ("<!-- shape one -->\n<!-- end -->", "asks for a table of 'shape'; there are decode,"),
        ("<!-- phases one -->\n<!-- end -->", "one is a report of 'decode'; phases needs one of 'round'"),
        ("<!-- decode two -->\n<!-- end -->", "two.json"),
    ],
)
def test_a_page_that_cannot_be_made_stays(results, capsys, text, said):
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
