"""What the commands say on standard error, in a process of their own."""

import subprocess
import sys

from jetspec_jax.cli import quiet

PROGRAM = """
import logging, runpy, sys, warnings
quiet = runpy.run_path(sys.argv[1])
quiet["keep_libraries_quiet"]()
quiet["show_own_log"]()
for name in ("jetspec_jax", "jetspec_jax.train", "absl", "other"):
    logging.getLogger(name).info("a detail of %s", name)
    logging.getLogger(name).warning("a warning of %s", name)
warnings.warn("of Python")
"""


def test_our_own_notices_are_said_and_those_of_other_libraries_are_not():
    done = subprocess.run([sys.executable, "-c", PROGRAM, quiet.__file__], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "jetspec-jax: a warning of jetspec_jax",
        "jetspec-jax: a warning of jetspec_jax.train",
    ]
