"""How all command lines are read: one spelling of options, no abbreviations, the nearest option named."""

import argparse
import ast
import re
from pathlib import Path

import pytest

from bench.__main__ import main as bench
from convert.command import _parser as convert_parser
from convert.command import main as convert
from jetspec_jax.cli import command
from jetspec_jax.cli.options import MODELS
from jetspec_jax.cli.parser import _ARGUMENT, _as_option
from jetspec_jax.vllm_names import ENGINE, SERVE
from train.command import main as train

ROOT = Path(__file__).parents[2]
FORMERLY = [(former, option) for option in MODELS.options for former in option.former_names]


def refused(capsys, call, *words):
    """The one line that a program says of a command line."""
    with pytest.raises(SystemExit) as ended:
        call(list(words))
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    return err


def help_of(capsys, call, *words):
    with pytest.raises(SystemExit):
        call([*words, "--help"])
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def parser():
    return command._parser()


class TestUnknownOptions:
    @pytest.mark.parametrize(
        ("words", "unknown", "nearest"),
        [
            ("generate --modle x", "--modle", "--model"),
            ("generate --temp=0.5 x", "--temp", "--temperature"),  # no abbreviation
            ("serve --max-num-seq 4", "--max-num-seq", "--max-num-seqs"),
            ("tree x --max-slot 3", "--max-slot", "--max-num-seqs"),  # a former name is near
            ("generate --n 2 x", "--n", "-n"),
            ("generate -budget 2 x", "-budget", "--budget"),
        ],
    )
    def test_the_nearest_is_named(self, capsys, words, unknown, nearest):
        said = refused(capsys, command.main, *words.split())
        assert f"unknown option {unknown}; the nearest is {nearest}; see jetspec-jax" in said

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (train, "head --modle x"),
            (bench, "decode --modle x"),
            (convert, "--modle x"),
        ],
    )
    def test_before_what_is_missing_in_all_programs(self, capsys, call, words):
        assert "unknown option --modle; the nearest is --model" in refused(capsys, call, *words.split())

    def test_nothing_is_near(self, capsys):
        said = refused(capsys, command.main, "generate", "--zzz", "1", "x")
        assert said == "jetspec-jax generate: unknown option --zzz; see jetspec-jax generate --help\n"
        for name in ("--colour", "--no", "--greedy"):
            said = refused(capsys, command.main, "generate", name, "1", "x")
            assert f"unknown option {name}; see" in said
        assert "unknown option -q;" in refused(capsys, command.main, "generate", "-q", "x")

    @pytest.mark.parametrize(
        ("words", "instead"),
        [
            ("--gpu-memory-utilization 0.9", "set XLA_PYTHON_CLIENT_MEM_FRACTION in the environment"),
            (
                "--speculative-config {}",
                "say --draft-head …, --budget …, --width …, --depth … and --algorithm …",
            ),
            ("--seed 1", "each request has its own: SamplingParams(seed=…), or seed in a body"),
            ("--enable-auto-tool-choice", "leave it out: --tool-call-parser … is enough"),
            ("-tp 2", "the nearest is --tensor-parallel-size; see"),
        ],
    )
    def test_of_vllm_s_options_the_error_says_what_there_is_instead(self, capsys, words, instead):
        said = refused(capsys, command.main, "serve", *words.split())
        assert f"unknown option {words.split()[0]}; {instead}" in said

    @pytest.mark.parametrize("answer", [*ENGINE.values(), *SERVE.values()])
    def test_options_that_answers_name_exist(self, parser, answer):
        [commands] = (own for own in parser._actions if isinstance(own, argparse._SubParsersAction))
        named = re.findall(r"--[\w-]+", _ARGUMENT.sub(_as_option, answer))
        assert {*named} <= {*commands.choices["serve"]._option_string_actions}

    def test_texts_and_numbers_are_no_options(self, parser):
        words = ["generate", "--frequency-penalty", "-1", "-n3", "--stop", "- a", "-- in Lua"]
        given = parser.parse_args(words)
        assert (given.frequency_penalty, given.n, given.stop) == (-1, 3, ["- a"])
        assert given.prompt == "-- in Lua"
        assert parser.parse_args(["generate", "--", "--zzz"]).prompt == "--zzz"


