"""Scales that are found again, and the command that fits them, which resumes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import load_draft_head
from jetspec_jax.config import parse_draft_head_config
from jetspec_jax.tree import Candidates, Routing, top_candidates
from train.command import main
from train.head.calibration import (
    SCALES,
    best_scales,
    chosen_along,
    curves_of,
    error_of,
    fit_bands,
    log_likelihoods,
)
from train.head.replay import Drafts

A, D, V, K = 3000, 3, 40, 8
ERRORS = (0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def drafts_at():
    """Drafts, by their scales, of a target whose logits differ from the head's by Gumbel noise."""
    rng = np.random.default_rng(0)
    known = rng.normal(0, 2, (A, D, V)) + rng.gumbel(size=(A, D, V))  # a row and the noise of its sample
    chosen = np.argmax(known + np.reshape(ERRORS, (1, D, 1)) * rng.gumbel(size=(A, D, V)), axis=2)

    def at(scales):
        scores = jnp.asarray(known / np.reshape(scales, (1, D, 1)), jnp.float32)
        candidates = jax.tree.map(np.asarray, top_candidates(scores, K))
        return Drafts(candidates, chosen.astype(np.int32), Routing.unsaid(A), [A])

    return at


def test_the_scales_of_the_errors_are_found(drafts_at):
    passes = [log_likelihoods(chosen_along(drafts_at([scale] * D))) for scale in SCALES]
    found = best_scales(np.stack([likelihood for likelihood, _ in passes]), passes[0][1])
    np.testing.assert_allclose(found, ERRORS, rtol=0.08)
    fitted, wrong = (error_of(curves_of(chosen_along(drafts_at(scales)))) for scales in (found, [1.0] * D))
    assert fitted < 0.05 < wrong
    # The second row is only reached below the first's candidates.
    assert passes[0][1][0] == A > passes[0][1][1]


def test_depths_with_few_rows_take_the_scale_above():
    likelihoods = -np.abs(np.arange(len(SCALES), dtype=float)[:, None] - 6) * np.ones((1, 3))
    assert best_scales(likelihoods, np.array([100, 3, 0])) == [1.0, 1.0, 1.0]
    likelihoods[:, 0] = np.arange(len(SCALES))
    assert best_scales(likelihoods, np.array([100, 3, 0])) == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("apart", [0, 1])
def test_bands_that_differ_have_scales_of_their_own(apart):
    """Likelihoods with one peak: at the scale 1, but with ``apart`` = 1 at twice that for T = 1."""
    steps = np.arange(len(SCALES), dtype=float)[:, None] - 6
    tables = {
        t: -np.abs(steps - (3 * apart if t == 1.0 else 0)) * np.ones((1, 2)) for t in (0.0, 0.5, 0.8, 1.0)
    }
    found = fit_bands(tables, {t: np.array([100, 60]) for t in tables})
    assert found == (((1.0, 1.0), (1.0, 1.0), (2.0, 2.0)) if apart else (1.0, 1.0))


def test_a_band_without_texts_has_the_scales_of_all():
    peaks = {0.0: -3, 1.0: 3}
    steps = np.arange(len(SCALES), dtype=float)[:, None] - 6
    tables = {t: -np.abs(steps - peak) * np.ones((1, 1)) for t, peak in peaks.items()}
    greedy, between, sampled = fit_bands(tables, {t: np.array([100]) for t in tables})
    assert (greedy, sampled) == ((0.5,), (2.0,))
    assert 0.5 <= between[0] <= 2.0


def test_pairs_are_of_the_chosen_parent():
    """Two rows of two candidates; the second row's probabilities are those below the chosen parent."""
    pairs = np.log(np.array([[[[0.6, 0.3]] * 2, [[0.2, 0.7], [0.5, 0.1]]]], np.float32))
    tokens = np.array([[[5, 6], [7, 8]]], np.int32)
    rows, pairs = jnp.zeros((1, 2, 2)), jnp.asarray(pairs)
    candidates = Candidates(jnp.asarray(tokens), rows, rows[:, :, 0], pairs)
    for following, said, place, reached in (
        ([6, 7], [[0.6, 0.3], [0.5, 0.1]], [1, 0], [True, True]),
        ([5, 9], [[0.6, 0.3], [0.2, 0.7]], [0, 2], [True, True]),
        ([9, 7], [[0.6, 0.3], [0.2, 0.7]], [2, 0], [True, False]),
    ):
        found = chosen_along(Drafts(candidates, np.array([following]), Routing.unsaid(1), [1]))
        np.testing.assert_allclose(found.said[0], said, rtol=1e-6)
        assert (found.place[0].tolist(), found.reached[0].tolist()) == (place, reached)
    likelihood, rows = log_likelihoods(found)
    np.testing.assert_allclose(likelihood, [np.log(0.1), 0], rtol=1e-5)
    assert rows.tolist() == [1, 0]


@pytest.mark.wide
def test_the_command_writes_a_head_and_resumes(tmp_path, capsys):
    prompts, work = tmp_path / "prompts.jsonl", tmp_path / "work"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("import os", "def", "class A")))
    arguments = ["calibrate", "--model", "demo", "--work", str(work)]
    arguments += ["--prompts", str(prompts), "--num-prompts", "2", "--skip-prompts", "1", "--max-tokens", "6"]
    arguments += ["--temperatures", "0", "1", "--candidates", "4"]
    assert main([*arguments, "--minutes", "0"]) == 0
    assert "the same command goes on" in capsys.readouterr().out
    assert main(arguments) == 0
    said = json.loads((work / "calibration.json").read_text())
    raw = json.loads((work / "draft_head" / "config.json").read_text())
    assert raw["dflash_config"]["draft_scales"] == said["draft_scales"]
    assert load_draft_head(work / "draft_head").config == parse_draft_head_config(raw)
    assert set(said["by_temperature"]) == {"0", "1"}
    assert (work / "calibration.png").stat().st_size > 1000
    before = (work / "texts" / "1.json").stat().st_mtime_ns
    assert main(arguments) == 0
    assert (work / "texts" / "1.json").stat().st_mtime_ns == before
    assert said["draft_scales"] == [1.0] * 15  # of so few rows, nothing is fitted
    assert main([*arguments[:-1], "5"]) == 2
    assert "was made with another recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, not 0"),
        (["--temperatures", "nan"], "temperature"),
        (["--num-prompts", "2"], "has 1 prompts after those skipped, too few"),
    ],
)
def test_bad_input_comes_before_any_work(tmp_path, capsys, changes, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "a"}\n')
    arguments = ["calibrate", "--model", "demo", "--prompts", str(prompts), "--work", str(tmp_path / "work")]
    assert main([*arguments, "--num-prompts", "1", *changes]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
