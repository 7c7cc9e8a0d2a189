"""Pictures of kept reports: they show the reports' figures, nothing overlaps, and ratios begin at 0."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Annotation, Text

from bench.__main__ import main
from bench.common.picture import spread_out
from bench.plots import RESULTS, TRACE, kept_reports, photograph, picture_of, read_report
from jetspec_jax.view.page import page_of
from tests.marks import wide
from tests.train.figures import assert_apart

#: Reports of tests, of kinds of which none is kept.
OWN = Path(__file__).parent / "reports"
QUICK = [
    RESULTS / "demo/decode-h200-all.json",
    RESULTS / "demo/exactness-h200.json",
    RESULTS / "kernels/experts-h200.json",
    RESULTS / "rounds/qwen3-8b-h200.json",
    OWN / "kernel.json",
]
SLOW = ("demo/decode-h200", "demo/profile", "kernels/experts-h200-fp8", "rounds/qwen3-8b-h200-x2")
REPORTS = [*QUICK, *(wide(RESULTS / f"{name}.json") for name in SLOW)]


def drawn(figure):
    figure.draw_without_rendering()
    return figure


def texts_of(figure):
    """All that is written outside of the panels, and beside lines."""
    for axis in figure.axes:
        yield from (axis.title, axis.xaxis.label, axis.yaxis.label)
        yield from (text for text in axis.texts if isinstance(text, Annotation))
    yield from (*figure.texts, *figure.legends)


def extent(artist):
    """Where something is written; of a name beside a line without the stroke that leads there."""
    return Text.get_window_extent(artist) if isinstance(artist, Text) else artist.get_window_extent()


def check_looks(figure):
    """No text covers another or leaves the figure; a panel has few lines, or their names beside them."""
    found = [box for box in map(extent, texts_of(figure)) if box.width > 0]
    assert_apart(found)
    width, height = figure.bbox.size
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in found)
    for axis in figure.axes:
        beside = sum(isinstance(text, Annotation) for text in axis.texts)
        lines = len(axis.get_lines())
        assert lines <= 6 or beside >= lines / 2, axis.get_ylabel()  # a line may have a dashed floor
        if "times" in axis.get_ylabel() or "share" in axis.get_ylabel():
            assert axis.get_ylim()[0] == 0


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_kept_report_is_drawn_and_nothing_overlaps(path):
    check_looks(drawn(picture_of(path)))


def test_pictures_of_kept_reports_are_redrawn():
    assert [path.relative_to(RESULTS).as_posix() for path in kept_reports()] == [
        "demo/exactness-h200.json",
        "rounds/qwen3-8b-h200.json",
    ]


def test_phases_are_those_of_the_report_and_the_note_says_what_they_sum_to():
    path = RESULTS / "rounds/qwen3-8b-h200.json"
    rows, figure = read_report(path)["rows"], picture_of(path)
    [axis] = figure.axes
    bars = np.array([[bar.get_width() for bar in phase] for phase in axis.containers])
    np.testing.assert_allclose(bars.sum(axis=0), [row["phases_sum_ms"] for row in rows])
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {
        *rows[0]["phases_ms"],
        "whole round",
        "floor",
    }
    off = [100 * (row["phases_sum_ms"] / row["round_ms"] - 1) for row in rows]
    said = " ".join(figure.texts[-1].get_text().split())
    assert f"their sums are {min(off):+.0f} to {max(off):+.0f} % off it" in said
    assert axis.get_xlim()[0] == 0


def test_names_beside_lines_keep_apart_and_near():
    assert spread_out([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    np.testing.assert_allclose(spread_out([0.5, 0.5, 0.5], 0.1), [0.4, 0.5, 0.6])
    np.testing.assert_allclose(spread_out([0.2, 0.98, 1.0], 0.1), [0.2, 0.9, 1.0])
    wanted = np.sort(np.random.default_rng(0).random(8)).tolist()
    assert (np.diff(spread_out(wanted, 0.1)) >= 0.1 - 1e-9).all()


def test_the_command_draws_what_is_named(tmp_path, capsys):
    path = tmp_path / "report.json"
    shutil.copy(OWN / "kernel.json", path)
    assert main(["plots", str(path)]) == 0
    assert sorted(one.suffix for one in tmp_path.iterdir()) == [".json", ".svg"]
    for text, said in (
        ('{"benchmark": "train"}', "is a report of 'train'; there are pictures of decode,"),
        ("[]", "it is no JSON object"),
        ("{", "is not JSON"),
    ):
        path.write_text(text)
        assert main(["plots", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_a_browser_that_fails_leaves_the_picture(tmp_path):
    picture = tmp_path / "page.png"
    picture.write_bytes(b"before")
    with pytest.raises(RuntimeError, match="made no picture"):
        photograph("true", read_report(RESULTS / f"{TRACE}.json"), picture)
    assert picture.read_bytes() == b"before"


def test_the_kept_generation_is_a_page():
    data = json.loads((RESULTS / f"{TRACE}.json").read_text(encoding="utf-8"))
    assert max(len(one["tokens"]) for one in data["rounds"]) == data["settings"]["budget"] == 64
    assert "Plain decoding" in page_of(data)
