"""A selector's training: how it begins, what stays of the head, what is logged, and what is refused."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.command import main as convert
from convert.folders import locate
from jetspec_jax import load_draft_head
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import SelectorConfig, parse_draft_head_config
from tests.decode.tiny import TINY, random_target, word_tokenizer
from tests.train.head.tiny import MASK, RECIPE, changed, records, write_documents
from train.command import main
from train.head.config import with_selector
from train.head.evaluation import HeadEvaluator
from train.head.export import export_head
from train.head.recipe import HeadSettings, SelectorSettings
from train.head.selector import assembled, first_selector
from train.head.start import begin_head
from train.head.training import train_head
from train.loop.stages import Deadline, OutOfTime

SHAPE = HeadSettings(layers=1, block_size=4, taps=(0, 1), mask_token=MASK)
SETTINGS = SelectorSettings(rank=4, candidates=5)
FROZEN = changed(RECIPE, head=HeadSettings("checkpoint"), selector=SETTINGS)


@pytest.fixture(scope="module", autouse=True)
def later_is_better():
    """Random pairs have little to gain in a few steps, so the last weights count as the best."""
    scores, judge = itertools.count(), HeadEvaluator.__call__

    def evaluate(self, weights):
        return judge(self, weights)._replace(score=float(next(scores)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadEvaluator, "__call__", evaluate)
        yield


@pytest.fixture(scope="module")
def target():
    return random_target(TINY, 0, tokenizer=word_tokenizer(TINY.vocab_size))


@pytest.fixture(scope="module")
def made(target):
    return begin_head(target, SHAPE, None, 5)


@pytest.fixture(scope="module")
def folders(made, tmp_path_factory):
    """The same head in float32 and in bfloat16, and with a selector."""
    folder = tmp_path_factory.mktemp("heads")
    for dtype in ("float32", "bfloat16"):
        save_checkpoint(folder / dtype, made.raw, made.weights, dtype=dtype)
    rng = np.random.default_rng(0)
    selector = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in {
            "hidden_projection": (32, 4),
            "predecessors": (64, 4),
            "successors": (64, 4),
        }.items()
    }
    raw = with_selector(made.raw, SelectorConfig(4, 5, tail=True))
    save_checkpoint(folder / "selecting", raw, {**made.weights, "selector": selector}, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def begun(target, folder, settings=SETTINGS):
    return begin_head(target, HeadSettings("checkpoint"), Source(folder), 0, settings)


def tensors(folder):
    """All parameters of a folder by their paths, in the types in which they are stored."""
    return {path: np.asarray(own) for path, own in locate(folder).opened().items()}


def of_head(parameters):
    return {path: own for path, own in parameters.items() if path[0] != "selector"}


class TestBeginning:
    def test_a_new_selector_s_scores_are_all_zero(self, target, folders):
        beginning = begun(target, folders / "float32")
        assert beginning.config.selector == SelectorConfig(4, 5, tail=True)
        frozen = {"target": target.weights, "head": beginning.weights}
        head = assembled({"selector": first_selector(beginning, SETTINGS, 3)}, frozen, rate=0.1)
        np.testing.assert_array_equal(head["selector"]["successors"], 0)
        # Rows of the parents' codebook have entries of unit variance, whatever the embedding's scale is.
        assert float(jnp.std(head["selector"]["predecessors"])) == pytest.approx(1, rel=0.2)

    @pytest.mark.parametrize(
        ("folder", "selector", "kept"),
        [
            ("selecting", dataclasses.replace(SETTINGS, existing="continue"), True),
            ("selecting", dataclasses.replace(SETTINGS, existing="replace"), False),
            ("float32", SETTINGS, False),
            ("float32", None, True),
        ],
    )
    def test_scales_stay_with_the_selector_they_were_fitted_with(
        self, target, folders, tmp_path, folder, selector, kept
    ):
        scales = [0.5, 2.0, 1.5]
        export_head(folders / folder, tmp_path / "scaled", "jetspec", draft_scales=tuple(scales))
        beginning = begun(target, tmp_path / "scaled", selector)
        assert beginning.raw["dflash_config"].get("draft_scales") == (scales if kept else None)
        assert parse_draft_head_config(beginning.raw).draft_scales == beginning.config.draft_scales

    def test_codebooks_are_projections_and_a_table_on_top_of_what_was_there(self, target, folders):
        settings = dataclasses.replace(SETTINGS, existing="continue")
        beginning = begun(target, folders / "selecting", settings)
        base = beginning.weights["selector"]
        rng, trained = np.random.default_rng(1), first_selector(beginning, settings, 3)
        frozen = {
            "target": target.weights,
            "head": {"fc": beginning.weights["fc"]},
            "codebooks": {name: base[name] for name in ("predecessors", "successors")},
        }
        jax.tree.map(
            np.testing.assert_array_equal,
            assembled({"selector": trained}, frozen, rate=0.1)["selector"],
            base,
        )
        trained = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), trained)
        found = assembled({"selector": trained}, frozen, rate=0.1)
        embedding = np.asarray(target.weights["embed_tokens"], np.float64)
        embedding /= np.sqrt(np.square(embedding).mean(1, keepdims=True))
        for name in ("predecessors", "successors"):
            own = {part: np.asarray(x, np.float64) for part, x in trained[name].items()}
            expected = embedding @ own["projection"] + 0.1 * own["table"] + np.asarray(base[name], np.float64)
            np.testing.assert_allclose(found["selector"][name], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found["selector"]["hidden_projection"], trained["hidden_projection"])

    def test_one_that_is_replaced_leaves_nothing(self, target, folders):
        settings = dataclasses.replace(SETTINGS, rank=2, existing="replace")
        beginning = begun(target, folders / "selecting", settings)
        assert "selector" not in beginning.weights
        assert beginning.config.selector == SelectorConfig(2, 5, tail=True)
        assert beginning.raw["dflash_config"]["selector_rank"] == 2

    @pytest.mark.parametrize(
        ("folder", "changes", "message"),
        [
            ("selecting", {}, "has a selector already, of rank 4: set selector.existing to 'continue' or"),
            ("float32", {"existing": "replace"}, "has no selector to replace; leave selector.existing out"),
            (
                "selecting",
                {"existing": "continue", "rank": 8, "tail": False, "loss": "candidates_kl"},
                "cannot be continued with other settings: rank is 4, not 8; tail is True, not False",
            ),
            (
                "float32",
                {"candidates": 65},
                "vocabulary of 64 tokens, and selector.candidates must be at most that, not 65",
            ),
        ],
    )
    def test_what_does_not_go_together(self, target, folders, folder, changes, message):
        with pytest.raises(ValueError, match=message):
            begun(target, folders / folder, dataclasses.replace(SETTINGS, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector": {"rank": 0}}, r"selector\.rank must lie in 1\.\.\d+, not 0"),
        ({"selector": {"temperature": 0.0, "weight": -1.0}}, r"temperature must be above 0.*weight must be"),
        (
            {"selector": {"tail": False}},
            r"loss must be candidates_kl or total_variation where selector\.tail",
        ),
        ({"head": SHAPE}, r"head\.start must be 'checkpoint' with a selector, not 'random'"),
        ({"mesh": {"tensor": 2}}, r"mesh\.expert and mesh\.tensor must be 1 with a selector"),
    ],
)
def test_a_recipe_s_ranges(changes, message):
    with pytest.raises(ValueError, match=message):
        changed(FROZEN, **changes).check()


@pytest.fixture(scope="module")
def run(target, folders, data, tmp_path_factory):
    """A run of a float32 head that was stopped after its first step and went on."""
    work = tmp_path_factory.mktemp("frozen")
    begin = Source(folders / "float32")
    with pytest.raises(OutOfTime):
        train_head(work, FROZEN, target, data, Deadline(0.0), checkpoint=begin)
    return work, train_head(work, FROZEN, target, data, Deadline(), checkpoint=begin)


class TestFrozen:
    def test_every_tensor_of_the_head_is_what_it_was(self, run, folders):
        before, after = tensors(folders / "float32"), tensors(run[1])
        assert of_head(after).keys() == before.keys()
        for path, own in before.items():
            assert after[path].dtype == own.dtype
            np.testing.assert_array_equal(after[path], own)
        assert np.abs(after["selector", "successors"]).max() > 0

    def test_what_is_logged(self, run):
        kept = json.loads((run[0] / "evaluation.json").read_text())["best_step"]
        looks = {record["step"]: record for record in records(run[0]) if "validation_loss" in record}
        steps = [record for record in records(run[0]) if "loss" in record]
        assert [record["step"] for record in steps] == [1, 2, 3, 4]
        names = ("loss_by_depth", "loss_by_depth_without", "coverage_by_depth", "accuracy_by_depth_without")
        for record in steps:
            assert all(len(record[name]) == SHAPE.block_size - 1 for name in names)
        # A new selector changes nothing; the head alone is the same at every step.
        first, last = looks[0], looks[kept]
        assert kept == FROZEN.fit.steps
        assert first["validation_loss_by_depth"] == first["validation_loss_by_depth_without"]
        assert last["validation_loss_by_depth_without"] == first["validation_loss_by_depth_without"]
        assert last["validation_loss_by_depth"] != first["validation_loss_by_depth"]

    @pytest.mark.wide
    def test_a_run_that_is_not_stopped_has_the_same_bits(self, run, target, folders, data, tmp_path):
        folder = train_head(
            tmp_path, FROZEN, target, data, Deadline(), checkpoint=Source(folders / "float32")
        )
        assert records(tmp_path) == records(run[0])
        again = tensors(folder)
        for path, own in tensors(run[1]).items():
            np.testing.assert_array_equal(again[path], own)

    def test_the_best_so_far_is_the_finished_head(self, run, tmp_path):
        for options, keeps in (([], lambda x: x), (["--without-selector"], of_head)):
            out = tmp_path / f"out{len(options)}"
            assert main(["export", "--work", str(run[0]), "--out", str(out), *options]) == 0
            expected, found = keeps(tensors(run[1])), tensors(out)
            assert found.keys() == expected.keys()
            for path, own in expected.items():
                assert found[path].dtype == own.dtype
                np.testing.assert_array_equal(found[path], own)


@pytest.mark.wide
def test_a_joint_stage_trains_both(target, folders, data, tmp_path):
    recipe = changed(FROZEN, selector={"joint": True, "weight": 0.5})
    folder = train_head(tmp_path, recipe, target, data, Deadline(), checkpoint=Source(folders / "bfloat16"))
    before, after = tensors(folders / "bfloat16"), tensors(folder)
    assert {own.dtype for own in after.values()} == {np.dtype(jnp.bfloat16)}
    moved = [np.abs((after[path] - own).astype(np.float32)).max() for path, own in before.items()]
    assert max(moved) > 0
    assert np.abs(after["selector", "successors"].astype(np.float32)).max() > 0
    last = records(tmp_path)[-1]
    assert last["validation_head_loss"] > 0
    assert len(last["validation_head_loss_by_depth"]) == SHAPE.block_size - 1


@pytest.mark.wide
def test_tau_is_measured_with_and_without(target, folders, data, tmp_path):
    recipe = changed(FROZEN, evaluation={"prompts": 2, "new_tokens": 8, "budgets": (16,)})
    train_head(tmp_path, recipe, target, data, Deadline(), checkpoint=Source(folders / "float32"))
    looks = [record for record in records(tmp_path) if "tau" in record]
    assert looks[0]["tau"] == looks[0]["tau_without"]
    assert all(look["tau_without"] == looks[0]["tau_without"] for look in looks)


class TestExport:
    @pytest.mark.parametrize("layout", ["huggingface", "orbax"])
    def test_without_its_selector_a_head_keeps_its_bits(self, folders, tmp_path, layout):
        source = folders / "selecting"
        if layout == "orbax":
            assert convert([str(source), str(tmp_path / "orbax")]) == 0
            source = tmp_path / "orbax"
        out = tmp_path / "out"
        assert main(["export", "--from", str(source), "--without-selector", "--out", str(out)]) == 0
        expected, found = of_head(tensors(folders / "selecting")), tensors(out)
        assert found.keys() == expected.keys()
        for path, own in expected.items():
            np.testing.assert_array_equal(found[path], own)
        assert load_draft_head(out).config.selector is None
        assert "selector" not in (out / "config.json").read_text()

    def test_a_head_that_has_none(self, folders, tmp_path, capsys):
        command = ["export", "--from", str(folders / "float32"), "--without-selector"]
        assert main([*command, "--out", str(tmp_path / "out")]) == 2
        assert "has no selector, so there is none to leave out" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
