"""Set-up shared by all tests: array types checked at every call, no network, no randomness.

The platform is JAX's choice: the same tests run on a CPU and on a GPU.
"""

# isort: off
from tests.processes import FIRST, PROGRAMS  # first, since it comes before JAX

# isort: on
import os
import shutil
import sys

import hypothesis
import jax
import jaxtyping
import pytest

from tests.array_checks import install_import_hook

# Imported by its pytest plugin before this file, and with it the user's setting.
jaxtyping.config.update("jaxtyping_disable", False)

# Stays installed: every module of these packages is imported after this line.
install_import_hook(["jetspec_jax", "pallas_kernels", "train", "bench", "convert"])

import jetspec_jax  # noqa: E402
from jetspec_jax import progress  # noqa: E402
from jetspec_jax.engine import policy  # noqa: E402
from tests.events import PATIENCE  # noqa: E402

# Machines that are slow say no more than others.
progress.SILENCE = PATIENCE

# The same examples on every machine; a first call compiles, so no deadline.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")

# XLA has crashed while compiling in a process that kept many thousands of programs.
MOST_PROGRAMS = 400


def pytest_unconfigure():
    """Removes what was compiled, at the end of the first process."""
    if (threads := sys.modules.get("jetspec_jax.engine.compiler")) is not None:
        threads.end_all()  # it writes there
    if FIRST:
        shutil.rmtree(os.environ[PROGRAMS], ignore_errors=True)


@pytest.fixture
def no_type_checks():
    """Calls as users make them: nothing but the operation itself looks at its arrays."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def nothing_runs(monkeypatch):
    """No decoder of a device may do anything."""

    def fail(*_):
        raise AssertionError("work began before everything was checked")

    for name in ("insert", "prefill", "decode", "release"):
        monkeypatch.setattr(jetspec_jax.TreeDecoder, name, fail)


@pytest.fixture
def short_dispatches(monkeypatch):
    """One round a dispatch, so that a fast machine streams in pieces too."""
    monkeypatch.setattr(policy, "MAX_ROUNDS", 1)


@pytest.fixture(scope="module")
def optimised():
    """Programs as users have them, for modules where that is the point."""
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Modules share programs, as long as a process does not hold too many."""
    yield
    if len(jax.local_devices()[0].client.live_executables()) > MOST_PROGRAMS:
        jax.clear_caches()