def test_a_program_alone_shows_its_commands(capsys):
    for call, names in (
        (command.main, "generate chat tree info serve"),
        (train, "head export"),
        (bench, "round"),
    ):
        with pytest.raises(SystemExit) as ended:
            call([])
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        for name in names.split():
            assert f"\n    {name} " in err
    command_line = "github.com/jetspec/jetspec_jax/blob/main/docs/command-line.md"
    assert command_line in help_of(capsys, command.main)
    assert "jetspec-jax generate" in help_of(capsys, command.main)


def test_defaults_are_shown_as_they_are_typed(capsys):
    for name in ("generate", "chat", "tree", "serve"):
        shown = " ".join(help_of(capsys, command.main, name).split())
        assert "(default: (" not in shown
        assert "(default: [" not in shown
    assert "that web pages may use; repeatable (default: *)" in shown


class TestNames:
    @pytest.mark.parametrize("former", [former for former, _ in FORMERLY])
    @pytest.mark.parametrize("name", ["generate", "tree", "serve"])
    def test_former_names_are_taken_and_not_shown(self, parser, capsys, name, former):
        [option] = (own for known, own in FORMERLY if known == former)
        given = parser.parse_args([name, former, "3"])
        assert vars(given) == vars(parser.parse_args([name, option.name, "3"]))
        assert MODELS.given(given) == {**MODELS.given(parser.parse_args([name])), option.field: 3}
        shown = help_of(capsys, command.main, name).split()
        assert option.name in shown
        assert former not in shown

    def test_there_are_former_names(self):
        assert {former for former, _ in FORMERLY} == {
            *("--capacity", "--max-slots", "--tensor-parallel", "--expert-parallel", "--data-parallel")
        }

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            *((command.main, name) for name in ("generate", "chat", "tree", "serve", "info")),
            *((train, name) for name in ("data", "head", "finetune")),
            *((bench, name) for name in ("decode", "acceptance", "exactness", "round")),
            (convert, ""),
        ],
    )
    def test_the_target_has_two_names_everywhere(self, capsys, call, words):
        shown = help_of(capsys, call, *words.split())
        assert "--model PATH_OR_ID, --target PATH_OR_ID" in shown or "--model, --target PATH_OR_ID" in shown

    def test_the_first_word_of_serve_and_chat_is_the_model(self, parser):
        for name in ("serve", "chat"):
            ways = ["m"], ["--model", "m"], ["--target", "m"], ["--budget", "4", "m"], ["--model", "m", "m"]
            assert {parser.parse_args([name, *words]).target for words in ways} == {"m"}
            assert parser.parse_args([name]).target is None

    @pytest.mark.parametrize(
        "words",
        [
            "serve a --model b",
            "chat --model b a",
            "generate --model a --target b",
            "info x --model a --target b",
        ],
    )
    def test_one_model_alone(self, capsys, words):
        said = refused(capsys, command.main, *words.split())
        assert "'a'" in said
        assert "'b'" in said
        assert "not both" in said

    def test_a_usual_target_is_replaced(self):
        assert convert_parser().parse_args(["a", "b", "--target", "t"]).target == "t"
        own = argparse.ArgumentParser()
        MODELS.add(own, ["target"], target="demo")
        assert own.parse_args([]).target == "demo"
        assert own.parse_args(["--model", "m"]).target == "m"


def test_no_program_takes_abbreviations():
    rooms = ("jetspec_jax", "train", "bench", "convert", "examples")
    texts = {path: path.read_text("utf-8") for room in rooms for path in (ROOT / room).rglob("*.py")}
    made = [
        (path, {word.arg: getattr(word.value, "value", None) for word in node.keywords})
        for path, text in texts.items()
        if "ArgumentParser(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "ArgumentParser"
    ]
    assert len(made) > 5
    assert [path for path, words in made if words.get("allow_abbrev") is not False] == []
