"""Masks of the host, applied to logits: on one device, and where each has a part of the vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.sampling.allowed import only_allowed
from tests.meshes import on_parts, padded

VOCAB = 67  # no number of parts divides it, nor a word's 32 bits


def make_case(dtype):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 3, VOCAB)).astype(dtype)
    words = rng.integers(0, 2**32, (2, 3, 3), dtype=np.uint32)
    words[0, 0], words[1, 2] = 0, 0xFFFFFFFF
    bits = [[np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB] for row in own] for own in words]
    return logits, words, np.where(bits, logits, -np.inf).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_not_allowed_is_minus_infinity(dtype):
    logits, words, expected = make_case(dtype)
    got = jax.jit(only_allowed)(logits, words)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@functools.cache
def stacked(expert, tensor):
    return on_parts(only_allowed, expert, tensor)


@pytest.mark.parametrize("mesh", [(1, 2), (1, 3), (2, 4)])
def test_each_device_takes_its_own_part(mesh):
    logits, words, expected = make_case(jnp.float32)
    parts = np.asarray(stacked(*mesh)(padded(logits, mesh[0] * mesh[1]), words))
    whole = np.concatenate(list(parts), axis=-1)
    np.testing.assert_array_equal(whole[..., :VOCAB], expected)
    assert (whole[..., VOCAB:] == -np.inf).all()
