"""The pictures of training: they show the data, nothing overlaps, and they are whole or absent."""

import copy
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import image, pyplot
from matplotlib.figure import Figure

from train.loop import plot
from train.loop.log import TrainingLog
from train.loop.plot import plot_ablations, plot_training, smooth

DEPTH, STEPS = 15, 120


def write_log(path, change=lambda record: record):
    """A run of a draft head; ``change`` gets every record, and returns it or None."""
    rng = np.random.default_rng(0)
    records = []
    for step in range(1, STEPS + 1):
        learnt = 1 - np.exp(-5 * step / STEPS)
        accuracy = 0.7 * learnt * 0.86 ** np.arange(DEPTH)
        records.append(
            {
                "step": step,
                "loss": 6 - 5 * learnt + 0.1 * rng.normal(),
                "learning_rate": 1e-3 * min(1, step / 20),
                "gradient_norm": 1.5 + rng.normal() ** 2,
                "accuracy_by_depth": accuracy.tolist(),
                "accepted_length": 1.8 * learnt,
                "seconds": 0.1,
                "tokens_per_second": 5e5 + 1e4 * rng.normal(),
                "memory_gib": 61.5,
            }
        )
        if step % 20 == 0:
            records.append(
                {
                    "step": step,
                    "validation_loss": 6.2 - 5 * learnt,
                    "validation_accuracy_by_depth": (0.9 * accuracy).tolist(),
                    "validation_accepted_length": 1.7 * learnt,
                }
            )
            records.append({"step": step, "tau": {"16": 1 + 1.7 * learnt, "64": 1 + 2.2 * learnt}})
    kept = [record for record in map(change, records) if record]
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    return path


def pixels(picture):
    return image.imread(picture)


