"""The numbers of tests/families/test_rotary.py are those of transformers, live."""

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jetspec_jax.config.geometry import Yarn
from tests.families.test_rotary import CASES, RTOL

pytestmark = pytest.mark.parity


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
