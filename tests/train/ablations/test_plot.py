"""The picture of the ablations: it shows the results, and nothing overlaps."""

import numpy as np
import pytest
from matplotlib import image

from tests.train.figures import assert_apart, boxes, saved_figures
from train.ablations import plot
from train.ablations.plot import plot_ablations

DEPTH = 15


def ablations(variants=9):
    labels = (
        "forward KL", "hard labels", "reverse KL", "bidirectional", "causal, decaying weights",
        "bidirectional, decaying weights", "text of the corpus", "total variation", "D-PACE",
    )  # fmt: skip
    return {
        "variants": {
            f"v{i}": {
                "label": labels[i],
                "tau": {"16": 2.7 - 0.21 * i, "64": 3.2 - 0.23 * i, "256": 3.6 - 0.24 * i},
                "accepted_length": 1.9 - 0.15 * i,
                "accuracy_by_depth": [(0.7 - 0.04 * i) * 0.85**depth for depth in range(DEPTH)],
            }
            for i in range(variants)
        },
        "device": "NVIDIA H200",
        "budgets": [16, 64, 256],
    }


@pytest.fixture
def figures(monkeypatch):
    return saved_figures(monkeypatch, plot)


def test_bars_have_the_lengths_and_values_of_the_results(tmp_path, figures):
    results = ablations()
    plot_ablations(results, tmp_path / "a.png")
    assert image.imread(tmp_path / "a.png").shape[:2] == (600, 1400)
    left, right = figures[0].axes
    variants = list(results["variants"].values())
    for budget, bars in zip(results["budgets"], left.containers, strict=True):
        lengths = [variant["tau"][str(budget)] for variant in variants]
        np.testing.assert_allclose([bar.get_width() for bar in bars], lengths)
        assert bars.get_label() == f"{budget} nodes"
    taus = [variant["tau"][str(budget)] for budget in results["budgets"] for variant in variants]
    assert [text.get_text() for text in left.texts] == [f"{tau:.2f}" for tau in taus]
    labels = left.get_yticklabels()
    assert [label.get_text() for label in labels] == [variant["label"] for variant in variants]
    # The first is on top.
    assert (np.diff([box.y0 for box in boxes(labels)]) < 0).all()
    assert [line.get_label() for line in right.get_lines()] == ["1", "2", "4", "8", str(DEPTH)]
    for line in right.get_lines():
        depth = int(line.get_label())
        np.testing.assert_array_equal(
            line.get_xdata(), [own["accuracy_by_depth"][depth - 1] for own in variants]
        )
    # Each variant has one line in both panels.
    np.testing.assert_array_equal(right.get_lines()[0].get_ydata(), left.get_yticks())
    assert right.get_ylim() == left.get_ylim()
    assert [text.get_text() for text in right.texts] == [f"{own['accepted_length']:.2f}" for own in variants]
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("variants", [1, 2, 9])
def test_nothing_overlaps_nor_lies_outside(tmp_path, figures, variants):
    plot_ablations(ablations(variants), tmp_path / "a.png")
    figure = figures[0]
    left, right = figure.axes
    legends = [left.get_legend(), right.get_legend()]
    texts = [*left.texts, *right.texts, *left.get_yticklabels(), left.xaxis.label, right.xaxis.label]
    found = boxes([*texts, *legends, figure._suptitle])
    assert_apart(found)
    width, height = figure.bbox.size
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in found)
    assert not any(legends[0].get_window_extent().overlaps(box) for box in boxes(left.patches))
    # The legend and the figures at the right cover no point.
    covered = [legends[1].get_window_extent(), *boxes(right.texts)]
    for line in right.get_lines():
        points = right.transData.transform(line.get_xydata())
        assert not any(box.contains(*point) for point in points for box in covered)


def test_all_that_is_missing_is_listed(tmp_path):
    results = ablations()
    del results["device"]
    del results["variants"]["v1"]["tau"]["64"]
    del results["variants"]["v3"]["accuracy_by_depth"]
    with pytest.raises(ValueError, match="lack device; v1: tau of 64; v3: accuracy_by_depth"):
        plot_ablations(results, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="lack variants; budgets; device"):
        plot_ablations({}, tmp_path / "a.png")
