"""Embeddings that a family scales: the scale is rounded to their type before it multiplies them."""

import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16

from jetspec_jax.config import parse_model_config
from jetspec_jax.models import bind
from tests.loading.published import V4
from tests.loading.test_gemma3 import OLDER as GEMMA3

TOKENS = np.array([[5, 0, 18], [5, 5, 7]], np.int32)


@pytest.fixture
def table():
    """Of 19 tokens, 12 wide."""
    return np.random.default_rng(0).normal(size=(19, 12)).astype(np.float32)


def embed(raw, table, **settings):
    """What a model of a config makes of `TOKENS`; its other parameters are never made."""
    model = bind(parse_model_config(raw), {"embed_tokens": jnp.asarray(table)})
    embedded = model.embed(jnp.asarray(TOKENS), **settings)
    assert embedded.dtype == table.dtype
    return np.asarray(embedded)


def test_bfloat16(table):
    """The root of 12 is 3.4641, and in bfloat16 3.46875: what Gemma was trained with."""
    table = table.astype(bfloat16)
    wide = table[TOKENS].astype(np.float32)
    expected = (wide * np.float32(3.46875)).astype(bfloat16)
    # Some elements would be others, were the scale not rounded.
    assert (expected != (wide * np.float32(12**0.5)).astype(bfloat16)).any()
    np.testing.assert_array_equal(embed(GEMMA3, table), expected)


def test_float32(table):
    np.testing.assert_array_equal(embed(GEMMA3, table), table[TOKENS] * np.float32(12**0.5))


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_as_they_are(table, dtype):
    table = table.astype(dtype)
    np.testing.assert_array_equal(embed(V4, table), table[TOKENS])
    np.testing.assert_array_equal(embed(GEMMA3, table, scaled=False), table[TOKENS])
