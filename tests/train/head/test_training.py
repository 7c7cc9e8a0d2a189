"""A whole run of a head's training: what it refuses, what it leaves, and that others load what it wrote."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jetspec_jax import SamplingParams, Target, generate_tree, load_draft_head, load_target
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.cli.command import main
from jetspec_jax.config import parse_model_config
from jetspec_jax.demo import DEMO_TARGET
from tests.decode.test_fp8 import BLOCKS, quantised_weights
from tests.decode.tiny import TINY, random_target, random_weights, with_mlp
from tests.train.head.tiny import RECIPE, changed, records, write, write_documents
from train.data.documents import Document
from train.head.config import decoder_json
from train.head.evaluation import prompt_of
from train.head.recipe import Calibration
from train.head.training import train_head
from train.loop.stages import Deadline

BUDGET, NEW_TOKENS = 16, 24
LINES = [
    "def read_lines(path",
    "class Queue",
    "import json",
    "for index, value in",
    "return self.items",
    "if not",
]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A target with the demo's tokenizer that says its last token again and again: easily learnt."""
    folder = tmp_path_factory.mktemp("target") / "target"
    config = dataclasses.replace(TINY, vocab_size=4096, tie_word_embeddings=True)
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        **decoder_json(config, config.num_layers, config.layers[0].mlp_size),
        "tie_word_embeddings": True,
    }
    assert parse_model_config(raw) == config
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    files = {name: (DEMO_TARGET / name).read_text() for name in names}
    weights = random_weights(config, 3)
    # Its layers hardly change what they get, and tied embeddings give that back.
    for layer in weights["layers"].values():
        layer["self_attn"]["o_proj"] *= 0.05
        layer["mlp"]["down_proj"] *= 0.05
    weights["embed_tokens"] *= 4
    save_checkpoint(folder, raw, weights, extra_files=files)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, target_folder):
    """The recipe, the target, and the work folder of a finished run."""
    target = load_target(target_folder)
    documents = []
    for line in LINES * 4:
        prompt = target.tokenizer.encode(line)
        # What the target makes of it.
        tokens = np.array(prompt + prompt[-1:] * (32 - len(prompt)), np.int32)
        documents.append(Document(tokens, np.arange(32) >= len(prompt)))
    data = write(tmp_path_factory.mktemp("data") / "documents", documents, target.config.vocab_size)
    recipe = changed(
        RECIPE,
        fit={"steps": 40, "save_every": 20, "evaluate_every": 20, "learning_rate": 2e-2},
        head={"mask_token": 4095},
        evaluation={"prompts": 3, "new_tokens": NEW_TOKENS, "budgets": (BUDGET,)},
        calibration=Calibration(prompts=3, max_tokens=NEW_TOKENS, temperatures=(1.0, 0.0)),
    )
    work = tmp_path_factory.mktemp("work")
    assert train_head(work, recipe, target, data, Deadline()) == work / "draft_head"
    return recipe, target, work


@pytest.mark.wide
def test_the_exported_head_has_the_tau_of_its_evaluation_for_others(run, target_folder, capsys):
    _, target, work = run
    evaluation = json.loads((work / "evaluation.json").read_text())
    assert len(evaluation["prompts"]) == 3
    chosen = max(evaluation["prompts"], key=lambda prompt: prompt["tau"][str(BUDGET)])
    # A head whose drafts are never accepted would not show much.
    assert chosen["tau"][str(BUDGET)] > 1.2
    text = target.tokenizer.decode(chosen["token_ids"])
    assert target.tokenizer.encode(text) == chosen["token_ids"]
    options = ["--target", target_folder, "--draft-head", work / "draft_head", "--json", "--budget", BUDGET]
    options += ["--width", evaluation["width"], "--max-tokens", evaluation["new_tokens"]]
    assert main(["generate", *map(str, options), text]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["token_ids"]) == NEW_TOKENS
    assert round(report["mean_acceptance_length"], 4) == chosen["tau"][str(BUDGET)]


@pytest.mark.wide
def test_the_last_step_fits_draft_scales(run):
    _, target, work = run
    scales = json.loads((work / "calibrate" / "calibration.json").read_text())["draft_scales"]
    config = json.loads((work / "draft_head" / "config.json").read_text())
    assert config["dflash_config"]["draft_scales"] == scales
    found = load_draft_head(work / "draft_head", target=target).config.draft_scales
    assert np.array_equal(found, scales)
    assert not np.array_equal(found, np.ones_like(found))


@pytest.mark.wide
def test_tau_is_the_mean_over_all_rounds_and_decides_which_weights_are_best(run):
    recipe, target, work = run
    evaluation = json.loads((work / "evaluation.json").read_text())
    head = load_draft_head(work / "draft_head", target=target)
    # Where the evaluation had them, so that its programs serve again.
    device = jax.local_devices()[0]
    target, head = (
        dataclasses.replace(own, weights=jax.device_put(own.weights, device)) for own in (target, head)
    )
    prompts = [prompt["token_ids"] for prompt in evaluation["prompts"]]
    params = SamplingParams(max_tokens=NEW_TOKENS)
    completions = generate_tree(
        target, head, prompts, params, budget=BUDGET, width=recipe.evaluation.width, max_slots=3
    )
    lengths = np.concatenate([completion.accept_lengths for completion in completions])
    assert evaluation["tau"][str(BUDGET)] == round(float(np.mean(lengths)), 4)
    looks = {record["step"]: record["tau"][str(BUDGET)] for record in records(work) if "tau" in record}
    assert looks[evaluation["best_step"]] == evaluation["score"] == max(looks.values())
    # The head in training was looked at as it was written: rounded to bfloat16.
    assert evaluation["score"] == evaluation["tau"][str(BUDGET)]


