"""The whole command on the demo's target, stopped and killed in each stage, and what it refuses."""

import contextlib
import dataclasses
import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jetspec_jax import load_draft_head, load_target
from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_TARGET
from tests.train.folders import write_target
from tests.train.full_disk import files_of_at_most
from tests.train.pair.tiny import RECIPE
from train.command import main
from train.data.documents import Documents, Writer
from train.data.manifest import HELDOUT, TRAIN
from train.data.prompt_filters import SHORT, UserPrompt
from train.head.recipe_file import toml_of
from train.loop.stages import Deadline, OutOfTime
from train.pair import stages
from train.pair.cost import Rates
from train.pair.prompts import Written
from train.pair.recipe import LEAST_CALIBRATED, LEAST_JUDGED
from train.pair.stages import Options, make_pair

STAGES = ("check", "prompts", "answers", "head", "selector", "calibrate", "judge", "export")
TEXTS = "def read_{0}(path):\n    with open(path) as file:\n        return file.read({0})\n"


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The demo's target, whose texts end with a line: otherwise it would end no prompt."""
    folder = tmp_path_factory.mktemp("targets") / "lines"
    shutil.copytree(DEMO_TARGET, folder)
    tokens = load_tokenizer(DEMO_TARGET).get_vocab()
    ends = [tokens[text] for text in ("<|endoftext|>", "Ċ", "ĊĊ", "ĊĊĊ")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe whose documents the target continues, beside the prompts that it writes."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"# {i}\n{TEXTS.format(i)}"}) + "\n" for i in range(100))
    )
    path = folder / "tiny.toml"
    path.write_text(toml_of({**dataclasses.asdict(RECIPE), "documents": [str(folder / "texts.jsonl")]}))
    return path


def command(target, recipe, work, *more):
    given = ["--target", str(target), "--recipe", str(recipe), "--work", str(work)]
    return main(["pair", *given, "--yes", *more])


def made(work):
    """All that does not depend on times, as bytes."""
    files = ["pair.json", "recipe.toml", "prompts.jsonl", "prompts.json", "held.json"]
    files += ["calibrate/calibration.json", "calibrate/texts/0.json"]
    found = {name: (work / name).read_bytes() for name in files}
    for folder in ("answers", "head/draft_head", "selector/draft_head", "calibrate/draft_head", "export"):
        for path in (work / folder).rglob("*"):
            if path.is_file() and path.name != "README.md":
                found[str(path.relative_to(work))] = path.read_bytes()
    report = json.loads((work / "judge.json").read_text())
    timed = ("tokens_per_second", "plain_tokens_per_second", "times_plain")
    rows = [{name: value for name, value in row.items() if name not in timed} for row in report["rows"]]
    return {**found, "rows": rows}


@pytest.fixture(scope="module")
def whole(lines, recipe, tmp_path_factory):
    """The work folder of a run without an interruption."""
    work = tmp_path_factory.mktemp("whole") / "work"
    assert command(lines, recipe, work) == 0
    return work


@pytest.mark.wide
def test_the_command_makes_a_head_that_decodes(whole, lines, recipe, capsys):
    report = json.loads((whole / "judge.json").read_text())
    assert [(row["budget"], row["temperature"]) for row in report["rows"]] == [(4, 1.0)]
    assert report["prompts"] == LEAST_JUDGED
    # In float32 trees give the tokens of plain decoding.
    assert all(row["equal_outputs"] == LEAST_JUDGED for row in report["rows"])
    # The training documents answer training prompts, and the prompts that choose the best weights.
    split = json.loads((whole / "held.json").read_text())
    assert [len(split[part]) for part in ("judged", "calibrated")] == [LEAST_JUDGED, LEAST_CALIBRATED]
    prompts = [json.loads(line) for line in (whole / "prompts.jsonl").read_text().splitlines()]
    for part, given in ((TRAIN, prompts), (HELDOUT, split["choosing"])):
        answers = Documents.open(whole / "answers", part)
        assert len(answers) == len(given) > 0
        for answer, prompt in zip(answers, given, strict=True):
            assert answer.tokens[: len(prompt["tokens"])].tolist() == prompt["tokens"]
    texts = json.loads((whole / "calibrate/texts/0.json").read_text())
    assert [text["prompt"] for text in texts] == [prompt["tokens"] for prompt in split["calibrated"]]
    target = load_target(DEMO_TARGET)
    for folder, selected in ((whole / "export", 4), (whole / "export" / "without_selector", None)):
        head = load_draft_head(folder, target=target)
        assert (head.config.depth, head.config.selected, head.config.causal) == (3, selected, True)
    card = (whole / "export" / "README.md").read_text()
    assert card.startswith("# A draft head for lines\n")
    assert f"{LEAST_JUDGED} held-out prompts" in card
    assert (whole / "judge.svg").stat().st_size > 1000
    assert set(json.loads((whole / "seconds.json").read_text())) == set(STAGES)
    assert not (whole / "trial").exists()
    counts = json.loads((whole / "prompts.json").read_text())
    assert counts["kept"]["texts.jsonl"] == 100
    assert counts["kept"]["free"] >= 4
    # A finished folder is not changed, and another target or recipe is refused.
    before = made(whole)
    assert command(lines, recipe, whole) == 0
    assert made(whole) == before
    capsys.readouterr()
    assert command(lines, recipe, whole, "--set", "max_tokens=9") == 2
    assert "was made with another recipe" in capsys.readouterr().err
    assert main(["pair", "--target", str(DEMO_TARGET), "--work", str(whole)]) == 2
    assert "target: lines there, target here" in capsys.readouterr().err


