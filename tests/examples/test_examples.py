"""The examples run, say what they should, and are short."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from jetspec_jax import AsyncLLM, models
from jetspec_jax.config import target
from jetspec_jax.tree import algorithms
from tests.serve.servers import served
from tests.train.folders import write_target

FOLDER = Path(__file__).parents[2] / "examples"
ONE = ("--prompts", "1", "--algorithms", "chain")
# By name, arguments that make it cheap, and what it has to print.
SCRIPTS = {
    "add_a_proposer": ((), r"^[2-4]\.\d\d tokens per round, the same: True$"),
    "add_a_family": ((), r"^Target\(parallel_qwen3, 8 layers .* writes"),
    "chat_and_stream": ((), r"\d\.\d\d tokens per round$"),
    "compare_algorithms": (ONE, "1 of 1 texts equal plain decoding's$"),
    "embed_the_loop": ((), r"return path\n"),
    "generate": ((), r"^--- 12 tokens, \d\.\d\d per round, ended by length\ndef read_lines\(path\):\n"),
    "look_at_a_tree": ((), r"(?s)^round 1: 16 nodes, \d+ accepted, .*\nround 2: 16 nodes, "),
    "probe_layers": ((), r"layer 7: 100% of 12 tokens are the target's$"),
    "train_by_hand": ((), r"^loss: [5-9]\.\d.* 0\.\d\d\n where the draft is sure, and nowhere else"),
    "own_algorithm": ((), r"our own: \d\.\d\d tokens from \d+\.\d nodes per round$"),
}

FOR_RESEARCH = {"add_a_family", "add_a_proposer", "probe_layers", "train_by_hand"}

# Those that ask a server.
ASKING = {"call_a_tool": r"^count_names\(module='(json|math|os)', kind='(class|function)'\) is \d+\n"}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a program, and returns what it prints."""

    def run(name, *arguments):
        # What an example registers is gone after it.
        for room, table in ((algorithms, "_KNOWN"), (models, "FAMILIES"), (models, "READERS")):
            monkeypatch.setattr(room, table, dict(getattr(room, table)))
        monkeypatch.setattr(target, "READERS", models.READERS)
        monkeypatch.setattr(sys, "argv", [name, "--max-tokens", "12", *arguments])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out.rstrip("\n")

    return run


@pytest.mark.wide  # programs of the demo pair take most of a minute to compile
@pytest.mark.parametrize("name", SCRIPTS)
def test_on_the_demo_pair(run, name):
    arguments, expected = SCRIPTS[name]
    said = run(name, *arguments)
    assert re.search(expected, said), said


@pytest.mark.wide
def test_on_a_target_of_one_s_own(run, tmp_path):
    said = run("generate", "--model", str(write_target(tmp_path / "target")))
    assert len(re.findall(r"^--- \d+ tokens, 1\.00 per round, ended by", said, re.MULTILINE)) == 3, said


@pytest.mark.wide
def test_a_tool_and_a_template_with_the_demo_pair(run):
    with served(AsyncLLM(chat_template="chatml-tools", max_slots=1)) as own:
        said = run("call_a_tool", "--url", f"{own.url}/v1", "--max-tokens", "40")
    assert re.search(ASKING["call_a_tool"], said), said


def test_all_are_run_and_short():
    scripts = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    assert scripts.keys() == SCRIPTS.keys() | ASKING.keys()
    for name, text in scripts.items():
        assert len(text.splitlines()) <= (40 if name in FOR_RESEARCH else 50), name
        assert f"``python examples/{name}.py" in text