def test_a_run_leaves_a_log_a_plot_and_its_recipe(run):
    recipe, target, work = run
    losses = [record["loss"] for record in records(work) if "loss" in record]
    assert len(losses) == recipe.fit.steps
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    looks = [record for record in records(work) if "validation_loss" in record]
    assert [record["step"] for record in looks] == [20, 40]
    assert len(looks[0]["validation_accuracy_by_depth"]) == recipe.head.block_size - 1
    assert (work / "training.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((work / "recipe.json").read_text())
    assert kept["fit"] == dataclasses.asdict(recipe.fit)
    assert kept["begins_as"]["vocab_size"] == target.config.vocab_size


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def test_another_recipe_is_refused_and_all_that_differs_is_named(run, data, tmp_path, monkeypatch):
    class Begun(Exception):
        pass

    def train(*arguments, **settings):
        raise Begun

    monkeypatch.setattr("train.head.training.train", train)
    target = random_target(TINY, 0)
    with pytest.raises(Begun):
        train_head(tmp_path, RECIPE, target, data, Deadline())
    other = changed(RECIPE, fit={"steps": 7}, objective={"loss": "sft"}, head={"taps": (1,)}, seed=1)
    with pytest.raises(ValueError, match="was made with another recipe") as error:
        train_head(tmp_path, other, target, data, Deadline())
    for part in (
        "fit.steps: 4 there, 7 here",
        "objective.loss: forward_kl there, sft here",
        "head.taps: [0, 1] there, [1] here",
        "begins_as.dflash_config.target_layer_ids: [0, 1] there, [1] here",
        "seed: 0 there, 1 here",
    ):
        assert part in str(error.value)
    # Other documents and another target are other runs, too.
    more = write_documents(tmp_path / "more", count=44)
    with pytest.raises(ValueError, match=r"data\.count: 40 there, 44 here"):
        train_head(tmp_path, RECIPE, target, more, Deadline())
    wide = random_target(with_mlp(TINY, 64), 0)
    with pytest.raises(ValueError, match=r"target\.layers\.0\.mlp_size: 48 there, 64 here"):
        train_head(tmp_path, RECIPE, wide, data, Deadline())
    with pytest.raises(Begun):
        train_head(tmp_path, RECIPE, target, data, Deadline())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 3}, "a block of 4 slots does not fit a window of 3 tokens"),
        ({"mesh": {"fsdp": 2}}, "a mesh of data -1 x fsdp 2 does not divide 1 devices; possible: data 1 x"),
        ({"fit": {"micro_batch": 3}}, "a batch of 8 sequences does not divide into micro-batches of 3 on 1"),
        ({"dtype": "float16"}, "dtype must be auto, float32 or bfloat16"),
        ({"objective": {"anchors": 0}}, "objective.anchors must be at least 1, not 0"),
        ({"objective": {"temperature": 0.0}}, "objective.temperature must be above 0, not 0.0"),
        ({"objective": {"smoothing": 1.0}}, r"objective.smoothing must lie in 0\.\.1, 1 excluded, not 1.0"),
        ({"objective": {"loss": "dpace", "gamma": 4.0}}, "objective.gamma must be 0 with the loss dpace"),
        ({"packing": True, "fit": {"batch": 64}}, "fewer than a batch of 64; set fit.batch to at most"),
        ({"evaluation": {"prompts": 1, "budgets": ()}}, "evaluation.budgets"),
        (
            {"evaluation": {"temperatures": (0.0, 0)}},
            r"evaluation.temperatures must differ, not be \[0.0, 0\]",
        ),
        ({"evaluation": {"prompts": 1, "budgets": (16, 300)}}, "budget must be in 1..256"),
    ],
)
def test_what_cannot_be_is_refused_before_the_folder_is_taken(data, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_head(tmp_path / "work", changed(RECIPE, **changes), random_target(TINY, 0), data, Deadline())
    assert not (tmp_path / "work").exists()


def test_documents_of_another_vocabulary_are_refused(data, tmp_path):
    target = random_target(dataclasses.replace(TINY, vocab_size=65), 0)
    with pytest.raises(ValueError, match="made for a vocabulary of 64, the target's has 65"):
        train_head(tmp_path / "work", RECIPE, target, data, Deadline())
    with pytest.raises(FileNotFoundError, match=r"has no documents\.json"):
        train_head(tmp_path / "work", RECIPE, target, tmp_path, Deadline())


def test_a_prompt_is_what_stands_before_the_first_token_to_learn():
    tokens, learn = np.arange(10, dtype=np.int32), np.zeros(10, bool)
    learn[[4, 7]] = True
    assert prompt_of(Document(tokens, learn), 6) == [0, 1, 2, 3]
    # Where there is nothing before it, or nothing to learn, a prompt is cut from the beginning.
    assert prompt_of(Document(tokens, np.ones(10, bool)), 6) == [0, 1, 2, 3, 4, 5]
    assert prompt_of(Document(tokens, np.zeros(10, bool)), 64) == list(range(9))


@pytest.mark.wide
def test_a_head_learns_from_a_quantised_target(tmp_path, caplog):
    config = dataclasses.replace(TINY, quantization=BLOCKS)
    target, data = Target(config, quantised_weights(config, 0)), write_documents(tmp_path / "documents")
    folder = train_head(tmp_path / "work", RECIPE, target, data, Deadline())
    losses = [record["loss"] for record in records(tmp_path / "work") if "loss" in record]
    assert losses
    assert np.isfinite(losses).all()
    head = load_draft_head(folder, target=target)
    assert head.config.target_format == BLOCKS.format
    assert "trained with" not in caplog.text