def ablations(variants=7):
    labels = (
        "forward KL", "hard labels", "reverse KL", "bidirectional", "causal, decaying weights",
        "bidirectional, decaying weights", "text of the corpus",
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
    """The figures that were saved, drawn."""
    saved = []
    save = plot._save
    monkeypatch.setattr(plot, "_save", lambda figure, path: (save(figure, path), saved.append(figure)))
    return saved


def boxes(artists):
    return [artist.get_window_extent() for artist in artists]


def assert_apart(found):
    assert len(found) > 1
    for one, other in itertools.combinations(found, 2):
        assert not one.overlaps(other), (one, other)


class TestTraining:
    def test_the_picture_has_its_size_and_is_the_same_again(self, tmp_path):
        log = write_log(tmp_path / "log.jsonl")
        for name in ("one.png", "two.png"):
            plot_training(log, tmp_path / "new" / name, "a title")
        assert pixels(tmp_path / "new" / "one.png").shape[:2] == (800, 1600)
        assert (tmp_path / "new" / "one.png").read_bytes() == (tmp_path / "new" / "two.png").read_bytes()
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["one.png", "two.png"]
        assert pyplot.get_fignums() == []

    def test_every_series_is_drawn(self, tmp_path, figures):
        def halve(record):
            def half(x):
                return (
                    {key: y / 2 for key, y in x.items()}
                    if isinstance(x, dict)
                    else (np.array(x) / 2).tolist()
                )

            own = {"step", "seconds"} if record["step"] > STEPS // 2 else record.keys()
            return {key: x if key in own else half(x) for key, x in record.items()}

        for name, change in (("a", lambda record: record), ("b", halve)):
            plot_training(write_log(tmp_path / "log.jsonl", change), tmp_path / f"{name}.png", "title")
        differs = (pixels(tmp_path / "a.png") != pixels(tmp_path / "b.png")).any(axis=-1)
        assert len(figures[0].axes) == 8
        for axis, other in zip(*(figure.axes for figure in figures), strict=True):
            box = axis.get_window_extent()
            top, bottom = len(differs) - int(box.y1), len(differs) - int(box.y0)
            assert differs[top:bottom, int(box.x0) : int(box.x1)].sum() > 50, axis.get_ylabel()
            for line, changed in zip(axis.get_lines(), other.get_lines(), strict=True):
                early, late = np.array_split(changed.get_ydata() / line.get_ydata(), 2)
                # A smoothed curve mixes both halves where they meet; dots by depth are all of the end.
                assert late[1:] == pytest.approx(0.5), (axis.get_ylabel(), line.get_label())
                assert early[:-1] == pytest.approx(0.5 if "depth" in axis.get_xlabel() else 1)
            for bar, changed in zip(axis.patches, other.patches, strict=True):
                assert changed.get_height() == bar.get_height() / 2

    def test_curves_have_the_values_of_the_log(self, tmp_path, figures):
        log = write_log(tmp_path / "log.jsonl")
        plot_training(log, tmp_path / "a.png", "title")
        records = [json.loads(line) for line in log.read_text().splitlines()]
        curves = {
            line.get_label(): line.get_xydata() for axis in figures[0].axes for line in axis.get_lines()
        }
        for label, values in {
            "validation": [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r],
            "τ, tree of 64": [(r["step"], r["tau"]["64"]) for r in records if "tau" in r],
        }.items():
            np.testing.assert_allclose(curves[label], values, err_msg=label)
        means = smooth(np.array([r["accuracy_by_depth"] for r in records if "accuracy_by_depth" in r]), 2)
        np.testing.assert_allclose(curves["8"][:, 1], means[:, 7])
        np.testing.assert_allclose(curves["15"][:, 1], means[:, 14])
        bars = [patch.get_height() for axis in figures[0].axes for patch in axis.patches]
        last = [r for r in records if "validation_loss" in r][-1]
        np.testing.assert_allclose(bars, last["validation_accuracy_by_depth"])

    def test_what_a_log_lacks_has_no_panel(self, tmp_path, figures):
        def count(*lacking):
            def without(record):
                return {key: x for key, x in record.items() if not any(part in key for part in lacking)}

            plot_training(write_log(tmp_path / "log.jsonl", without), tmp_path / "a.png", "title")
            assert pixels(tmp_path / "a.png").shape[:2] == (800, 1600)
            for axis in figures[-1].axes:
                assert axis.get_lines() or axis.patches, axis.get_ylabel()
                texts = axis.get_legend().get_texts() if axis.get_legend() else []
                assert not any(part in text.get_text() for text in texts for part in lacking)
            return len(figures[-1].axes)

        assert count() == 8
        assert count("validation") == 8
        assert count("accuracy") == 6
        assert count("accepted", "tau") == 7
        assert count("tau") == 8
        assert count("accuracy", "accepted", "tau", "rate") == 4
        assert count("accuracy", "accepted", "tau", "rate", "norm", "tokens", "memory") == 1
        assert count("seconds", "memory", "norm") == 6

    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_a_run_that_has_just_begun(self, tmp_path, steps):
        log = write_log(tmp_path / "log.jsonl", lambda r: r if r["step"] <= steps else None)
        with log.open("a") as file:
            file.write('{"step": 4, "lo')  # the run is writing
        plot_training(log, tmp_path / "a.png", "title")
        assert pixels(tmp_path / "a.png").shape[:2] == (800, 1600)

    def test_null_is_a_gap(self, tmp_path, figures):
        def spoil(record):
            for key in record.keys() & {"gradient_norm", "validation_loss"}:
                record[key] = None
            if "accuracy_by_depth" in record and record["step"] % 2:
                record["accuracy_by_depth"][0] = None
            if "tau" in record and record["step"] == 40:
                record["tau"]["16"] = None
            return record

        plot_training(write_log(tmp_path / "log.jsonl", spoil), tmp_path / "a.png", "title")
        curves = {line.get_label(): line for axis in figures[0].axes for line in axis.get_lines()}
        assert np.isnan(curves["τ, tree of 16"].get_ydata()).tolist() == [False, True] + [False] * 4
        assert np.isfinite(curves["1"].get_ydata()).all()

    def test_it_reads_what_the_log_writes(self, tmp_path, figures):
        with TrainingLog(tmp_path, kept_steps=0) as log:
            for step in range(1, 5):
                metrics = {"loss": jnp.float32(5 - step), "accuracy_by_depth": jnp.full(3, step / 5)}
                log.add(step, metrics, 100)
            log.write("evaluation", 4, {"validation_loss": 1.5, "tau": {"16": jnp.float32(2.5)}})
        plot_training(tmp_path / "log.jsonl", tmp_path / "a.png", "title")
        labels = [axis.get_ylabel() for axis in figures[0].axes]
        assert labels[0] == "loss (nats)"
        assert labels[-2:] == ["tokens/s", "peak memory (GiB)"]
        np.testing.assert_array_equal(figures[0].axes[0].get_lines()[0].get_ydata(), [4, 3, 2, 1])

    def test_labels_of_ticks_do_not_overlap(self, tmp_path, figures):
        def stretch(record):
            return {**record, "step": record["step"] * 1000} | (
                {"gradient_norm": 10.0 ** (record["step"] % 5 - 2)} if "gradient_norm" in record else {}
            )

        plot_training(write_log(tmp_path / "log.jsonl", stretch), tmp_path / "a.png", "title")
        for axis in figures[0].axes:
            for side in (axis.xaxis, axis.yaxis):
                labels = [label for label in side.get_ticklabels() if label.get_text()]
                low, high = sorted(side.get_view_interval())
                seen = [
                    label
                    for label, tick in zip(labels, side.get_ticklocs(), strict=False)
                    if low <= tick <= high
                ]
                assert_apart(boxes(seen))

    def test_a_log_without_steps_is_an_error(self, tmp_path):
        log = write_log(tmp_path / "log.jsonl", lambda record: None)
        with pytest.raises(ValueError, match="no training step"):
            plot_training(log, tmp_path / "a.png", "title")
        with pytest.raises(FileNotFoundError):
            plot_training(tmp_path / "none.jsonl", tmp_path / "a.png", "title")
        log.write_text("{}\n")
        with pytest.raises(ValueError, match="line 1"):
            plot_training(log, tmp_path / "a.png", "title")
        assert not (tmp_path / "a.png").exists()

    def test_a_failure_leaves_the_picture_before(self, tmp_path, monkeypatch):
        picture = tmp_path / "a.png"
        log = write_log(tmp_path / "log.jsonl")
        plot_training(log, picture, "title")
        before = picture.read_bytes()

        def fail(figure, path, **settings):
            path.write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(Figure, "savefig", fail)
        with pytest.raises(OSError, match="no space"):
            plot_training(log, picture, "another title")
        assert picture.read_bytes() == before


class TestAblations:
    def test_the_picture_has_its_size_and_changes_with_the_data(self, tmp_path):
        results = ablations()
        plot_ablations(results, tmp_path / "a.png")
        drawn = pixels(tmp_path / "a.png")
        assert drawn.shape[:2] == (600, 1400)
        changes = {
            "tau": {"16": 1.0, "64": 2.0, "256": 3.0},
            "accuracy_by_depth": [0.5] * DEPTH,
            "label": "x",
        }
        for key, value in changes.items():
            other = copy.deepcopy(results)
            other["variants"]["v2"][key] = value
            plot_ablations(other, tmp_path / "b.png")
            assert (pixels(tmp_path / "b.png") != drawn).any(axis=-1).sum() > 50, key

    def test_bars_have_the_lengths_and_values_of_the_results(self, tmp_path, figures):
        results = ablations()
        plot_ablations(results, tmp_path / "a.png")
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
        for line, variant in zip(right.get_lines(), variants, strict=True):
            np.testing.assert_array_equal(line.get_ydata(), variant["accuracy_by_depth"])
            assert line.get_label() == f"{variant['label']}: {variant['accepted_length']:.2f}"
        looks = {(line.get_color(), line.get_linestyle()) for line in right.get_lines()}
        assert len(looks) == len(variants)

    @pytest.mark.parametrize("variants", [1, 2, 7])
    def test_nothing_overlaps_nor_lies_outside(self, tmp_path, figures, variants):
        plot_ablations(ablations(variants), tmp_path / "a.png")
        figure = figures[0]
        left, right = figure.axes
        legends = [left.get_legend(), right.get_legend()]
        texts = [*left.texts, *left.get_yticklabels(), left.xaxis.label, right.yaxis.label]
        found = boxes([*texts, *legends, figure._suptitle])
        assert_apart(found)
        width, height = figure.bbox.size
        assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in found)
        assert not any(legends[0].get_window_extent().overlaps(box) for box in boxes(left.patches))
        # The legend covers no point of a curve.
        covered = legends[1].get_window_extent()
        for line in right.get_lines():
            points = right.transData.transform(line.get_xydata())
            assert not any(covered.contains(*point) for point in points)

    def test_all_that_is_missing_is_listed(self, tmp_path):
        results = ablations()
        del results["device"]
        del results["variants"]["v1"]["tau"]["64"]
        del results["variants"]["v3"]["accuracy_by_depth"]
        with pytest.raises(ValueError, match="lack device; v1: tau of 64; v3: accuracy_by_depth"):
            plot_ablations(results, tmp_path / "a.png")
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ValueError, match="lack variants; budgets; device"):
            plot_ablations({}, tmp_path / "a.png")


class TestSmooth:
    @pytest.mark.parametrize("window", [0, 1, 2, 5, 50])
    @pytest.mark.parametrize("shape", [(9,), (9, 3), (1,)])
    def test_against_loops(self, window, shape):
        rng = np.random.default_rng(0)
        values = np.where(rng.random(shape) < 0.3, np.nan, rng.normal(size=shape))
        values[-1] = 2.0
        reach = window // 2
        for row, out in enumerate(smooth(values, window)):
            near = values[max(row - reach, 0) : row + reach + 1]
            known = np.isfinite(near)
            sums = np.where(known, near, 0).sum(axis=0)
            expected = np.where(known.any(axis=0), sums / np.maximum(known.sum(axis=0), 1), np.nan)
            np.testing.assert_allclose(out, expected, atol=1e-12)