@pytest.mark.wide
def test_stops_and_kills_change_no_file(whole, lines, recipe, tmp_path, monkeypatch):
    """Each run stops at its fourth look at the clock, or is killed at the end of a stage."""

    class Killed(BaseException):
        pass

    class Hasty(Deadline):
        def __init__(self, minutes=None):
            super().__init__(minutes)
            self.looks = 4 if minutes else None

        def passed(self):
            if self.looks is not None:
                self.looks -= 1
            return self.looks is not None and self.looks < 0

    killed = set()

    def killing(name, stage):
        def run(self):
            stage(self)
            if name not in killed:
                killed.add(name)
                raise Killed

        return run

    monkeypatch.setattr(stages, "Deadline", Hasty)
    for name in STAGES:
        stage = getattr(stages._Pair, f"{name}_stage")
        monkeypatch.setattr(stages._Pair, f"{name}_stage", killing(name, stage))
    options = Options(str(lines), tmp_path / "work", recipe=recipe, yes=True)
    stopped = 0
    for _ in range(100):
        try:
            make_pair(options, 1.0)
        except Killed:
            continue
        except OutOfTime:
            stopped += 1
            continue
        break
    else:
        pytest.fail("it does not come to an end")
    assert killed == {*STAGES}
    assert stopped >= 4
    assert made(tmp_path / "work") == made(whole)


@pytest.mark.parametrize("given", ["mbpp", "nothing=none.jsonl"])
def test_an_evaluated_set_that_is_missing_is_an_error_before_anything_is_made(
    recipe, tmp_path, monkeypatch, capsys, given
):
    monkeypatch.setattr(stages, "trial_texts", None)
    assert command("demo", recipe, tmp_path / "work", "--evaluated", given) == 2
    assert "data set" in capsys.readouterr().err
    assert not (tmp_path / "work" / "recipe.toml").exists()


def test_a_base_model_needs_documents(tmp_path, capsys):
    base = write_target(tmp_path / "base")
    about = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": None}))
    given = ["pair", "--target", str(base), "--work", str(tmp_path / "work"), "--yes"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("train: the target has no chat template, so it cannot write prompts: bring texts")
    assert not (tmp_path / "work" / "pair.json").exists()


def test_a_trial_tells_the_share_of_written_prompts_that_are_kept(tmp_path, monkeypatch):
    written = Written([UserPrompt("free", "", "a")] * 4, Counter({("free", SHORT): 12}), [])
    monkeypatch.setattr(stages, "trial_texts", lambda *_: ([], 2.0))
    monkeypatch.setattr(stages, "read_written", lambda *_: written)
    monkeypatch.setattr(stages, "trial_rates", lambda *_: Rates(2.0, 1.0, 1.0, 1.0))
    pair = stages._Pair(Options("demo", tmp_path), Deadline())
    pair.recipe = RECIPE
    (tmp_path / "trial").mkdir()
    monkeypatch.setattr(stages, "fresh", lambda folder: folder)
    assert pair._trial(RECIPE) == Rates(2.0, 1.0, 1.0, 1.0, kept=0.25)


def test_another_target_of_the_same_name_is_refused(tmp_path):
    """Also in a finished folder, as of a fine-tune that has the name of its base."""
    one, work = write_target(tmp_path / "one" / "target"), tmp_path / "work"
    weights = load_file(one / "model.safetensors")
    (work / "done").mkdir(parents=True)
    for name in STAGES:
        (work / "done" / name).touch()
    (work / "recipe.toml").write_text(toml_of(dataclasses.asdict(RECIPE)))
    stages._Pair(Options(str(one), work), Deadline()).claim()
    assert make_pair(Options(str(one), work)) == work / "export"
    other = tmp_path / "other" / "target"
    shutil.copytree(one, other)
    make_pair(Options(str(other), work))
    name = max(weights)
    save_file({**weights, name: weights[name] * 1.01}, other / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"was made with another recipe \(target_weights: \w+ there, \w+ here\)"
    ):
        make_pair(Options(str(other), work))


def test_a_target_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["pair", "--target", "nothing", "--work", str(tmp_path / "work")]) == 2
    assert "train: nothing is neither a folder nor a hub id" in capsys.readouterr().err


