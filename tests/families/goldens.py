"""What transformers makes of tiny models, stored: see tests/parity/make_goldens.py."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jetspec_jax import load_target
from tests.families import step_by_step
from tests.float64 import Reference, Rounding, assert_rounded, reference_of

FOLDER = Path(__file__).parent / "goldens"
NAMES = sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []
# Others have all that these are made of.
MADE_OF_OTHERS = ("gemma3", "llama", "qwen3_5_moe", "qwen3_moe_sliding", "qwen3_next")
# For tests that compile much.
EACH_PART = pytest.mark.parametrize(
    "family",
    [name for name in NAMES if name not in MADE_OF_OTHERS],
    indirect=True,
)

# Longer than the windows of 8, by three of them.
IDS = np.random.default_rng(0).integers(0, 64, (2, 33)).astype(np.int32)
# Of recurrent families, whose transformers computes in chunks of 64 tokens, and these in chunks of 256.
LONG_IDS = np.random.default_rng(1).integers(0, 64, (1, 600)).astype(np.int32)
LONG_PLACES = np.s_[:, 7::16]
RECURRENT = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# Of the others: no norm of theirs divides by much less than the terms of what it normalises, so that
# roundings come to about 1e-5 at the lengths of these tests, on either side.
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


def golden_file(name):
    """A family's config as it is stored, and its tensors."""
    raw = json.loads((FOLDER / name / "config.json").read_text())
    return raw, load_file(FOLDER / name / "model.safetensors")


@functools.cache
def in_float64(name):
    """A recurrent family's logits of `IDS` in float64."""
    return reference_of(step_by_step.logits(*golden_file(name), IDS, Rounding()))


def long_in_float64(name):
    """A recurrent family's logits of `LONG_IDS`, at `LONG_PLACES`, in float64: stored, as they take long."""
    return Reference(**np.load(FOLDER / name / "long_float64.npz"))


def store_long_in_float64(name):
    """Makes what `long_in_float64` reads."""
    samples = step_by_step.logits(*golden_file(name), LONG_IDS, Rounding())
    reference = reference_of(samples[(slice(None), *LONG_PLACES)])
    np.savez_compressed(FOLDER / name / "long_float64.npz", **reference._asdict())


def assert_logits_of_ids(family, got, theirs):
    """Of `IDS`: a recurrent family's are those of float64, the others' are theirs."""
    if family in RECURRENT:
        assert_rounded(got, in_float64(family))
    else:
        np.testing.assert_allclose(np.asarray(got), np.asarray(theirs), rtol=0, atol=TOLERANCE)
