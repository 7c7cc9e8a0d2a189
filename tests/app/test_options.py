"""The table of options: what Python can, the command can; and the prompts that a command line gives."""

import argparse
import inspect
import io
import json

import pytest

from jetspec_jax import LLM, SamplingParams, StructuredOutputsParams
from jetspec_jax.cli import command, settings
from jetspec_jax.cli.options import ALGORITHM, CHAT, MODELS, SAMPLING, STRUCTURED, Group, Option
from jetspec_jax.cli.prompts import GivenPrompt, encode, read_prompts
from jetspec_jax.tree import get_algorithm
from tests.decode.tiny import TINY, random_target, word_tokenizer


def parse(*words):
    parser = argparse.ArgumentParser()
    settings.add_decoding_options(parser)
    return parser.parse_args(words)


def prompts_of(*words):
    return read_prompts(parse(*words))


class TestTable:
    @pytest.mark.parametrize("group", [SAMPLING, MODELS], ids=lambda group: group.title)
    def test_every_argument_of_python_has_an_option(self, group):
        known = set(inspect.signature(group.python).parameters)
        no_text = {"mesh", "proposer", "proposer_weights", "structured_outputs", "unknown"}
        other_names = {"model", "max_model_len", "max_num_seqs"}
        assert {option.field for option in group.options} == known - no_text - other_names

    def test_options_of_an_algorithm_are_its_arguments(self):
        known = set(inspect.signature(get_algorithm).parameters)
        assert {option.field for option in ALGORITHM.options} == known - {"name"}

    def test_forms_of_outputs_have_options(self, tmp_path):
        known = set(inspect.signature(StructuredOutputsParams).parameters)
        assert {option.field for option in STRUCTURED.options} == known
        schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
        schema.write_text('{"type": "array"}')
        grammar.write_text('start: "é"')
        for words, form in (
            (["--json-schema", str(schema)], {"json": {"type": "array"}}),
            (["--regex", "a+"], {"regex": "a+"}),
            (["--choice", "a", "--choice", "b"], {"choice": ["a", "b"]}),
            (["--grammar", str(grammar)], {"grammar": 'start: "é"'}),
            (["--json-object"], {"json_object": True}),
            (
                ["--json-object", "--disable-any-whitespace"],
                {"json_object": True, "disable_any_whitespace": True},
            ),
            (
                ["--json-schema", str(schema), "--no-disable-additional-properties"],
                {"json": {"type": "array"}, "disable_additional_properties": False},
            ),
        ):
            params = settings.sampling_params(parse("--seed", "3", *words))
            assert params == SamplingParams(seed=3, structured_outputs=StructuredOutputsParams(**form))
        schema.write_text("[")
        with pytest.raises(ValueError, match=r"schema\.json is not valid JSON"):
            settings.sampling_params(parse("--json-schema", str(schema)))
        with pytest.raises(ValueError, match=r"exactly one of .* given: regex and json_object"):
            settings.sampling_params(parse("--regex", "a", "--json-object"))

    def test_what_is_not_given_is_python_s_default(self):
        assert settings.sampling_params(parse("--seed", "3")) == SamplingParams(seed=3)
        assert MODELS.given(parse()) == {}

    def test_every_sampling_option_arrives(self):
        params = settings.sampling_params(
            parse(
                *("--temperature", "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1", "--seed", "7"),
                *("--max-tokens", "9", "--stop", "a", "--stop", "b"),
                *("--stop-token-ids", "1, 2", "--ignore-eos", "-n", "3"),
                *("--include-stop-str-in-output", "--no-skip-special-tokens"),
                *("--presence-penalty", "0.5", "--frequency-penalty", "-1", "--repetition-penalty", "1.2"),
                *(
                    "--min-tokens",
                    "4",
                    "--logit-bias",
                    "5=-1.5,7=2",
                    "--bad-words",
                    "c",
                    "--bad-words",
                    "d,e",
                ),
                *("--allowed-token-ids", "5,6,7", "--logprobs", "3", "--prompt-logprobs", "0"),
            )
        )
        assert params == SamplingParams(
            temperature=0.5,
            top_k=4,
            top_p=0.9,
            min_p=0.1,
            seed=7,
            max_tokens=9,
            stop=("a", "b"),
            stop_token_ids=(1, 2),
            ignore_eos=True,
            n=3,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            presence_penalty=0.5,
            frequency_penalty=-1,
            repetition_penalty=1.2,
            min_tokens=4,
            logit_bias={5: -1.5, 7: 2},
            bad_words=("c", "d,e"),
            allowed_token_ids=(5, 6, 7),
            logprobs=3,
            prompt_logprobs=0,
        )

    @pytest.mark.parametrize("text", ["", "5", "5=", "a=1", "5=1;6=2", "5=1,", "5=1=2"])
    def test_biases_that_are_none(self, text, capsys):
        with pytest.raises(SystemExit):
            parse("--logit-bias", text)
        assert "expected biases as in 5=-1.5,7=2" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["5=1,5=2", "5=1,005=1"])
    def test_biases_of_one_token(self, text, capsys):
        with pytest.raises(SystemExit):
            parse("--logit-bias", text)
        assert f"expected each token once, not '{text}'" in capsys.readouterr().err

    def test_none_is_the_word_for_no_limit(self):
        assert settings.sampling_params(parse("--max-tokens", "none")).max_tokens is None

    def test_options_of_chats_are_those_of_the_call(self):
        asked = set(inspect.signature(LLM.chat).parameters)
        others = {"self", "messages", "sampling_params", "budget", "use_tqdm", "unknown"}
        assert {option.field for option in CHAT.options} == asked - others
        given = CHAT.given(parse("--chat-template-kwargs", '{"a": [1]}', "--no-add-generation-prompt"))
        assert given == {"chat_template_kwargs": {"a": [1]}, "add_generation_prompt": False}
        assert CHAT.given(parse("--continue-final-message")) == {"continue_final_message": True}
        assert CHAT.given(parse("--chat")) == {}

    def test_every_model_option_arrives(self, monkeypatch):
        def llm(**given):
            seen.update(given)
            raise FileNotFoundError("t")

        seen = {}
        monkeypatch.setattr(settings, "LLM", llm)
        words = {
            "target": "t",
            "draft_head": "h",
            "budget": 5,
            "width": 6,
            "candidates": 11,
            "depth": 7,
            "algorithm": "entropy",
            "dtype": "float32",
            "capacity": 8,
            "max_slots": 9,
            "implementation": "xla",
            "ignore_config_keys": ["k"],
            "chat_template": "own.jinja",
            "mxfp4": "packed",
            "fp8_activations": True,
            "compilation_cache": "off",
            "tensor_parallel_size": 2,
            "expert_parallel_size": 3,
            "data_parallel_size": 4,
        }
        names = {option.field: option.name for option in MODELS.options}
        line = []
        for field, value in words.items():
            word = {True: "yes"}.get(value) if isinstance(value, bool) else value
            line += [names[field], str(word[0] if isinstance(word, list) else word)]
        with pytest.raises(FileNotFoundError):
            settings.load_llm(parse(*line))
        assert seen == {**words, "algorithm": get_algorithm("entropy")}

    def test_an_answer_is_yes_or_no(self, capsys):
        assert MODELS.given(parse("--fp8-activations", "no")) == {"fp8_activations": False}
        with pytest.raises(SystemExit):
            parse("--fp8-activations", "true")
        assert "expected yes or no, not 'true'" in capsys.readouterr().err

    def test_a_command_has_no_more_slots_than_completions(self, monkeypatch):
        seen = []

        def llm(**given):
            seen.append(given["max_slots"])
            raise FileNotFoundError

        monkeypatch.setattr(settings, "LLM", llm)
        for words, completions in (((), 1), ((), 3), ((), 100), (("--max-num-seqs", "5"), 3)):
            with pytest.raises(FileNotFoundError):
                settings.load_llm(parse(*words), completions)
        assert seen == [1, 3, 8, 5]

    def test_a_flag_that_is_on_can_be_switched_off(self):
        def python(*, kept: bool = True, added: bool = False):
            return kept, added

        parser = argparse.ArgumentParser()
        group = Group("flags", python, (Option("kept", "", flag="--no-kept"), Option("added", "")))
        group.add(parser)
        assert python(**group.given(parser.parse_args([]))) == (True, False)
        assert python(**group.given(parser.parse_args(["--no-kept", "--added"]))) == (False, True)


