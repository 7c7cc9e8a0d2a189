"""The whole recipe at a tiny size: what it makes, and that it can be stopped anywhere."""

import json

import jax
import numpy as np
import pytest

import train.command
import train.demo.command
from jetspec_jax import SamplingParams, generate, generate_tree, load_draft_head, load_target, logits
from tests.train.folders import read
from tests.train.head.tiny import losses
from train.data.documents import Documents
from train.demo.command import make_pair
from train.demo.continuations import cut_splits, read_rows
from train.demo.corpus import HELDOUT, CorpusManifest, read_corpus
from train.demo.evaluate import heldout_prompts, repetition, target_bits
from train.demo.target import token_losses
from train.demo.tokenizer import Tokenizer
from train.loop.stages import OutOfTime

# A whole recipe, trained and measured.
pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def work(recipe, corpus, tmp_path_factory):
    """The work folder of a finished run of the tiny recipe."""
    folder = tmp_path_factory.mktemp("work")
    make_pair(recipe, folder, corpus)
    return folder


@pytest.fixture(scope="module")
def demo(work):
    return work / "demo"


def test_both_models_learn(work):
    for model in ("target", "head"):
        values = losses(work / model)
        assert np.mean(values[-5:]) < 0.7 * np.mean(values[:3]), model


def test_the_pair_loads_and_decodes(demo):
    target = load_target(demo / "target", dtype="float32")
    head = load_draft_head(demo / "draft_head", dtype="float32", target=target)
    # As many at a time as the recipe's own evaluation decodes: its programs serve again.
    texts = ("def get_path_0(self, line):", "return")
    prompts, params = [target.tokenizer.encode(text) for text in texts], SamplingParams(max_tokens=12)
    plain = generate(target, prompts, params, max_slots=2)
    trees = generate_tree(target, head, prompts, params, budget=16, width=3, max_slots=2)
    assert [tree.token_ids for tree in trees] == [own.token_ids for own in plain]
    assert head.config.block_size == 4
    assert head.config.causal


def test_configs_have_the_keys_of_published_checkpoints(demo):
    head = json.loads((demo / "draft_head" / "config.json").read_text())
    causal = {"causal": True, "causal_head": True}
    assert head["dflash_config"] == {**causal, "mask_token_id": 1, "target_layer_ids": [0, 1]}
    assert (head["is_causal"], set(head["layer_types"])) == (True, {"full_attention"})
    assert head["torch_dtype"] == "bfloat16"
    assert head["rope_theta"] == 10_000.0
    assert head["num_target_layers"] == 2
    assert json.loads((demo / "target" / "generation_config.json").read_text())["eos_token_id"] == [0, 3]


def test_regenerated_text_is_the_targets_own(work, recipe):
    tokens, learn = map(np.stack, zip(*read(work / "regenerated"), strict=True))
    assert tokens.shape == (16, 40)
    settings = recipe.regeneration
    cuts = cut_splits(
        *(np.load(work / "tokens" / f"{split}.npy") for split in ("train", "validation")),
        Tokenizer.read(work / "tokenizer").newline_ids(),
        count=16,
        heldout=2,
        prompt=settings.prompt,
        temperatures=settings.temperatures,
        seed=(recipe.seed,),
    )
    # The last two are held out, and begin like lines of the validation split.
    assert Documents.open(work / "regenerated", HELDOUT).numbers.tolist() == [14, 15]
    for row, prompt in zip(tokens, cuts.prompts(40).tokens, strict=True):
        assert np.array_equal(row[: len(prompt)], prompt)
    sizes = np.concatenate([cuts.train.prompt, cuts.held.prompt])
    assert np.array_equal(learn, np.arange(40)[None, :] >= sizes[:, None])
    target = load_target(work / "demo" / "target", dtype="float32")
    greedy = np.concatenate([cuts.train.temperature, cuts.held.temperature]) == 0
    assert 0 < greedy.sum() < 16
    rows, written = tokens[greedy], learn[greedy][:, 1:]
    scores = np.asarray(logits(target, rows))[:, :-1]
    own = np.take_along_axis(scores, rows[:, 1:, None], axis=2)[:, :, 0]
    behind = scores.max(axis=2) - own
    # It was written in the device's own precision: on a GPU near-ties may fall the other way.
    assert behind[written].max() < (1e-3 if jax.default_backend() == "cpu" else 0.1)
    assert behind[~written].max() > 1