def test_a_folder_of_another_program_is_refused_and_stays(tmp_path, capsys):
    (tmp_path / "beginning").mkdir()
    (tmp_path / "beginning" / "mine.txt").write_text("mine")
    assert main(["pair", "--target", "demo", "--yes", "--work", str(tmp_path)]) == 2
    assert f"{tmp_path} is not empty, and no work folder of this command" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["beginning", "mine.txt"]


def test_given_prompts_that_are_too_few_are_refused_before_the_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "trial_texts", None)
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n' * 2)
    words = "--target", "demo", "--yes", "--work", str(tmp_path / "work"), "--prompts", str(prompts)
    assert main(["pair", *words, "--set", "writing=[]"]) == 2
    assert "2 prompts are left, and 512 are needed, twice heldout" in capsys.readouterr().err


def test_hours_on_a_cpu_are_not_spent_without_a_question(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "trial_texts", None)
    assert main(["pair", "--target", "demo", "--work", str(tmp_path / "work")]) == 2
    assert "there is no GPU, and this CPU would take about" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--total-minutes", "0"], "--total-minutes must be above 0, not 0.0"),
        (["--minutes", "-1"], "--minutes must be above 0, not -1.0"),
        (["--recipe", "nothing"], "no recipe nothing: name a TOML file or one of default-pair, smollm2-pair"),
        (["--set", "unknown=1"], "unknown key unknown; there are head, selector"),
        (["--set", "max_tokens=2000"], "do not fit the target's context of 2048"),
        (["--template-arguments", "[}"], "template_arguments is no JSON object"),
        (["--draft-head", "nothing"], "nothing is neither a folder nor a hub id"),
        (["--prompts", "none.jsonl"], "no file none.jsonl"),
        (["--weights", "1,2"], "2 weights for 1 sources; give one for each"),
    ],
)
def test_bad_input_is_one_error_and_no_folder(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.setattr(stages, "trial_texts", None)
    assert main(["pair", "--target", "demo", "--yes", "--work", str(tmp_path / "work"), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "work" / "pair.json").exists()


@pytest.mark.wide
def test_a_target_that_does_not_write_prompts_is_refused_after_a_trial(recipe, tmp_path, capsys):
    """The demo's target writes Python without an end."""
    work = tmp_path / "work"
    assert command("demo", recipe, work) == 2
    said = capsys.readouterr().err
    assert "the target does not write prompts" in said
    assert said.count("(does not end)") == 3
    assert not (work / "pair.json").exists()


@pytest.mark.wide
def test_training_starts_from_a_given_head_without_its_selector(lines, recipe, tmp_path, monkeypatch):
    def stop(self):
        raise OutOfTime("after the head")

    monkeypatch.setattr(stages._Pair, "selector_stage", stop)
    changes = ('head.head={start="checkpoint"}', "head.objective.anchors=1", "head.objective.chunk=15")
    changes = (*changes, "head.fit.steps=1", "head.fit.warmup=0")
    work = tmp_path / "work"
    with pytest.raises(OutOfTime, match="left: selector, calibrate, judge, export"):
        make_pair(Options(str(lines), work, "demo", recipe, changes, yes=True))
    given, trained = load_draft_head("demo"), load_draft_head(work / "head" / "draft_head")
    assert given.config.selected
    assert trained.config.selected is None
    assert trained.config.layers == given.config.layers
    before, after = (np.asarray(head.weights["fc"], np.float32) for head in (given, trained))
    assert np.abs(before - after).max() < 0.01  # a random head is not like it


@pytest.mark.wide
def test_a_full_disk_is_named_and_the_command_resumes(recipe, tmp_path, monkeypatch, capsys):
    """The disk is full after the first shard of answers, which the next run keeps."""
    work, write = tmp_path / "work", Writer.write

    def write_to_a_full_disk(self, *given):
        full = self.folder.name == "answers" and len(self.missing) < len(self.planned)
        with files_of_at_most(100) if full else contextlib.nullcontext():
            write(self, *given)

    given = "demo", recipe, work, "--set", "writing=[]"
    monkeypatch.setattr(Writer, "write", write_to_a_full_disk)
    assert command(*given) == 2
    assert re.search(r"train: .*answers/.*array_record cannot be written", capsys.readouterr().err)
    assert {path.name for path in (work / "done").iterdir()} == {"check", "prompts"}
    [shard] = (work / "answers").glob("*.array_record")
    before = shard.stat().st_mtime_ns
    monkeypatch.setattr(Writer, "write", write)
    monkeypatch.setattr(stages._Pair, "head_stage", lambda _: Deadline(0.0).check("before the head"))
    assert command(*given) == 0
    assert "left: head, selector, calibrate, judge, export" in capsys.readouterr().out
    assert shard.stat().st_mtime_ns == before
    assert len(Documents.open(work / "answers")) == 100 - RECIPE.heldout
