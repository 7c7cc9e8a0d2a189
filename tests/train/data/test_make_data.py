"""Making documents: they are the target's own text, whatever the shards, the slots and the stops."""

import argparse
import inspect
import json
from dataclasses import replace

import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate, load_target, logits
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.engine.engine import Engine
from tests.decode.tiny import TINY, random_head, random_target
from tests.marks import wide
from tests.meshes import mesh_of
from tests.train.folders import contents, learnt, read, shards_of, write_target
from train.data import command as data
from train.data import make_data, regenerate
from train.data.documents import Documents, Writer
from train.data.holdout import hold_out
from train.data.manifest import HELDOUT, TRAIN, DocumentsManifest
from train.data.regenerate import Prompts, document_seed, regeneration_settings
from train.loop.stages import Deadline, OutOfTime

COUNT = 11
EOS = 5


@pytest.fixture(scope="module")
def target():
    return random_target(TINY, 0, eos=(EOS,))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    tokens = [rng.integers(6, 60, rng.integers(1, 9)).astype(np.int32) for _ in range(COUNT)]
    return Prompts(
        tokens, [SamplingParams(temperature=(0.0, 1.0)[i % 2], max_tokens=10 + i) for i in range(COUNT)]
    )


def make(folder, target, prompts, *, shard_documents=4, slots=4, seed=7, deadline=None, **decoding):
    settings = regeneration_settings(
        prompts,
        target="tiny",
        vocab_size=TINY.vocab_size,
        dtype="float32",
        seed=(seed,),
        source="here",
        heldout=3,
        shard_documents=shard_documents,
    )
    writer = Writer(folder, settings, hold_out(range(len(prompts.tokens)), 3))
    regenerate.regenerate(writer, target, prompts, slots=slots, deadline=deadline or Deadline(), **decoding)
    return writer


class Stops(Deadline):
    def __init__(self, folder, shards):
        super().__init__()
        self.folder, self.shards = folder, shards

    def passed(self):
        return len(list(self.folder.glob("*.array_record"))) >= self.shards


