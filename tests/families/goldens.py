"""What transformers makes of tiny models, stored: see tests/parity/make_goldens.py."""

from pathlib import Path

import numpy as np
import pytest

from jetspec_jax import load_target
from tests.marks import wide

FOLDER = Path(__file__).parent / "goldens"
NAMES = sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []
# Second goldens of a family. No draft head is trained for them: it sees nothing of what they differ in.
VARIANTS = ("qwen3_moe_sliding",)
# Others have all that these are made of.
MADE_OF_OTHERS = ("gemma3", "qwen3_5_moe", "qwen3_moe_sliding", "qwen3_next")
# For tests that compile much.
EACH_PART = pytest.mark.parametrize(
    "family",
    [wide(name) if name in MADE_OF_OTHERS else name for name in NAMES],
    indirect=True,
)

# Longer than the windows of 8, by three of them.
IDS = np.random.default_rng(0).integers(0, 64, (2, 33)).astype(np.int32)
# Of recurrent families, whose transformers computes in chunks of 64 tokens, and these in chunks of 256.
LONG_IDS = np.random.default_rng(1).integers(0, 64, (1, 600)).astype(np.int32)
LONG_PLACES = np.s_[:, 7::16]
TOLERANCE = 1e-4


def golden_target(name):
    """A family's tiny target, in float32."""
    return load_target(FOLDER / name, dtype="float32")


def golden_logits(name):
    """What transformers makes of `IDS`."""
    return np.load(FOLDER / name / "logits.npy")


def long_golden_logits(name):
    """What transformers makes of `LONG_IDS`, at `LONG_PLACES`."""
    return np.load(FOLDER / name / "long_logits.npy")
