"""The commands: a head from documents, fine-tuning from prompts, export, and errors for bad input."""

import json
import shutil
import sys

import jax.numpy as jnp
import pytest

from jetspec_jax import load_draft_head, load_target
from jetspec_jax.smollm2 import SMOLLM2_DRAFT_HEAD
from tests.train.folders import write_target
from train.command import main
from train.data.documents import Documents
from train.data.manifest import DocumentsManifest
from train.head import command as head_command
from train.head.command import NOT_IMPROVED
from train.head.export import export_head
from train.head.start import check_start
from train.head.verdict import Verdict
from train.loop.checkpoints import Best, Checkpoints
from train.loop.log import read_log

RECIPE = """
window = 16
dtype = "float32"

[head]
start = "random"
layers = 1
block_size = 4
taps = [0, 1]

[objective]
anchors = 2
chunk = 8

[fit]
steps = 2
batch = 2
learning_rate = 1e-3
warmup = 1
evaluate_every = 1

[evaluation]
windows = 2
prompts = 1
new_tokens = 4
budgets = [16]
temperatures = [0, 0.7]
width = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random target with the demo's tokenizer and chat template, prompts, and a recipe."""
    folder = tmp_path_factory.mktemp("commands")
    write_target(folder / "target")
    lines = [{"messages": [{"role": "user", "content": f"print {i}"}]} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "tiny.toml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def plain_head(tmp_path_factory):
    """The folder of the demo's head without its selector."""
    folder = tmp_path_factory.mktemp("plain") / "head"
    export_head("demo", folder, "jetspec", without_selector=True)
    return folder


def data(folder, out, *more):
    return main(
        [
            *("data", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")),
            *("--out", str(out), "--max-tokens", "8", *more),
        ]
    )


def head(folder, documents, work, *more):
    return main(
        [
            *("head", "--recipe", str(folder / "tiny.toml"), "--target", str(folder / "target")),
            *("--data", str(documents), "--work", str(work), *more),
        ]
    )


@pytest.fixture(scope="module")
def trained(folder):
    """A finished run, and in the folder "stopped" a copy of it after its first step."""
    assert data(folder, folder / "documents") == 0
    assert head(folder, folder / "documents", folder / "work", "--minutes", "0") == 0
    shutil.copytree(folder / "work", folder / "stopped")
    assert head(folder, folder / "documents", folder / "work") == 0
    return folder / "work"


@pytest.mark.wide
def test_a_head_from_documents(trained, folder):
    target = load_target(folder / "target", dtype="float32")
    config = load_draft_head(trained / "draft_head", dtype="float32", target=target).config
    assert (config.block_size, config.tap_layers, config.causal) == (4, (0, 1), True)
    assert config.mask_token_id == target.tokenizer.mask_token_id
    final = json.loads((trained / "evaluation.json").read_text())
    looks = [record for record in read_log(trained / "log.jsonl") if "tau" in record]
    assert [look["step"] for look in looks] == [1, 2]
    # One source and one prompt, greedy and sampled.
    for look in (final, *looks):
        assert set(look["tau"]) == {"16"}
        assert set(look["tau_by_temperature"]) == {"0.0", "0.7"}
        assert look["tau_by_temperature"]["0.0"] == look["tau"]
        assert look["tau_by_source"] == {"prompts.jsonl": look["tau_by_temperature"]}
    [prompt] = final["prompts"]
    assert (prompt["source"], prompt["tau"]) == ("prompts.jsonl", final["tau"])
    assert prompt["tau_by_temperature"] == final["tau_by_temperature"]
    assert (trained / "training.png").is_file()
    assert list((trained / "tensorboard").iterdir())


@pytest.mark.wide
def test_it_says_where_the_head_is_and_how_to_use_it(trained, folder, capsys):
    assert head(folder, folder / "documents", trained) == 0
    out = capsys.readouterr().out
    pair = f"--model {folder / 'target'} --draft-head {trained / 'draft_head'}"
    assert f"jetspec-jax generate {pair} --budget 16 PROMPT" in out
    assert "with budget 16" in out


@pytest.mark.wide
def test_a_run_with_kept_target_states(trained, folder, tmp_path, capsys):
    kept = ("--cache-target-states", "1", "--set", "evaluation.prompts=0")
    assert head(folder, folder / "documents", tmp_path / "work", *kept, "--minutes", "0") == 0
    out = capsys.readouterr().out
    assert "head: the target's states of " in out
    assert "target states: 0 of 1 shards are written" in out
    assert head(folder, folder / "documents", tmp_path / "work", *kept) == 0
    losses = [
        [record["loss"] for record in read_log(work / "log.jsonl") if "loss" in record]
        for work in (tmp_path / "work", trained)
    ]
    assert len(losses[0]) == 2
    # Of sums in another order.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert head(folder, folder / "documents", tmp_path / "none", "--cache-target-states", "1e-9") == 2
    assert "and --cache-target-states allows 1e-09 GiB" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.wide
def test_fine_tuning_in_one_command(trained, folder, tmp_path, capsys):
    begun = shutil.copytree(trained / "draft_head", tmp_path / "begun")
    raw = json.loads((begun / "config.json").read_text())
    (begun / "config.json").write_text(json.dumps({**raw, "zoom": 1}, indent=2) + "\n")
    command = [
        *("finetune", "--target", str(folder / "target"), "--draft-head", str(begun)),
        *("--prompts", str(folder / "prompts.jsonl"), "--work", str(tmp_path / "tuned")),
        *("--max-tokens", "8", "--set", "window=16", "--set", "fit.steps=2", "--set", "fit.warmup=0"),
        *("--set", "fit.batch=2", "--set", "objective.anchors=2", "--set", "evaluation.windows=2"),
        *("--set", "evaluation.prompts=0", "--set", "dtype=float32", "--set", "fit.learning_rate=1e-3"),
    ]
    assert main(command) == 2
    assert "on the command line --ignore-config-key zoom" in capsys.readouterr().err
    vouched = ("--ignore-config-key", "zoom")
    command += vouched
    assert main([*command, "--minutes", "0"]) == 0
    assert "the same command goes on" in capsys.readouterr().out
    assert main(command) == 0
    tuned = tmp_path / "tuned" / "head" / "draft_head"
    out = capsys.readouterr().out
    assert f"--draft-head {tuned} --ignore-config-key zoom --budget " in out
    assert out.splitlines()[-1].startswith("improved on held-out documents: validation loss ")
    config = json.loads((tuned / "config.json").read_text())
    [fitted] = [part for part in config.values() if isinstance(part, dict) and "draft_scales" in part]
    del fitted["draft_scales"]
    assert config == {**raw, "zoom": 1}
    assert main(["export", "--work", str(tuned.parent), "--out", str(tmp_path / "best"), *vouched]) == 0
    assert (tuned / "model.safetensors").read_bytes() != (
        trained / "draft_head" / "model.safetensors"
    ).read_bytes()
    # The answers are the target's own, in its chat template.
    settings = DocumentsManifest.read(tmp_path / "tuned" / "data").settings
    assert (settings.mode, settings.count) == ("regenerate", 8)
    text = load_target(folder / "target").tokenizer.decode(
        Documents.open(tmp_path / "tuned" / "data")[0].tokens
    )
    assert text.startswith("<|im_start|>user\nprint ")

    capsys.readouterr()
    assert main([*command, "--set", "fit.learning_rate=1e-5"]) == 2
    assert "fit.learning_rate: 0.001 there, 1e-05 here" in capsys.readouterr().err


@pytest.mark.wide
def test_a_head_that_did_not_become_better_is_kept_and_said_so(trained, folder, tmp_path, capsys):
    begun = trained / "draft_head"
    recipe = tmp_path / "again.toml"
    text = RECIPE[: RECIPE.index("[head]")] + RECIPE[RECIPE.index("[objective]") :]
    recipe.write_text(text + '[head]\nstart = "checkpoint"\n')
    command = [
        *("head", "--recipe", str(recipe), "--target", str(folder / "target"), "--draft-head", str(begun)),
        *("--data", str(folder / "documents"), "--work", str(tmp_path / "work")),
        *("--set", "fit.learning_rate=0", "--set", "evaluation.prompts=0"),
    ]
    for _ in range(2):  # a finished run says it again
        assert main(command) == NOT_IMPROVED == 3
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("not improved on held-out documents: at best validation loss ")
        assert last.endswith("; the initial head is kept")
    kept = tmp_path / "work" / "draft_head" / "model.safetensors"
    assert kept.read_bytes() == (begun / "model.safetensors").read_bytes()


def test_an_error_of_training_is_one_line(trained, folder, tmp_path, capsys):
    more = "--set", "evaluation.new_tokens=250", "--minutes", "0"
    assert head(folder, folder / "documents", tmp_path / "work", *more) == 2
    error = capsys.readouterr().err
    assert error.startswith("train: none of 1 held-out prompts leaves room for evaluation.new_tokens 250")


def test_a_run_s_best_head_can_be_written_at_any_time(trained, folder, tmp_path, capsys):
    assert not (folder / "stopped" / "draft_head").exists()
    assert main(["export", "--work", str(folder / "stopped"), "--out", str(tmp_path / "early")]) == 0
    assert "the head of step 1 is in" in capsys.readouterr().out
    target = load_target(folder / "target", dtype="float32")
    load_draft_head(tmp_path / "early", target=target)
    assert main(["export", "--work", str(trained), "--out", str(tmp_path / "late")]) == 0
    files = [place / "model.safetensors" for place in (tmp_path / "late", trained / "draft_head")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert main(["export", "--work", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert f"neither {tmp_path} nor {tmp_path / 'head'} holds a recipe.json" in capsys.readouterr().err
    # In the folder of `finetune`, the run has a folder of its own.
    shutil.copytree(trained, tmp_path / "tuned" / "head")
    command = ["export", "--work", str(tmp_path / "tuned"), "--out"]
    assert main([*command, str(tmp_path / "found")]) == 0
    assert (tmp_path / "found" / "model.safetensors").read_bytes() == files[1].read_bytes()
    shutil.copy(trained / "recipe.json", tmp_path / "tuned")
    assert main([*command, str(tmp_path / "y")]) == 2
    assert (
        f"{tmp_path / 'tuned'} and {tmp_path / 'tuned' / 'head'} both hold a run" in capsys.readouterr().err
    )


def test_a_head_before_the_best_one_is_not_written(trained, tmp_path, capsys):
    work = shutil.copytree(trained, tmp_path / "work")
    with Checkpoints(work) as checkpoints:
        checkpoints.save_best(Best(2, 99.0), {"a": jnp.ones(3)})
    newest = max((work / "best").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(newest / "weights")
    assert main(["export", "--work", str(work), "--out", str(tmp_path / "out")]) == 2
    assert f"train: {newest} is damaged (" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert newest.exists()


def test_fine_tuning_on_the_answers_of_a_log_generates_nothing(folder, plain_head, tmp_path, monkeypatch):
    asked = {}

    def keep(*_, **settings):
        asked.update(settings)
        raise ValueError("enough")

    monkeypatch.setattr(head_command, "make_data", keep)
    pair = ["--target", str(folder / "target"), "--draft-head", str(plain_head)]
    given = ["finetune", *pair, "--work", str(tmp_path)]
    for mode, head in (("corpus", None), ("regenerate", str(plain_head))):
        assert main([*given, "--prompts", "log.jsonl", "--mode", mode, "--turns", "every"]) == 2
        assert (asked["mode"], asked["draft_head"], asked["turns"]) == (mode, head, "every")


def test_a_tracker_s_package_must_be_there_before_anything_is_loaded(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert head(folder, tmp_path / "nothing", tmp_path / "work", "--track", "wandb") == 2
    assert 'the tracker wandb needs wandb: pip install "jetspec-jax[wandb]"' in capsys.readouterr().err


@pytest.mark.parametrize("command", ["head", "finetune"])
def test_a_cache_that_holds_nothing_is_refused_before_anything_is_made(folder, tmp_path, capsys, command):
    source = {"head": "--data", "finetune": "--prompts"}[command]
    asked = [command, "--recipe", str(folder / "tiny.toml"), "--target", "nothing", source, "nothing"]
    assert main([*asked, "--work", str(tmp_path / "work"), "--cache-target-states", "nan"]) == 2
    assert "--cache-target-states must be above 0 GiB, not nan" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("recipe", "complaint"),
    [
        ("selector", "demo/draft_head has a selector already, of rank 32"),
        ("finetune", "demo/draft_head has a selector, which the recipe does not train"),
    ],
)
def test_fine_tuning_refuses_a_head_with_a_selector_unless_told_what_to_do_with_it(
    folder, tmp_path, monkeypatch, capsys, recipe, complaint
):
    monkeypatch.setattr(head_command, "make_data", None)
    given = ["finetune", "--target", str(folder / "target"), "--draft-head", "demo", "--work", str(tmp_path)]
    assert main([*given, "--prompts", "log.jsonl", "--recipe", recipe]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert "selector.joint=true" in said


@pytest.mark.parametrize(
    ("model", "options", "begins"),
    [
        ("smollm2", [], "smollm2"),
        ("smollm2", ["--draft-head", "smollm2"], "smollm2"),
        ("smollm2", ["--recipe", "smollm2-finetune"], None),
        ("demo", ["--draft-head", "demo"], None),
    ],
)
def test_the_pair_smollm2_has_a_recipe_of_its_head_and_selector(
    tmp_path, monkeypatch, capsys, model, options, begins
):
    asked = {}
    monkeypatch.setattr(
        head_command, "check_start", lambda *given: asked.update(zip("shc", given, strict=True))
    )
    monkeypatch.setattr(head_command, "make_data", lambda *given, **named: given[9])
    given = ["finetune", "--model", model, *options, "--prompts", "chats.jsonl", "--work", str(tmp_path)]
    with pytest.raises(IndexError):
        main(given)
    chosen, head, selector = asked["s"], asked["h"], asked["c"]
    assert chosen.start == "checkpoint"
    if begins is None:
        assert (head is None) == ("--draft-head" not in options)
        assert (selector is None) == ("--recipe" not in options)
        return
    assert head.path_or_id == SMOLLM2_DRAFT_HEAD
    assert (selector.existing, selector.joint) == ("continue", True)
    check_start(chosen, head, selector)  # the pair's selector can be continued as the recipe says


@pytest.mark.parametrize(
    ("mode", "changes", "warns", "improved"),
    [
        ("corpus", ["objective.loss=sft"], True, True),
        ("corpus", ["objective.loss=dpace"], True, False),
        ("corpus", [], False, False),
        ("regenerate", ["objective.loss=sft"], False, False),
        ("corpus", ["objective.loss=sft", "selector.rank=2"], False, True),  # only the selector learns
    ],
)
def test_hard_labels_of_texts_that_the_target_may_not_write(
    folder, tmp_path, monkeypatch, caplog, capsys, mode, changes, warns, improved
):
    """A warning before anything is loaded, and the cause behind a head that did not improve."""
    answered = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(answered) + "\n")
    made = ["data", "--target", str(folder / "target"), "--prompts", str(tmp_path / "chats.jsonl")]
    limit = ["--max-tokens", "2"] if mode == "regenerate" else []
    assert main([*made, "--heldout", "0", "--mode", mode, *limit, "--out", str(tmp_path / "made")]) == 0
    monkeypatch.setattr(head_command, "read_target", lambda *_: None)
    monkeypatch.setattr(head_command, "train_head", lambda *_, **__: tmp_path)
    monkeypatch.setattr(head_command, "read_verdict", lambda _: Verdict(improved, "the verdict"))
    settings = [word for change in changes for word in ("--set", change)]
    assert head(folder, tmp_path / "made", tmp_path / "work", *settings) == (0 if improved else NOT_IMPROVED)
    said = [record.message for record in caplog.records if "the target may write others" in record.message]
    assert len(said) == warns
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (f"the verdict; {said[0]}" if warns and not improved else "the verdict")


def test_one_of_several_processes_must_know_which(folder, tmp_path, capsys):
    assert head(folder, tmp_path, tmp_path, "--coordinator", "localhost:1") == 2
    assert "belong together; add --processes, --process" in capsys.readouterr().err
