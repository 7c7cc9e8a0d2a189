"""What the commands say on standard error, in a process of their own."""

import subprocess
import sys

from jetspec_jax.cli import quiet

PROGRAM = """
import logging, runpy, sys, types, warnings
quiet = runpy.run_path(sys.argv[1])
quiet["keep_libraries_quiet"]()
quiet["show_own_log"]()
for name in ("jetspec_jax", "jetspec_jax.train", "absl", "other"):
    logging.getLogger(name).info("a detail of %s", name)
    logging.getLogger(name).warning("a warning of %s", name)
logging.getLogger("absl").error("raised as well")
# What a thread of a C++ library cannot tell anybody.
sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError("late"), err_msg=None, object=None))
class Breaks:
    def __del__(self):
        raise RuntimeError("an error of Python's own")
Breaks()
warnings.warn("of Python")
"""


def test_our_own_notices_are_said_and_those_of_other_libraries_are_not():
    done = subprocess.run([sys.executable, "-c", PROGRAM, quiet.__file__], capture_output=True, text=True)
    assert done.returncode == 0
    first, second, third, *_, last = done.stderr.splitlines()
    assert [first, second] == [
        "jetspec-jax: a warning of jetspec_jax",
        "jetspec-jax: a warning of jetspec_jax.train",
    ]
    assert third.startswith("Exception ignored in: <function Breaks.__del__")
    assert last == "RuntimeError: an error of Python's own"
    assert "late" not in done.stderr
    assert "raised as well" not in done.stderr
