"""What all reports share: settings, the command that makes them again, and where they can be written."""

import argparse
import importlib
import os
import shlex
from pathlib import Path

import jax
import pytest
from matplotlib.figure import Figure

from bench.__main__ import COMMANDS, main
from bench.common.pair import add_pair_arguments, add_trees_arguments, check_numbers
from bench.common.picture import write_picture
from bench.common.report import add_report_arguments, check_report, command_of, opening_of, settings_of, show


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_pair_arguments(parser, prompts=4, max_tokens=8)
    add_trees_arguments(parser, temperatures=[0.0, 1.0], budgets=[16])
    add_report_arguments(parser, "exactness")
    return parser.parse_args(words)


class TestSettings:
    def test_paths_below_the_working_folder_keep_their_folders_and_others_lose_them(
        self, tmp_path, monkeypatch
    ):
        work = tmp_path / "work"
        (work / "results").mkdir(parents=True)
        monkeypatch.chdir(work)
        for given, kept in [
            ("results/profile.json", "results/profile.json"),
            ("./results/../results/profile.json", "results/profile.json"),
            (str(work / "results" / "profile.json"), "results/profile.json"),
            (str(tmp_path / "profile.json"), "profile.json"),
            ("../profile.json", "profile.json"),
        ]:
            assert settings_of(parsed("--profile", given))["profile"] == kept
            assert f"--profile {kept} " in command_of("decode", settings_of(parsed("--profile", given)))

    def test_paths_lose_their_folders_and_hub_ids_stay(self, tmp_path, monkeypatch):
        (tmp_path / "models" / "target").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "models")
        arguments = parsed("--target", "target/", "--draft-head", "owner/head", "--prompts", ".")
        found = settings_of(arguments)
        assert (found["target"], found["draft_head"], found["prompts"]) == ("target", "owner/head", "models")
        assert not {"json", "plot", "compilation_cache"} & found.keys()

    def test_the_command_is_read_as_the_same_settings(self):
        templates = 'task_router.templates={"balanced_task": [2, 1]}'
        words = ["--algorithm-option", templates, "--no-enable-thinking", "--profile", "my profile.json"]
        arguments = parsed(*words, "--task", "set", "--temperatures", "0.7", "2")
        command = command_of("exactness", settings_of(arguments))
        python, *start = shlex.split(command)[:4]
        assert (python, start) == ("python", ["-m", "bench", "exactness"])
        assert parsed(*shlex.split(command)[4:]) == arguments


# What a command does before it would measure is enough to know its settings.
@pytest.mark.parametrize(
    "words",
    [
        ["decode", "--no-enable-thinking", "--together"],
        ["exactness", "--dtypes", "float32"],
        ["profile", "--nodes", "tree"],
        ["round", "--shape", "tiny", "--no-phases", "--profile"],
        ["kernel", "--operation", "matmul", "--tune"],
        ["kernel", "--operation", "experts", "--baselines"],
        ["train", "--window", "32", "--remat"],
    ],
)
def test_a_report_names_the_command_that_makes_it_again(words, monkeypatch):
    taken = []
    command = importlib.import_module(COMMANDS[words[0]].module)
    monkeypatch.setattr(command, "run", lambda arguments: taken.append(arguments) or 0)
    assert main(words) == 0
    opening = opening_of(words[0], taken[0])
    assert (opening["benchmark"], opening["jax"]) == (words[0], jax.__version__)
    python, *start = shlex.split(opening["command"])[:4]
    assert (python, start) == ("python", ["-m", "bench", words[0]])
    assert main(shlex.split(opening["command"])[3:]) == 0
    assert settings_of(taken[1]) == settings_of(taken[0]) == opening["arguments"]


class TestWriting:
    def test_the_picture_is_beside_the_json(self, tmp_path):
        arguments = parsed("--json", str(tmp_path / "new" / "report.json"))
        check_report(arguments)
        assert arguments.plot == tmp_path / "new" / "report.svg"
        assert list((tmp_path / "new").iterdir()) == []

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--json", "{}/x.svg"], "--json and --plot are one file"),
            (["--json", "{}"], "cannot write .*: it is a folder"),
            (["--json", "{}/x.json", "--plot", "{}/fifo.svg"], "fifo.svg: it is no regular file"),
            (["--json", "{}/file/x.json"], "cannot write .*/file/x.json: Not a directory"),
            (["--json", "{}/x.json", "--plot", "{}/file/x.svg"], "file"),
        ],
    )
    def test_what_cannot_be_written_is_said(self, tmp_path, words, said):
        (tmp_path / "file").touch()
        os.mkfifo(tmp_path / "fifo.svg")
        with pytest.raises((ValueError, OSError), match=said):
            check_report(parsed(*(word.replace("{}", str(tmp_path)) for word in words)))

    def test_a_picture_is_written_whole_or_not_at_all(self, tmp_path, monkeypatch):
        path = tmp_path / "x.svg"
        write_picture(path, Figure())
        before = path.read_bytes()
        assert before.startswith(b"<?xml")
        write_picture(path, Figure())
        assert path.read_bytes() == before

        def broken(self, file, **_):
            Path(file).write_bytes(b"half")
            raise OSError("the disk is full")

        monkeypatch.setattr(Figure, "savefig", broken)
        with pytest.raises(OSError, match="full"):
            write_picture(path, Figure())
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


def test_numbers_are_checked_by_their_option():
    for option, least in ("--max-tokens", 1), ("--num-prompts", 1), ("--skip-prompts", 0):
        with pytest.raises(ValueError, match=f"{option} must be at least {least}, not {least - 1}"):
            check_numbers(parsed(option, str(least - 1)))
    check_numbers(parsed())


def test_short_times_keep_their_digits(capsys):
    show("t", [{"build": 0.0123, "draft": 0.5}, {"build": 1.0, "draft": 12.0}])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0.012", "0.50"] in lines
    assert ["1.000", "12.00"] in lines
