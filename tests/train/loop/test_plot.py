"""Pictures of training runs: they show the data, ticks do not overlap, and they are whole or absent."""

import json

import numpy as np
import pytest
from matplotlib import image, pyplot

from tests.train.figures import saved_figures
from train.loop import plot
from train.loop.log import read_log
from train.loop.plot import plot_training, smooth

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


def size(picture):
    return image.imread(picture).shape[:2]


@pytest.fixture
def figures(monkeypatch):
    return saved_figures(monkeypatch, plot, drawn=False)


class TestTraining:
    def test_the_picture_has_its_size_and_is_the_same_again(self, tmp_path):
        log = write_log(tmp_path / "log.jsonl")
        for name in ("one.png", "two.png"):
            plot_training(log, tmp_path / "new" / name, "a title")
        assert size(tmp_path / "new" / "one.png") == (800, 1600)
        assert (tmp_path / "new" / "one.png").read_bytes() == (tmp_path / "new" / "two.png").read_bytes()
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["one.png", "two.png"]
        assert pyplot.get_fignums() == []

    def test_every_panel_has_the_values_of_the_log(self, tmp_path, figures):
        log = write_log(tmp_path / "log.jsonl")
        plot_training(log, tmp_path / "a.png", "title")
        records = read_log(log)

        def series(key):
            return np.array([record[key] for record in records if key in record])

        def smoothed(key):
            return smooth(series(key), 2)

        steps, depths = np.arange(1, STEPS + 1), np.arange(1, DEPTH + 1)
        looks = steps[19::20]
        accuracy, validation = smoothed("accuracy_by_depth"), series("validation_accuracy_by_depth")
        by_depth = [
            curve for d in (0, 1, 3, 7, 14) for curve in ((steps, accuracy[:, d]), (looks, validation[:, d]))
        ]
        taus = [(looks, [tau[budget] for tau in series("tau")]) for budget in ("16", "64")]
        small = ("learning_rate", "gradient_norm", "tokens_per_second", "memory_gib")
        expected = [
            [(steps, series("loss")), (steps, smoothed("loss")), (looks, series("validation_loss"))],
            by_depth,
            [(depths, accuracy[-1])],
            [
                (steps, smoothed("accepted_length")),
                (looks, series("validation_accepted_length")),
            ],
            taus,
            *([(steps, series(key))] for key in small),
        ]
        for axis, curves in zip(figures[0].axes, expected, strict=True):
            for line, curve in zip(axis.get_lines(), curves, strict=True):
                np.testing.assert_allclose(line.get_data(), curve, err_msg=axis.get_ylabel())
        bars = [patch.get_height() for axis in figures[0].axes for patch in axis.patches]
        np.testing.assert_allclose(bars, validation[-1])

    def test_sources_and_temperatures_have_a_panel_where_there_are_several(self, tmp_path, figures):
        def with_sources(count, temperatures):
            def change(record):
                if "tau" in record:
                    record["tau_by_source"] = {
                        f"_a very long name of ${source}, a source": {
                            temperature: {"16": 1.0, "64": source + float(temperature) + record["step"]}
                            for temperature in temperatures
                        }
                        for source in range(count)
                    }
                return record

            return change

        plot_training(write_log(tmp_path / "log.jsonl", with_sources(1, ["0.0"])), tmp_path / "a.png", "t")
        assert len(figures[-1].axes) == 9
        log = write_log(tmp_path / "log.jsonl", with_sources(2, ["0.0", "0.7"]))
        plot_training(log, tmp_path / "a.png", "title")
        assert len(figures[-1].axes) == 10
        [axis] = [axis for axis in figures[-1].axes if "trees of 64" in axis.get_title()]
        steps = np.arange(20, STEPS + 1, 20)
        pairs = [(source, temperature) for source in range(2) for temperature in (0.0, 0.7)]
        for line, (source, temperature) in zip(axis.get_lines(), pairs, strict=True):
            np.testing.assert_allclose(line.get_data(), (steps, source + temperature + steps))
            assert line.get_label() == rf"T = {temperature}, _a very long name of \${source}…"

    def test_what_a_log_lacks_has_no_panel(self, tmp_path, figures):
        def count(*lacking):
            def without(record):
                return {key: x for key, x in record.items() if not any(part in key for part in lacking)}

            plot_training(write_log(tmp_path / "log.jsonl", without), tmp_path / "a.png", "title")
            for axis in figures[-1].axes:
                assert axis.get_lines() or axis.patches, axis.get_ylabel()
                texts = axis.get_legend().get_texts() if axis.get_legend() else []
                assert not any(part in text.get_text() for text in texts for part in lacking)
            return len(figures[-1].axes)

        assert count("validation") == 9
        assert count("accuracy") == 7
        assert count("accepted", "tau") == 7
        assert count("tau") == count("accepted") == 8
        assert count("accuracy", "accepted", "tau", "rate", "norm", "tokens", "memory") == 1
        assert count("seconds", "memory", "norm") == 7

    def test_titles_say_what_is_a_chain_and_what_a_tree(self, tmp_path, figures):
        plot_training(write_log(tmp_path / "log.jsonl"), tmp_path / "a.png", "title")
        titles = {}
        for axis in figures[0].axes:
            legend = axis.get_legend()
            titles[axis.get_ylabel()] = axis.get_title() + (legend.get_title().get_text() if legend else "")
        assert "chain" in titles["accepted drafts"]
        assert "chain" in titles[plot.ACCURACY]
        assert "trees" in titles["τ, tokens a round"]
        assert "chain" not in titles["τ, tokens a round"]

    def test_a_run_s_picture_is_drawn_again_once_it_is_old(self, tmp_path, monkeypatch, figures):
        now = [0.0]
        monkeypatch.setattr(plot.time, "monotonic", lambda: now[0])
        picture = plot.LivePicture(write_log(tmp_path / "log.jsonl"), tmp_path / "a.png", "title")
        drawn = []
        for now[0] in (1.0, plot.LIVE_SECONDS, plot.LIVE_SECONDS + 1, 2 * plot.LIVE_SECONDS):
            picture()
            drawn.append(len(figures))
        assert drawn == [0, 1, 1, 2]

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
        assert np.isnan(curves["tree of 16"].get_ydata()).tolist() == [False, True] + [False] * 4
        assert np.isfinite(curves["1"].get_ydata()).all()

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
