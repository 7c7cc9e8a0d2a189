"""Prompts of the benchmarks, as they are read and as token ids."""

import argparse
import json

import pytest

from bench.common.pair import add_pair_arguments, read_prompts
from bench.common.prompt_sets import Part
from bench.common.prompts import Prompt, encode_prompts, load_prompts, template_arguments
from bench.common.report import settings_of
from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_PROMPTS, DEMO_TARGET
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

    @pytest.mark.parametrize("line", ["{", "[]", "{}", '{"text": ""}', '{"text": 3}', ""])
    def test_a_bad_line_is_named(self, tmp_path, line):
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"text": "x"}\n{"text": "y"}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"prompts\.jsonl:3: "):
            load_prompts(str(path))

    def test_too_few_prompts(self, tmp_path):
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"text": "x"}\n')
        with pytest.raises(ValueError, match="holds 1 prompts, asked for 2"):
            load_prompts(str(path), Part(count=2))

    def test_the_first_are_left_out_and_the_others_keep_their_ids(self, tmp_path):
        path = tmp_path / "mine.jsonl"
        path.write_text("".join(f'{{"text": "{letter}"}}\n' for letter in "abcd"))
        taken = load_prompts(str(path), Part(skip=1, count=2))
        assert [(p.id, p.entry.value) for p in taken] == [("mine.jsonl:2", "b"), ("mine.jsonl:3", "c")]
        assert [p.id for p in load_prompts(str(path), Part(skip=3))] == ["mine.jsonl:4"]
        with pytest.raises(ValueError, match="holds 4 prompts, asked for 3 behind the first 2"):
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


class TestEncoding:
    @pytest.fixture
    def target(self, monkeypatch):
        """A target of which nothing is there but the tokenizer."""
        made = Target.__new__(Target)
        object.__setattr__(made, "tokenizer", load_tokenizer(DEMO_TARGET))
        return made

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
