"""Interrupts from the first import of a command to its end: code 130, and no traceback."""

import signal
import subprocess
import sys

import pytest

COMMANDS = {
    "jetspec-jax": ("-c", "import sys; from jetspec_jax.cli import main; sys.exit(main())", "--version"),
    "jetspec_jax": ("-m", "jetspec_jax", "--version"),
    "convert": ("-m", "convert", "--help"),
    "train": ("-m", "train", "--help"),
    "bench": ("-m", "bench", "round", "--help"),
}
#: Modules whose import Python reports on standard error, when it has ended; the last one is of this package.
MODULES = ("jax._src.config", "jetspec_jax.models.layers")


def interrupted(command, module):
    """Interrupts a command when it has imported a module: its exit code, and what it says from then on."""
    words = (sys.executable, "-X", "importtime", *COMMANDS[command])
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        else:
            raise AssertionError(f"{command} does not import {module}")
        said = [line for line in process.stderr if not line.startswith("import time:")]
    return process.returncode, "".join(said)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_amid_the_imports_ends_a_command(command):
    code, said = interrupted(command, "jaxtyping")
    assert code == 130
    assert "interrupted" in said
    assert "Traceback" not in said


@pytest.mark.wide
@pytest.mark.parametrize("module", MODULES)
def test_an_interrupt_behind_any_import_ends_the_command(module):
    code, said = interrupted("jetspec-jax", module)
    assert code == 130
    assert "Traceback" not in said


def test_the_package_is_imported_when_it_is_used():
    """So that a command can listen before JAX is imported."""
    program = (
        "import sys, jetspec_jax.cli.process; print(sorted({'jax', 'numpy', 'flax'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_all_names_of_the_package_are_there():
    import jetspec_jax

    assert {name for name in jetspec_jax.__all__ if getattr(jetspec_jax, name, None) is None} == set()
    assert callable(jetspec_jax.generate)
    assert set(jetspec_jax.__all__) <= set(dir(jetspec_jax))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jetspec_jax.nothing