def test_the_target_is_polished_on_rows_of_its_own_text(work, recipe):
    tokens, learn = read_rows(work / "polish" / "text-0")
    assert tokens.shape == learn.shape == (recipe.polish.sequences, recipe.polish.length)
    low, high = recipe.polish.prompt
    first = np.argmax(learn, axis=1)
    assert ((low <= first) & (first <= high)).all()
    np.testing.assert_array_equal(learn, np.arange(learn.shape[1]) >= first[:, None])


def test_the_readme_has_the_figures_of_the_json(demo):
    results = json.loads((demo / "evaluation.json").read_text())
    readme = (demo / "README.md").read_text()
    for key, value in results.items():
        if key.startswith("tau/"):
            assert f"{value:.2f}" in readme, key
        if key.startswith("bits_per_byte/"):
            assert f"{value['all']:.3f}" in readme, key
    assert "PSF-2.0" in readme
    assert results["bytes"] < 200_000


def test_more_prompts_are_kept_than_measured_and_none_twice(demo, recipe, corpus):
    kept = [json.loads(line)["text"] for line in (demo / "prompts.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.read(demo / "target")
    documents = read_corpus(corpus, CorpusManifest.read(recipe.manifest_path()))
    measured, _ = heldout_prompts(recipe, tokenizer, documents)
    assert kept[: recipe.evaluation.prompts] == [tokenizer.decode(prompt) for prompt in measured]
    assert len(set(kept)) == len(kept) == recipe.evaluation.kept_prompts
    held = "".join(text for source, text in documents.items() if source.split == HELDOUT)
    assert all(text in held for text in kept if "<|" not in text)


def test_bits_do_not_depend_on_the_stride_of_short_documents(demo):
    target, tokenizer = load_target(demo / "target", dtype="float32"), Tokenizer.read(demo / "target")
    text = "def get_path_0(self, line):\n"
    tokens = np.array([[0, *tokenizer.encode(text)]], np.int32)
    whole = float(token_losses(target.config, target.weights, jax.numpy.asarray(tokens)).sum()) / np.log(2)
    for stride in (3, 32):
        bits = target_bits(target, tokenizer, [text, text], window=32, stride=stride)
        assert bits == pytest.approx(2 * whole, rel=1e-4)


def test_repetition():
    assert repetition([[1, 2, 3, 4, 5]], 2) == 0
    assert repetition([[1, 1, 1, 1, 1]], 2) == 0.75
    assert repetition([[1, 2], [1, 2]], 2) == 0


def test_a_finished_recipe_does_nothing(work, recipe, corpus, capsys):
    before = {p: p.stat().st_mtime_ns for p in work.rglob("*") if p.is_file()}
    make_pair(recipe, work, corpus, minutes=0.0)
    assert {p: p.stat().st_mtime_ns for p in work.rglob("*") if p.is_file()} == before
    assert capsys.readouterr().out.count("done already") == 6


def test_a_time_limit_ends_cleanly_and_says_what_is_left(recipe, corpus, tmp_path, monkeypatch, capsys):
    with pytest.raises(OutOfTime, match="left: corpus, tokenizer, target, regenerate, head, evaluate"):
        make_pair(recipe, tmp_path, corpus, minutes=0.0)
    monkeypatch.setattr(train.demo.command, "DEMO", recipe)
    arguments = ["demo", "--work", str(tmp_path), "--corpus", str(corpus), "--minutes", "0"]
    assert train.command.main(arguments) == 0
    assert "stopped" in capsys.readouterr().out


def test_a_wrong_corpus_is_one_error(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.demo.command, "DEMO", recipe)
    (tmp_path / "Lib").mkdir()
    arguments = ["demo", "--work", str(tmp_path / "w"), "--corpus", str(tmp_path / "Lib")]
    assert train.command.main(arguments) == 2
    assert "is not the corpus tiny: " in capsys.readouterr().err


def test_held_out_files_are_in_no_training_stream(work, recipe, corpus):
    documents = read_corpus(corpus, CorpusManifest.read(recipe.manifest_path()))
    tokenizer = Tokenizer.read(work / "tokenizer")
    held = [text for source, text in documents.items() if source.split == "heldout"]
    assert len(held) == 2
    stream = tokenizer.decode(np.load(work / "tokens" / "train.npy").tolist())
    assert not any(text[:20] in stream for text in held)
