"""Frequencies of rotary embeddings: the numbers are those of transformers 5.23.0."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.config import Rope, parse_model_config
from jetspec_jax.config.geometry import Linear, Llama3, Yarn
from jetspec_jax.models.rotary import frequencies, rotary
from tests.loading.published import without
from tests.loading.test_gpt_oss import GPT_OSS_20B

RTOL = 5e-6  # numbers of six digits

# Of GPT-OSS, were its heads of 16 elements: the ramp goes from pair 2.02 to 4.35, or, rounded, from 2 to 5.
GPT_OSS = (1.0, 0.225418, 0.0508133, 0.00679496, 4.56483918e-4, 1.8188337e-5, 4.09997847e-6, 9.24208962e-7)
TRUNCATED = (*GPT_OSS[:3], 0.00775546534, 9.14454344e-4, *GPT_OSS[5:])
FACTOR = 1.34657359
# Of Qwen3 for four times its context, were its heads of 16 elements: the ramp goes from 2.95 to 4.96.
QWEN3 = (1.0, 0.177827941, 0.0316227766, 4.21755994e-3, 5e-4, 4.44569853e-5, 7.90569415e-6, 1.40585331e-6)
# A quarter of the usual frequencies.
STRETCHED = (0.25, 0.0563545, 0.0127033181, 0.00286355661, 6.45497e-4, 1.45506696e-4, 3.27998e-5, 7.39367e-6)


def yarn(factor, beta_fast, context, truncate, attention_factor):
    return Yarn(factor, beta_fast, 1.0, context, truncate, attention_factor)


CASES = {
    "partial": (Rope(1e7, 8), (1.0, 0.01778279, 3.162278e-4, 5.623413e-6)),
    "proportional": (Rope(1e6, 32, turning=4), (1.0, 0.4216965, 0.1778279, 0.0749894, *[0.0] * 12)),
    "linear": (Rope(1e6, 8, scaling=Linear(8.0)), (0.125, 0.00395284708, 1.25e-4, 3.95284708e-6)),
    "llama3": (
        Rope(5e6, 8, scaling=Llama3(2.0, 1.0, 32.0, 64)),
        (0.6481600, 0.0105737, 2.236068e-4, 4.728708e-6),
    ),
    "yarn": (Rope(15e4, 16, scaling=yarn(32.0, 32.0, 4096, False, FACTOR)), GPT_OSS),
    "yarn, truncated": (Rope(15e4, 16, scaling=yarn(32.0, 32.0, 4096, True, FACTOR)), TRUNCATED),
    "yarn, of Qwen3": (Rope(1e6, 16, scaling=yarn(4.0, 32.0, 32768, True, 1.13862944)), QWEN3),
    "yarn, of Qwen3, not truncated": (
        Rope(1e6, 16, scaling=yarn(4.0, 32.0, 32768, False, 1.13862944)),
        (*QWEN3[:3], 5.51727048e-3, 6.07407938e-4, *QWEN3[5:]),
    ),
    # The ramp would begin before the first pair; end behind the last element; be of no length.
    "yarn, from the first": (
        Rope(15e4, 16, scaling=yarn(4.0, 32.0, 64, True, 1.13862944)),
        (1.0, 0.140886247, *STRETCHED[2:]),
    ),
    "yarn, to the last": (
        Rope(10.0, 4, scaling=yarn(4.0, 4096.0, 4096, True, 1.13862944)),
        (1.0, 0.237170815),
    ),
    "yarn, at once": (
        Rope(15e4, 16, scaling=yarn(4.0, 1.0, 64, False, 1.13862944)),
        (1.0, 0.225418, *STRETCHED[2:]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies(name):
    rope, expected = CASES[name]
    np.testing.assert_allclose(frequencies(rope), expected, rtol=RTOL)


@pytest.mark.parametrize(
    ("said", "expected"), [({}, TRUNCATED), ({"truncate": True}, TRUNCATED), ({"truncate": False}, GPT_OSS)]
)
def test_the_ends_of_a_ramp_are_rounded_unless_a_config_says_no(said, expected):
    scaling = without(GPT_OSS_20B["rope_scaling"], "truncate") | said
    config = parse_model_config({**GPT_OSS_20B, "head_dim": 16, "rope_scaling": scaling})
    np.testing.assert_allclose(frequencies(config.layers[0].rope), expected, rtol=RTOL)


@pytest.mark.parametrize(("name", "factor"), [("partial", 1.0), ("yarn", FACTOR)])
def test_angles(name, factor):
    rope, own = CASES[name]
    positions = np.array([[0, 1, 40], [7, 3, 3]], np.int32)
    angles = positions[:, :, None] * np.array(own)[None, None]
    cos, sin = rotary(jnp.asarray(positions), rope)
    np.testing.assert_allclose(cos, factor * np.cos(angles), atol=2e-5)
    np.testing.assert_allclose(sin, factor * np.sin(angles), atol=2e-5)
