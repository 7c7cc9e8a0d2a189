"""YaRN's frequencies, those of tests/families/test_rotary.py too, against transformers, live."""

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jetspec_jax.config import parse_model_config
from jetspec_jax.config.geometry import Yarn
from jetspec_jax.models.rotary import frequencies
from tests.families.test_rotary import CASES, RTOL
from tests.loading.test_config import QWEN3_8B
from tests.loading.test_yarn import MOE

pytestmark = pytest.mark.parity

# Beside the usual settings, of a model of Qwen3-8B's shape.
SETTINGS = [
    {},
    {"factor": 1.0},
    {"beta_fast": 16.0, "beta_slow": 2.0},
    {"truncate": False},
    {"attention_factor": 1.25},
    {"mscale": 1.0, "mscale_all_dim": 0.707},
    {"original_max_position_embeddings": 40960, "factor": 2.5},
]


@pytest.mark.parametrize("family", [transformers.Qwen3Config, transformers.Qwen3MoeConfig])
@pytest.mark.parametrize("own", SETTINGS, ids=str)
def test_yarn_of_a_config(family, own):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **own}
    raw = {**(QWEN3_8B if family.model_type == "qwen3" else MOE), "rope_scaling": scaling}
    rope = parse_model_config(raw).layers[0].rope
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](family.from_dict(raw), "cpu")
    np.testing.assert_allclose(frequencies(rope), theirs.numpy(), rtol=RTOL)
    np.testing.assert_allclose(rope.scaling.attention_factor, factor, rtol=1e-8)


@pytest.mark.parametrize(
    "name", [name for name, (rope, _) in CASES.items() if isinstance(rope.scaling, Yarn)]
)
def test_yarn(name):
    rope, expected = CASES[name]
    scaling = rope.scaling
    config = transformers.GptOssConfig(
        head_dim=rope.size,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": rope.theta,
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_context,
            "truncate": scaling.truncate,
        },
    )
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    np.testing.assert_allclose(theirs.numpy(), expected, rtol=RTOL)
    np.testing.assert_allclose(scaling.attention_factor, factor, rtol=1e-8)
