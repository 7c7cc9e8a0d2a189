"""``python -m bench``: a command is imported when it is chosen, and needs the packages of its extra alone."""

import subprocess
import sys

import pytest

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