class TestPrompts:
    def test_files_hold_one_prompt_or_one_a_line(self, tmp_path):
        text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
        text.write_text("one\ntwo\n")
        given = [
            "words",
            {"prompt": "p"},
            {"text": "t"},
            {"prompt_token_ids": [1, 2]},
            {"messages": [{"role": "user"}]},
        ]
        lines.write_text("\n\n".join(map(json.dumps, given)))
        found = prompts_of("--prompt-file", str(text), "--prompt-file", str(lines))
        assert [(own.text, own.token_ids, own.messages) for own in found] == [
            ("one\ntwo\n", None, None),
            ("words", None, None),
            ("p", None, None),
            ("t", None, None),
            (None, [1, 2], None),
            (None, None, [{"role": "user"}]),
        ]
        assert [own.name for own in found[:3]] == [str(text), f"{lines}:1", f"{lines}:3"]

    def test_a_byte_order_mark_is_no_part_of_a_text(self, tmp_path, monkeypatch):
        for name, content in (("a.txt", "one"), ("b.jsonl", '"\ufefftwo"\n"three"'), ("c.txt", "\ufefffour")):
            (tmp_path / name).write_text("\ufeff" + content, encoding="utf-8")
        names = ("a.txt", "b.jsonl", "c.txt")
        found = prompts_of(*(f"--prompt-file={tmp_path / name}" for name in names))
        assert [own.text for own in found] == ["one", "\ufefftwo", "three", "\ufefffour"]
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufefffive".encode())))
        assert [own.text for own in prompts_of()] == ["five"]

    def test_a_byte_order_mark_of_a_form(self, tmp_path):
        schema, grammar = tmp_path / "schema", tmp_path / "grammar"
        schema.write_text('\ufeff{"type": "object"}', encoding="utf-8")
        grammar.write_text('\ufeffstart: "a"', encoding="utf-8")
        params = settings.sampling_params(parse("--json-schema", str(schema)))
        assert params.structured_outputs.json == '{"type": "object"}'
        params = settings.sampling_params(parse("--grammar", str(grammar)))
        assert params.structured_outputs.grammar == 'start: "a"'

    def test_token_ids(self):
        assert prompts_of("--token-ids", "3,1, 2") == [GivenPrompt("prompt", token_ids=[3, 1, 2])]

    def test_a_chat_is_what_the_user_says(self, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("hé".encode())))
        [prompt] = prompts_of("--chat")
        assert prompt.messages == [{"role": "user", "content": "hé"}]

    def test_conversations_are_read_as_python_reads_them(self):
        tokenizer = word_tokenizer(TINY.vocab_size)
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}z{% endfor %}"
        llm = LLM(random_target(TINY, 0, tokenizer=tokenizer))

        def encoded(part, *words, role="user"):
            messages = [{"role": role, "content": [part]}]
            return encode(llm, GivenPrompt("p.jsonl:1", messages=messages), parse(*words)).ids.tolist()

        text = {"type": "text", "text": "ab"}
        assert encoded(text) == encoded(text, "--no-add-generation-prompt") == [0, 1, 25]
        assert encoded(text, "--continue-final-message", role="assistant") == [0, 1]
        with pytest.raises(ValueError, match=r"^p\.jsonl:1: continue_final_message needs .* not 'user'"):
            encoded(text, "--continue-final-message")
        with pytest.raises(ValueError, match=r"^p\.jsonl:1: content\[0\] of .* of type 'image_url'"):
            encoded({"type": "image_url"})

    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            (["text", "--token-ids", "1"], "not PROMPT and --token-ids"),
            (["--token-ids", "1", "--chat"], "--chat needs a text"),
            (["text", "--chat-template-kwargs", "{}"], "give --chat"),
        ],
    )
    def test_what_does_not_go_together(self, words, complaint):
        with pytest.raises(ValueError, match=complaint):
            prompts_of(*words)

    @pytest.mark.parametrize(
        "line",
        [
            "7",
            '{"prompt": 1}',
            '{"prompt": "a", "n": 2}',
            "{",
            '{"messages": []}',
        ],
    )
    def test_a_line_that_is_no_prompt(self, tmp_path, line):
        path = tmp_path / "p.jsonl"
        path.write_text(f'"fine"\n{line}\n')
        with pytest.raises(ValueError, match=f"{path}:2"):
            prompts_of("--prompt-file", str(path))

    def test_a_file_that_is_no_text(self, tmp_path):
        (tmp_path / "p").write_bytes(b"\xff")
        with pytest.raises(ValueError, match="p is no UTF-8 text"):
            prompts_of("--prompt-file", str(tmp_path / "p"))


class TestCommandLine:
    @pytest.mark.parametrize(
        "words",
        [["generate", "--token-ids", "1;2"], ["generate", "--chat-template-kwargs", "[]"], ["frob"]],
    )
    def test_a_wrong_one_is_one_sentence(self, capsys, words):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("jetspec-jax")
        assert error.count("\n") == 1

    @pytest.mark.parametrize("shell", ["bash", "zsh"])
    def test_completion_knows_options_words_and_files(self, capsys, shell):
        with pytest.raises(SystemExit) as ended:
            command.main(["--print-completion", shell])
        script = capsys.readouterr().out
        assert ended.value.code == 0
        for word in ("generate", "--stop-token-ids", "top2gap_fanout", "bfloat16"):
            assert word in script

    def test_completion_for_a_shell_that_nobody_knows(self, capsys):
        assert command.main(["--print-completion", "dos"]) == 2
        assert "completion is for bash, zsh" in capsys.readouterr().err
