"""How programs run in all processes of the tests: their environment, and how JAX compiles.

Imported before JAX, by ``conftest.py`` and by the programs that tests start.
"""

import gc
import os
import signal
import tempfile

# ruff: noqa: E402 (the environment comes before the libraries that it is for are imported)

# What stays of the environment, for the tests and the commands under test: how programs, libraries, folders
# and devices are found. Proxies, locales, terminals, a user's options of JAX and others change outcomes.
KEPT = ["PATH", "HOME", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "JAX_PLATFORMS"]
KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "PYTEST_", "PLAYWRIGHT_")
# Programs that several tests and processes compile alike are compiled once a run. The first process makes
# their folder and removes it; all that it starts find it by this name.
PROGRAMS = "PYTEST_COMPILED_PROGRAMS"
FIRST = PROGRAMS not in os.environ
if FIRST:
    os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="jetspec-tests-")
for name in {*os.environ} - {*KEPT}:
    if not name.startswith(KEPT_PREFIXES):
        del os.environ[name]
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # test processes share one GPU
    # Small programs in parts, made by many threads, cost more than whole.
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1",
    "JAX_ENABLE_COMPILATION_CACHE": "true",
    "JAX_COMPILATION_CACHE_DIR": os.environ[PROGRAMS],  # and not the user's cache folder
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
# Shells start background jobs with interrupts ignored, and whatever those start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tracing makes many objects, few of them in cycles: the default of 700 took 7 % of the time.
gc.set_threshold(20_000)

import jax
from jax._src import compiler

# Arrays of different rank never meet by accident: a missing axis is an error, not a broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Meshes of the tests, on a CPU. A program without a mesh runs on the first device alone.
jax.config.update("jax_num_cpu_devices", 8)

# Compiling is most of the tests' time, and less without optimisations.
jax.config.update("jax_disable_most_optimizations", True)

_get_compile_options = compiler.get_compile_options


def _with_older_fusions(*args, **kwargs):
    options = _get_compile_options(*args, **kwargs)
    if jax.config.read("jax_disable_most_optimizations"):
        options.env_option_overrides += [("xla_cpu_use_fusion_emitters", False)]
    return options


# Before JAX 0.11 XLA has two ways to make code of a fusion on a CPU. The default takes twice as
# long without optimisations, and an option for all programs JAX has only in the environment.
if jax.__version_info__ < (0, 11):
    compiler.get_compile_options = _with_older_fusions
