"""``python -m bench``: a command is imported when it is chosen, and needs the packages of its extra alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import COMMANDS, REPLACED, main
from bench.common.report import command_of

ROOT = Path(__file__).parents[2]

# Optax and Orbax's like belong to training; Flax itself imports optax, so that it cannot be left out here.
SCRIPT = """
import sys

sys.modules.update(dict.fromkeys(["grain", "orbax", "tensorboardX", "datasets", "matplotlib"]))

from bench.__main__ import COMMANDS, main


def code(*words):
    try:
        return main(words)
    except SystemExit as end:
        return end.code


assert code("--help") == 0
assert "jax" not in sys.modules
assert code("nothing") == 2
for name in COMMANDS:
    assert code(name, "--help") == (2 if name == "train" else 0), name
"""


@pytest.mark.wide
def test_commands_need_no_packages_but_their_own():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "decode" in done.stdout
    *_, said = done.stderr.splitlines()
    assert said.startswith("bench: train needs ")
    assert said.endswith(', which is not installed: pip install "jetspec-jax[train,bench]"')


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_on_the_page_that_needs_it(name):
    text = (ROOT / COMMANDS[name].page).read_text("utf-8")
    assert f"python -m bench {name}" in " ".join(text.split())


@pytest.mark.parametrize("gone", REPLACED)
def test_what_went_is_refused_with_what_replaced_it(gone, capsys):
    words = gone.split()
    with pytest.raises(SystemExit) as ended:
        main([*words, "1"] if words[-1].startswith("--") else words)
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(f"python -m bench: {gone!r} was removed: {REPLACED[gone]}")
    assert words[0] not in COMMANDS or len(words) > 1


def test_a_word_of_another_command_is_not_refused(tmp_path, capsys):
    path = tmp_path / "none.json"
    assert main(["plots", str(path), "rounds"]) == 2
    assert "was removed" not in capsys.readouterr().err


def test_an_option_of_yes_or_no_is_no_switch():
    settings = {"fp8_activations": False, "phases": False, "other_head": ["a", "b"], "dtype": None}
    words = "python -m bench round --fp8-activations no --no-phases --other-head a --other-head b"
    assert command_of("round", settings) == words
