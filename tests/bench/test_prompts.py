"""Prompts of the benchmarks, as they are read and as token ids."""

import argparse
import json

import pytest

from bench.common import workload
from bench.common.pair import add_pair_arguments, read_prompts
from bench.common.prompts import Prompt, encode_prompts, load_prompts, template_arguments
from bench.common.report import settings_of
from bench.common.workload import make_workloads
from jetspec_jax import Completion
from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_PROMPTS, DEMO_TARGET
from tests.bench.conftest import text_prompt
from tests.decode.tiny import TINY, random_target
from train.data.prompt_sets import Part
from train.data.prompts import Entry


class TestFiles:
    def test_the_demos_own(self):
        prompts = load_prompts("demo", Part(count=3))
        lines = DEMO_PROMPTS.read_text(encoding="utf-8").splitlines()[:3]
        assert [p.id for p in prompts] == ["demo:1", "demo:2", "demo:3"]
        assert [p.entry.value for p in prompts] == [json.loads(line)["text"] for line in lines]

    def test_a_file_without_its_folder(self, tmp_path):
        path = tmp_path / "mine.jsonl"
        message = {"role": "user", "content": "hello"}
        path.write_text(json.dumps({"messages": [message]}) + '\n{"prompt": "x"}\n')
        first, second = load_prompts(str(path))
        assert (first.id, first.entry.value) == ("mine.jsonl:1", [message])
        assert (second.id, second.entry.kind, second.entry.value) == ("mine.jsonl:2", "prompt", "x")

    def test_the_first_are_left_out_and_the_others_keep_their_ids(self, tmp_path):
        path = tmp_path / "mine.jsonl"
        path.write_text("".join(f'{{"text": "{letter}"}}\n' for letter in "abcd"))
        taken = load_prompts(str(path), Part(skip=1, count=2))
        assert [(p.id, p.entry.value) for p in taken] == [("mine.jsonl:2", "b"), ("mine.jsonl:3", "c")]
        assert [p.id for p in load_prompts(str(path), Part(skip=3))] == ["mine.jsonl:4"]
        with pytest.raises(ValueError, match="holds 4 prompts, asked for 5"):
            load_prompts(str(path), Part(count=5))
        with pytest.raises(ValueError, match="holds 4 prompts, asked for 3 after the first 2"):
            load_prompts(str(path), Part(skip=2, count=3))
        with pytest.raises(ValueError, match="holds 4 prompts, asked to skip 4"):
            load_prompts(str(path), Part(skip=4, count=1, fewer=True))

    def test_a_set_may_hold_fewer_than_the_usual_number_and_not_fewer_than_asked_for(self, tmp_path):
        path = tmp_path / "mine.jsonl"
        path.write_text('{"text": "x"}\n' * 3)
        parser = argparse.ArgumentParser()
        add_pair_arguments(parser, prompts=8, max_tokens=4)
        for words, count in ([], 3), (["--skip-prompts", "1"], 2), (["--num-prompts", "2"], 2):
            arguments = parser.parse_args(["--prompts", str(path), *words])
            assert len(read_prompts(arguments)) == arguments.num_prompts == count
            assert settings_of(arguments)["num_prompts"] == count
        assert len(read_prompts(parser.parse_args([]))) == 8
        with pytest.raises(ValueError, match="holds 3 prompts, asked for 8"):
            read_prompts(parser.parse_args(["--prompts", str(path), "--num-prompts", "8"]))


THINKING = "{% if enable_thinking %}<think>{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def target():
    return random_target(TINY, 0, tokenizer=load_tokenizer(DEMO_TARGET))


class TestEncoding:
    def test_the_form_of_the_chat_template(self, target):
        chat = Prompt("a", Entry("a", "messages", [{"role": "user", "content": "hi"}]))
        text = Prompt("b", Entry("b", "text", "import os"))
        [asked, continued] = encode_prompts(target, [chat, text])
        expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert asked == target.tokenizer.encode(expected, add_special_tokens=False)
        assert continued == target.tokenizer.encode("import os")

    def test_contents_one_below_the_other_without_a_template(self, target):
        target.tokenizer.chat_template = None
        messages = [{"role": "system", "content": "Python."}, {"role": "user", "content": "hi"}]
        [ids] = encode_prompts(target, [Prompt("a", Entry("a", "messages", messages))])
        assert ids == target.tokenizer.encode("Python.\n\nhi")

    @pytest.mark.parametrize("thinking", [None, False, True])
    def test_thinking_is_said_to_templates_that_know_it(self, target, thinking):
        target.tokenizer.chat_template = THINKING
        arguments = template_arguments(target, thinking)
        assert arguments == {"enable_thinking": bool(thinking)}
        [ids] = encode_prompts(
            target, [Prompt("a", Entry("a", "messages", [{"role": "user", "content": "hi"}]))], arguments
        )
        assert target.tokenizer.decode(ids) == ("<think>hi" if thinking else "hi")

    def test_and_to_no_others(self, target):
        assert template_arguments(target, None) == {}
        with pytest.raises(ValueError, match="knows no enable_thinking"):
            template_arguments(target, False)


def make(target, prompts, task=None):
    arguments = argparse.Namespace(max_tokens=4, task=task, enable_thinking=None, implementation="xla")
    return make_workloads(arguments, target, prompts, [0.0])[0.0]


class TestWorkload:
    def test_a_later_turn_follows_the_targets_own_answer(self, target, monkeypatch):
        asked = []

        def generate(own, ids, params, **settings):
            asked.append((ids, params, settings))
            return [Completion("    pass", [1], "stop", [1], [1])] * len(ids)

        monkeypatch.setattr(workload, "generate", generate)
        monkeypatch.setattr(workload, "check_request", lambda *_: None)
        user = {"role": "user", "content": "x ="}
        prompts = [
            text_prompt("set:1", "import", task="code"),
            Prompt("set:2", Entry("set:2", "messages", [user]), "chat", ("y",)),
        ]
        work = make(target, prompts, task="set")
        assert [p.id for p in work.prompts] == ["set:1", "set:2", "set:2, a turn later"]
        assert [params.seed for params in work.params] == [0, 1, 2]
        assert [hints["task"] for hints in work.routing] == ["code", "chat", "chat"]
        # Only the conversation that goes on is answered, with its own seed.
        settings = {"max_slots": 1, "implementation": "xla"}
        [asked_prompts, *others] = asked[0]
        assert [(p.ids.tolist(), p.continues) for p in asked_prompts] == [(work.ids[1], False)]
        assert others == [[work.params[1]], settings]
        turns = "user\nx =", "assistant\n    pass", "user\ny"
        text = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
        assert work.ids[2] == target.tokenizer.encode(text, add_special_tokens=False)

    def test_a_prompt_beyond_the_context_is_named(self, pair):
        with pytest.raises(ValueError, match=r"prompt mine:7: the prompt is too long: "):
            make(pair.target, [text_prompt("mine:7", "x" * 400)])
