"""A tiny random pair and two random prompts, which commands may decode instead of what they are told."""

import json
import re

import numpy as np
import pytest

from bench.__main__ import main
from bench.common.pair import Pair
from bench.common.prompts import Prompt
from bench.common.workload import Workload
from jetspec_jax import SamplingParams
from tests.decode.tiny import TINY, random_head, random_target, word_tokenizer
from train.data.prompts import Entry

#: A progress bar, or its line in a file.
PROGRESS = re.compile(r"%\||: \d+ of \d+ .* after \d+:\d+")


@pytest.fixture(scope="session")
def pair():
    """Of a vocabulary so small that a random head is right now and then."""
    return Pair(random_target(TINY, 0, tokenizer=word_tokenizer(TINY.vocab_size)), random_head(TINY, 1))


@pytest.fixture
def report_of(tmp_path):
    """Calls a command that must succeed, and returns its report: whole, with a picture, and without paths."""

    def call(command, words):
        path = tmp_path / "out" / "report.json"
        assert main([command, *words.split(), "--json", str(path)]) == 0
        assert "<svg" in path.with_suffix(".svg").read_text()
        assert str(tmp_path) not in path.read_text()
        report = json.loads(path.read_text())
        opening = report.get("meta", report)
        assert opening["device"]
        assert opening["jax"]
        return report

    return call


@pytest.fixture
def refusal(tmp_path, capsys):
    """Calls a command that must end with 2 and write nothing, and returns what it says.

    ``{}`` in a word stands for ``tmp_path``.
    """

    def call(command, *words):
        before = sorted(tmp_path.rglob("*"))
        words = [word.replace("{}", str(tmp_path)) for word in words]
        assert main([command, "--json", str(tmp_path / "out.json"), *words]) == 2
        assert sorted(tmp_path.rglob("*")) == before
        before_it, found, said = capsys.readouterr().err.partition("bench: ")
        assert found, before_it
        assert all(PROGRESS.search(line) for line in before_it.splitlines() if line.strip()), before_it
        return said.rstrip("\n")

    return call


def random_workloads(arguments, target, prompts, temperatures, *, batch=1):
    """Random tokens in place of each prompt's, at each temperature."""
    count = len(prompts)
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size - 1, (count, 9)).tolist()
    return {
        temperature: Workload(
            list(prompts),
            ids,
            [SamplingParams(temperature, seed=i, max_tokens=arguments.max_tokens) for i in range(count)],
            [None] * count,
        )
        for temperature in sorted(set(temperatures))
    }


def text_prompt(name, text="x", **more):
    return Prompt(name, Entry(name, "text", text), **more)
