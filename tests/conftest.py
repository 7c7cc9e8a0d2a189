"""Set-up shared by all tests: array types checked at every call, no network, no randomness.

The platform is JAX's choice: the same tests run on a CPU and on a GPU.
"""

import os

# Before JAX, transformers or huggingface_hub are imported, and inherited by commands under test.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # test processes share one GPU
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # nothing is left in the user's cache folder

import hypothesis
import jax
import pytest
from jax._src import compiler
from jaxtyping import install_import_hook

import tests.array_checks  # noqa: F401  (the hook finds the checker by name)

# Stays installed: every module of these packages is imported after this line.
install_import_hook(
    ["jetspec_jax", "pallas_kernels", "train", "bench", "convert"], "tests.array_checks.check"
)

# Arrays of different rank never meet by accident: a missing axis is an error, not a broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every machine; a first call compiles, so no deadline.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(scope="module")
def quick_compiles():
    """For modules of many small programs: compiling is most of their time, and less without optimisations."""
    with pytest.MonkeyPatch.context() as patch:
        # Before JAX 0.11 XLA has two ways to make code of a fusion on a CPU. The default takes twice as
        # long without optimisations, and an option for all programs JAX has only in the environment.
        if jax.__version_info__ < (0, 11):
            patch.setattr(compiler, "get_compile_options", _with_older_fusions)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


_get_compile_options = compiler.get_compile_options


def _with_older_fusions(*args, **kwargs):
    options = _get_compile_options(*args, **kwargs)
    options.env_option_overrides += [("xla_cpu_use_fusion_emitters", False)]
    return options


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """No module leaves its programs: XLA has crashed while compiling in a process that kept thousands."""
    yield
    jax.clear_caches()
