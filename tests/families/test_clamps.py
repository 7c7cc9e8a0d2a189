"""The goldens reach the clamps of their families' activations: without them the logits are others."""

import dataclasses
import json

import numpy as np
import pytest

from jetspec_jax import logits
from jetspec_jax.config import parse_model_config
from tests.families.goldens import FOLDER, IDS, golden_logits, golden_target

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize(("family", "changes"), [("gpt_oss", {"swiglu_limit": 1e6})])
def test_a_clamp_matters(family, changes):
    target = golden_target(family)
    raw = json.loads((FOLDER / family / "config.json").read_text())
    config = parse_model_config(raw | changes)
    assert config != target.config
    unclamped = logits(dataclasses.replace(target, config=config), IDS)
    assert np.abs(np.asarray(unclamped) - golden_logits(family)).max() > 0.05
