import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.tree import top_candidates
from tests.marks import wide

jitted = jax.jit(top_candidates, static_argnums=1)


# 1 and 2027 are one chunk, 2500 is two, 9496 eight of Qwen3's 1187.
@pytest.mark.parametrize(
    ("vocabulary", "width", "dtype"),
    [
        (1, 1, jnp.float32),
        (2500, 7, jnp.bfloat16),
        (9496, 7, jnp.float32),
        (2027, 7, jnp.float16),
        *(wide(v, w, d) for v in (2027, 2500, 9496) for w in (1, 7) for d in (jnp.float32, jnp.bfloat16)),
    ],
)
def test_is_top_k(vocabulary, width, dtype):
    """Also among equals: the lower id comes first."""
    rng = np.random.default_rng(vocabulary + width)
    shape = (2, 3, vocabulary)
    for values in (rng.normal(0, 3, shape), rng.integers(0, 5, shape)):
        logits = jnp.asarray(values, dtype)
        found = jitted(logits, width)
        top, tokens = jax.lax.top_k(logits, width)
        np.testing.assert_array_equal(found.tokens, tokens)
        total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
        np.testing.assert_allclose(found.log_probs, top.astype(jnp.float32) - total, atol=1e-5)


def test_tokens_of_probability_zero_come_last():
    logits = np.full((1, 1, 4096), -np.inf, np.float32)
    logits[0, 0, [4000, 5, 1030]] = [2.0, 1.0, 1.0]
    found = jitted(jnp.asarray(logits), 5)
    assert found.tokens[0, 0].tolist() == [4000, 5, 1030, 0, 1]
    assert np.isneginf(found.log_probs[0, 0, 3:]).all()