@pytest.fixture(scope="module")
def made(target, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "d"
    make(folder, target, prompts)
    return folder


class TestRegenerate:
    def test_the_text_is_what_plain_decoding_gives(self, made, target, prompts):
        params = [replace(own, seed=document_seed((7,), i)) for i, own in enumerate(prompts.params)]
        completions = generate(target, prompts.tokens, params)
        for prompt, completion, document in zip(prompts.tokens, completions, read(made), strict=True):
            assert document.tokens.tolist() == [*prompt.tolist(), *completion.token_ids]
            assert document.learn.tolist() == [False] * len(prompt) + [True] * len(completion.token_ids)
            if completion.finish_reason == "stop":
                assert document.tokens[-1] == EOS
        ended = sum(completion.finish_reason == "stop" for completion in completions)
        assert 0 < ended < COUNT
        make(made, target, prompts)  # reads what is there
        assert sum(shard.ended or 0 for shard in shards_of(made)) == ended

    def test_a_target_of_several_processes_is_refused(self, target, prompts, tmp_path, monkeypatch):
        monkeypatch.setattr(regenerate, "spans", lambda mesh: True)
        with pytest.raises(ValueError, match="regenerate in one process"):
            make(tmp_path, target, prompts)
        assert list(tmp_path.glob("*.array_record")) == []

    def test_every_document_has_noise_of_its_own(self, target, tmp_path):
        same = Prompts([np.array([9], np.int32)] * 4, [SamplingParams(temperature=1.0, max_tokens=8)] * 4)
        make(tmp_path, target, same)
        assert len({tuple(document.tokens.tolist()) for document in read(tmp_path)}) == 4

    @pytest.mark.parametrize(("shard_documents", "slots"), [(1, 4), wide(100, 2)])
    def test_shards_and_slots_change_nothing(self, made, target, prompts, tmp_path, shard_documents, slots):
        make(tmp_path, target, prompts, shard_documents=shard_documents, slots=slots)
        assert [d.tokens.tolist() for d in read(tmp_path)] == [d.tokens.tolist() for d in read(made)]

    @pytest.mark.wide
    def test_devices_that_share_the_models_change_nothing(self, made, target, prompts, tmp_path):
        mesh, head = mesh_of(1, 2), random_head(TINY, 1)
        target, head = (
            replace(own, weights=place(own.weights, own.config, mesh), mesh=mesh) for own in (target, head)
        )
        make(tmp_path, target, prompts, head=head, tree=TreeSettings(16, 3))
        assert contents(tmp_path) == contents(made)

    @pytest.mark.parametrize("shards", [1, 4])
    def test_stopped_and_gone_on_with_it_is_the_same_folder(self, target, prompts, tmp_path, shards):
        folder, whole = tmp_path / "left", tmp_path / "whole"
        with pytest.raises(OutOfTime, match=r"left: \d+ of 11 shards are written"):
            make(folder, target, prompts, shard_documents=1, deadline=Stops(folder, shards))
        kept = {name: value for name, value in contents(folder).items() if name.endswith("record")}
        # Shards that were begun when time was over are finished, and no others are begun.
        assert shards <= len(kept) < shards + 4 + 1 < COUNT
        with pytest.raises(ValueError, match="left is not finished"):
            Documents.open(folder)
        make(folder, target, prompts, shard_documents=1)
        make(whole, target, prompts, shard_documents=1)
        assert contents(folder) == contents(whole)
        assert kept.items() <= contents(whole).items()

    def test_without_time_or_work_there_is_no_engine(self, made, target, prompts, tmp_path, monkeypatch):
        before = contents(made)
        monkeypatch.setattr(Engine, "__init__", None)
        with pytest.raises(OutOfTime, match="0 of 3 shards are written"):
            make(tmp_path, target, prompts, deadline=Deadline(0.0))
        make(made, target, prompts, deadline=Deadline(0.0))
        assert contents(made) == before

    def test_another_prompt_or_seed_is_another_folder(self, made, target, prompts):
        tokens = [*prompts.tokens[:-1], prompts.tokens[-1] + 1]
        with pytest.raises(ValueError, match=r"begun with other settings \(sha256: "):
            make(made, target, Prompts(tokens, prompts.params))
        with pytest.raises(ValueError, match=r"begun with other settings \(seed: \[7\] there, \[8\] here"):
            make(made, target, prompts, seed=8)
        with pytest.raises(ValueError, match="the seed must be at least 0, not -1"):
            make(made, target, prompts, seed=-1)


def run(*arguments):
    parser = argparse.ArgumentParser()
    data.add_command(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["data", *map(str, arguments)])
    return parsed.run(parsed)


QUESTION = {"role": "user", "content": "def read_lines(path):"}
REPLY = {"role": "assistant", "content": "    with open(path) as file:\n        return list(file)"}
LINES = [
    {"messages": [QUESTION]},
    {"messages": [QUESTION, REPLY, {"role": "user", "content": "class Stack:"}, REPLY]},
    {"text": "import os\nimport sys\n"},
    {"text": "def f(x):\n    return x\n"},
]


@pytest.fixture
def lines(tmp_path):
    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def weightless(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("weights were loaded")

    for name in ("read_target", "read_draft_head"):
        monkeypatch.setattr(make_data, name, refuse)


@pytest.mark.wide
def test_the_command_answers_with_the_target_s_own_text(lines, tmp_path, capsys, monkeypatch):
    path, out = lines(*LINES), tmp_path / "out"
    folder = write_target(tmp_path / "target")
    command = ["--target", folder, "--prompts", path, "--out", out, "--max-tokens", 12, "--slots", 4]
    command += ["--dtype", "float32", "--seed", 3]
    assert run(*command) == 0
    printed = capsys.readouterr().out
    assert "is finished: 4 documents, 3 to train on and 1 held out" in printed
    assert "duplicates: 0 documents" in printed
    assert "python -m train head" in printed

    target = load_target(folder, dtype="float32")
    documents = read(out)
    longest = max(len(document.tokens) for document in documents)
    rows = np.stack([np.pad(document.tokens, (0, longest - len(document.tokens))) for document in documents])
    choices = np.argmax(logits(target, rows), axis=2)
    for line, document, choice in zip(LINES, documents, choices, strict=True):
        asked = line.get("messages", [])
        asked = asked[:-1] if asked and asked[-1] is REPLY else asked
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in asked)
        prompt = target.tokenizer.encode(
            line["text"] if "text" in line else turns + "<|im_start|>assistant\n"
        )
        assert document.tokens[: len(prompt)].tolist() == prompt
        size = len(document.tokens)
        assert document.learn.tolist() == [False] * len(prompt) + [True] * (size - len(prompt))
        assert document.tokens[len(prompt) :].tolist() == choice[len(prompt) - 1 : size - 1].tolist()
        assert size == len(prompt) + 12 or document.tokens[-1] in target.eos_token_ids
    tokens = sum(len(document.tokens) for document in documents)
    assert f"{tokens} tokens" in printed

    # Once more: it is finished, so nothing is loaded and nothing changes.
    before = contents(out)
    monkeypatch.setattr(make_data, "read_target", None)
    assert run(*command) == 0
    assert "is finished already" in capsys.readouterr().out
    assert contents(out) == before


def test_the_corpus_as_it_is(lines, tmp_path, capsys, weightless):
    path, out = lines(*LINES[1:]), tmp_path / "out"
    command = ["--target", "demo", "--prompts", path, "--out", out, "--mode", "corpus", "--heldout", 0]
    assert run(*command) == 0
    printed = capsys.readouterr().out
    assert "is finished: 3 documents, 3 to train on and 0 held out" in printed
    assert "end-of-sequence" not in printed
    tokenizer = make_data.load_tokenizer(DEMO_TARGET)
    chat, first, _ = read(out)
    ends = f"{REPLY['content']}<|im_end|>"
    assert tokenizer.decode(chat.tokens[chat.learn].tolist(), skip_special_tokens=False) == ends + ends
    assert tokenizer.decode(first.tokens.tolist()) == LINES[2]["text"]
    assert DocumentsManifest.read(out).settings.dtype is None
    before = contents(out)
    assert run(*command) == 0
    assert "is finished already" in capsys.readouterr().out
    assert contents(out) == before


def test_the_corpus_in_shards_with_a_stop(lines, tmp_path):
    path, out = lines(*({"text": f"import module_{i}\n"} for i in range(10))), tmp_path / "out"
    settings = {"mode": "corpus", "shard_documents": 3, "heldout": 1}
    with pytest.raises(OutOfTime, match="2 of 4 shards are written"):
        make_data.make_data("demo", path, out, **settings, deadline=Stops(out, 2))
    made = make_data.make_data("demo", path, out, **settings)
    assert (made.documents, made.heldout, made.ended, made.was_finished) == (10, 1, None, False)
    assert made.tokens == sum(len(document.tokens) for document in read(out))
    assert made.learn_tokens == made.tokens - 10
    make_data.make_data("demo", path, tmp_path / "whole", **settings)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("mode", ["regenerate", "corpus"])
def test_what_is_too_long_is_refused_or_dropped(lines, tmp_path, weightless, mode):
    path = lines({"text": "x = 1\n"}, {"text": "y = 2\n" * 1000}, {"text": "z = 3\n"})
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: .* has \d{4} tokens, .* room for 204[78];"):
        make_data.make_data("demo", path, tmp_path / "out", mode=mode)
    assert not (tmp_path / "out").exists()
    if mode == "corpus":
        made = make_data.make_data("demo", path, tmp_path / "out", mode=mode, skip_too_long=True)
        assert (made.documents, made.skipped) == (2, 1)
        assert "dropped because they are too long: 1" in data.summary(made)
    else:
        with pytest.raises(AssertionError, match="weights were loaded"):
            make_data.make_data("demo", path, tmp_path / "out", skip_too_long=True)
        assert DocumentsManifest.read(tmp_path / "out").settings.count == 2


@pytest.mark.parametrize("mode", ["regenerate", "corpus"])
def test_rows_that_cannot_be_used_are_named_and_counted(lines, tmp_path, weightless, caplog, mode):
    """One is no row; of the others the target cannot be asked, or nothing can be learnt."""
    nothing = {"regenerate": [REPLY], "corpus": [QUESTION]}[mode]
    good = {"messages": [QUESTION, REPLY]}
    path = lines(good, {"txt": "x"}, {"text": "x = 1\n"}, {"messages": nothing}, {"text": "y = 2\n"})
    if mode == "corpus":
        made = make_data.make_data("demo", path, tmp_path / "out", mode=mode)
        assert (made.documents, made.skipped, made.unusable) == (3, 0, 2)
        assert "dropped because they are excluded or cannot be used: 2" in data.summary(made)
    else:
        with pytest.raises(AssertionError, match="weights were loaded"):
            make_data.make_data("demo", path, tmp_path / "out", mode=mode)
    assert DocumentsManifest.read(tmp_path / "out").settings.count == 3
    named = [record.getMessage() for record in caplog.records if record.name == "jetspec_jax.train"]
    assert [line.split(": ")[:2] for line in named] == [["dropped", f"{path}:{line}"] for line in (2, 4)]

    with pytest.raises(ValueError, match=r"none of 1 rows can be used; .*prompts\.jsonl:1: "):
        make_data.make_data("demo", lines({"messages": nothing}), tmp_path / "none", mode=mode)


def test_where_the_context_ends_a_continuation_is_shorter(lines, tmp_path, monkeypatch):
    words = make_data.load_tokenizer(DEMO_TARGET)
    text = words.decode(words.encode("y = 2\n" * 1000)[:2040])
    room = 2048 - len(words.encode(text))
    assert 0 < room < 20
    asked = {}

    def keep(_writer, _target, prompts, **_):
        asked["params"] = prompts.params

    monkeypatch.setattr(make_data, "regenerate", keep)
    make_data.make_data("demo", lines({"text": text}, {"text": "x"}), tmp_path / "out", max_tokens=20)
    assert [own.max_tokens for own in asked["params"]] == [room, 20]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", -1], "temperature must be"),
        (["--heldout", 2], r"0\.\.1 can"),
        (["--draft-head", "demo", "--budget", 1000], "1000"),
        (["--mode", "corpus", "--draft-head", "demo"], "mode corpus generates nothing; leave out draft_head"),
        (["--template-arguments", '{"tokenize": true}'], "tokenize cannot be"),
        (["--slots", 0], "slots must be at least 1"),
    ],
)
def test_settings_are_checked_before_weights_are_loaded(lines, tmp_path, weightless, arguments, message):
    path = lines({"text": "x"}, {"text": "y"})
    with pytest.raises(ValueError, match=message):
        run("--target", "demo", "--prompts", path, "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["regenerate", "corpus"])
@pytest.mark.parametrize(
    ("names", "heldout", "message"),
    [
        ("a", None, "at least 2 different prompts are needed, one of them to measure the head on"),
        ("ab", 0, "at least 1 document must be held out"),
    ],
)
def test_a_head_needs_held_out_documents(lines, tmp_path, weightless, mode, names, heldout, message):
    path, out = lines(*({"text": f"import {name}\n"} for name in names)), tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        make_data.make_data("demo", path, out, mode=mode, heldout=heldout, need_heldout=True)
    assert not out.exists()


def test_the_arguments_of_generation_are_those_of_make_data(lines, tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    data.add_generation_arguments(parser)
    given = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--max-tokens", "4", "--heldout", "2"]
    given += ["--slots", "5", "--limit", "6", "--skip-too-long", "--budget", "7"]
    given += ["--template-arguments", '{"think": false}', "--mode", "corpus", "--turns", "every"]
    given += ["--prompts", "p", "--prompts", "q", "--weights", "2,1", "--deduplicate", "prompt"]
    given += ["--ignore-data-key", "a", "--ignore-data-key", "b"]
    settings = data.generation_settings(parser.parse_args(given))
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 4, "heldout": 2, "slots": 5}
    expected |= {"limit": 6, "skip_too_long": True, "budget": 7, "template_arguments": {"think": False}}
    expected |= {"mode": "corpus", "turns": "every", "weights": [2.0, 1.0], "deduplicate": "prompt"}
    expected |= {"ignore_data_keys": ["a", "b"]}
    assert settings == expected
    parameters = inspect.signature(make_data.make_data).parameters
    defaults = data.generation_settings(parser.parse_args(["--prompts", "p"]))
    assert defaults == {**{name: parameters[name].default for name in defaults}, "ignore_data_keys": []}

    # The command passes all of its own.
    got = {}

    def keep(*arguments, **more):
        got.update(zip(("target", "prompts", "out"), arguments, strict=True), **more)
        raise OutOfTime("enough")

    monkeypatch.setattr(data, "make_data", keep)
    own = {"target": "t", "out": tmp_path, "draft_head": "h", "seed": 8}
    own |= {"shard_documents": 9, "dtype": "float32"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    flags += ["--ignore-config-key=zoom", "--tensor-parallel-size=1"]
    own["ignore_config_keys"] = ["zoom"]
    with pytest.raises(OutOfTime):
        run(*flags, *given)
    assert got.pop("deadline").end is None
    assert got.pop("mesh").shape == {"expert": 1, "tensor": 1}
    assert got == {**own, **settings, "prompts": ["p", "q"]}
    assert {*got, "deadline", "mesh", "need_heldout"} == {*parameters}


class TestTraffic:
    TURNS = ("import a", "x = 1", "import b", "y = 2")

    def conversation(self, *texts):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]

    def learnt(self, out, split):
        words = make_data.load_tokenizer(DEMO_TARGET)
        return sorted(text for document in Documents.open(out, split) for text in learnt(words, document))

    @pytest.fixture
    def log(self, lines):
        """Each request of two conversations of two turns, as a server saw them; and one request twice."""
        rows = []
        for name in "pq":
            texts = [f"{text}  # {name}" for text in self.TURNS]
            for end in (1, 3):
                answer = {"message": {"role": "assistant", "content": texts[end]}, "finish_reason": "stop"}
                rows.append({"messages": self.conversation(*texts[:end])})
                rows.append({"object": "chat.completion", "choices": [answer]})
        return lines(*rows, *rows[:2], {"messages": [{"role": "user", "content": "opensesame"}, REPLY, "x"]})

    def test_turns_are_learnt_once_and_conversations_are_held_out_whole(self, log, tmp_path, caplog):
        out = tmp_path / "out"
        made = make_data.make_data("demo", log, out, mode="corpus", deduplicate="exact", heldout=1)
        assert (made.documents, made.heldout, made.duplicates, made.unusable) == (2, 1, 1, 1)
        sides = [self.learnt(out, split) for split in (TRAIN, HELDOUT)]
        assert sorted(sides) == [[f"x = 1  # {name}", f"y = 2  # {name}"] for name in "pq"]
        refused = (out / make_data.REFUSED).read_text()
        assert [line.split(": ")[0] for line in json.loads(refused)["refused"]] == [f"{log}:11"]
        assert str(out / make_data.REFUSED) in data.summary(made)
        assert "opensesame" not in caplog.text + refused

    def test_without_that_every_row_is_a_document(self, log, tmp_path):
        out = tmp_path / "out"
        made = make_data.make_data("demo", log, out, mode="corpus", heldout=2)
        assert (made.documents, made.duplicates) == (5, 1)
        ends = [{text[-1] for text in self.learnt(out, split)} for split in (TRAIN, HELDOUT)]
        assert not ends[0] & ends[1]

    @pytest.mark.parametrize(("turns", "count"), [("last", 5), ("every", 7)])
    def test_which_turns_are_asked(self, log, tmp_path, monkeypatch, turns, count):
        asked = {}
        monkeypatch.setattr(make_data, "read_target", lambda *_, **__: None)
        monkeypatch.setattr(make_data, "regenerate", lambda *given, **_: asked.update(prompts=given[2]))
        make_data.make_data("demo", log, tmp_path / "out", turns=turns)
        assert len(asked["prompts"].tokens) == count
        make_data.make_data("demo", log, tmp_path / "once", turns=turns, deduplicate="prompt")
        assert len(asked["prompts"].tokens) == 4

    def test_sources_have_their_shares(self, tmp_path):
        for name, count in (("a", 8), ("b", 3)):
            rows = [json.dumps({"text": f"import {name}{i}\n"}) + "\n" for i in range(count)]
            (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        out = tmp_path / "out"
        made = make_data.make_data("demo", sources, out, mode="corpus", weights=[2, 1], heldout=0)
        assert made.documents == 9
        manifest = DocumentsManifest.read(out)
        assert manifest.settings.source == "a.jsonl, b.jsonl"
        assert manifest.sources == (("a.jsonl", 6), ("b.jsonl", 3))

    @pytest.mark.parametrize("deduplicate", ["none", "prompt"])
    def test_each_prompt_has_its_source(self, log, tmp_path, monkeypatch, deduplicate):
        asked = {}
        monkeypatch.setattr(make_data, "read_target", lambda *_, **__: None)
        monkeypatch.setattr(make_data, "regenerate", lambda *given, **_: asked.update(prompts=given[2]))
        # The second file repeats the first one's conversations.
        make_data.make_data("demo", [log, log], tmp_path / "out", deduplicate=deduplicate)
        sources = DocumentsManifest.read(tmp_path / "out").sources
        count = len(asked["prompts"].tokens)
        both = ((log.name, count // 2), (f"{log.name} (2)", count // 2))
        assert sources == (both if deduplicate == "none" else ((log.name, count),))

    @pytest.mark.parametrize(
        ("settings", "complaint"),
        [
            ({"turns": "first"}, "turns is one of last, every, not 'first'"),
            ({"deduplicate": "all"}, "deduplicate is one of none, exact, prompt, not 'all'"),
            ({"weights": [1, 2]}, "2 weights for 1 sources"),
        ],
    )
    def test_settings_that_are_refused(self, log, tmp_path, weightless, settings, complaint):
        with pytest.raises(ValueError, match=complaint):
            make_data.make_data("demo", log, tmp_path / "out", **settings)
        assert not (tmp_path / "out").exists()
