"""Losses against float64 NumPy, whatever the chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from train.objectives import (
    accepted_length,
    depth_weights,
    forward_kl,
    next_token_loss,
    weighted_mean,
)

R, M, V = 13, 6, 11
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(V, M))
STUDENT, TEACHER = RNG.normal(size=(2, R, M))


def logits(hidden):
    return jnp.einsum("brm,vm->brv", hidden, jnp.asarray(TABLE, jnp.float32))


def f32(x):
    return jnp.asarray(x, jnp.float32)


def oracle_kl(student, teacher, temperature):
    log_q = scipy.special.log_softmax(student @ TABLE.T / temperature, axis=-1)
    log_p = scipy.special.log_softmax(teacher @ TABLE.T / temperature, axis=-1)
    return (np.exp(log_p) * (log_p - log_q)).sum(-1) * temperature**2


@pytest.mark.parametrize("chunk", [1, 4, R, 100])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_forward_kl(chunk, temperature):
    kl, matches = forward_kl(f32(STUDENT), f32(TEACHER), logits, temperature=temperature, chunk=chunk)
    np.testing.assert_allclose(kl, oracle_kl(STUDENT, TEACHER, temperature), atol=1e-5)
    expected = (STUDENT @ TABLE.T).argmax(-1) == (TEACHER @ TABLE.T).argmax(-1)
    np.testing.assert_array_equal(matches, expected)


def test_forward_kl_has_the_gradient_of_finite_differences():
    def total(student):
        return jnp.sum(forward_kl(student, f32(TEACHER), logits, temperature=1.5, chunk=4)[0])

    gradient = jax.grad(total)(f32(STUDENT))
    numeric, step = np.zeros((R, M)), 1e-6
    for i in np.ndindex(R, M):
        shift = np.zeros((R, M))
        shift[i] = step
        up, down = (oracle_kl(STUDENT + s * shift, TEACHER, 1.5).sum() for s in (1, -1))
        numeric[i] = (up - down) / (2 * step)
    np.testing.assert_allclose(gradient, numeric, atol=1e-5)


def test_the_teacher_gets_no_gradient():
    gradient = jax.grad(lambda t: jnp.sum(forward_kl(f32(STUDENT), t, logits, temperature=1.0, chunk=4)[0]))(
        f32(TEACHER)
    )
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_next_token_loss(chunk):
    labels = RNG.integers(0, V, R)
    loss = next_token_loss(f32(STUDENT), jnp.asarray(labels, jnp.int32), logits, chunk=chunk)
    expected = -scipy.special.log_softmax(STUDENT @ TABLE.T, axis=-1)[np.arange(R), labels]
    np.testing.assert_allclose(loss, expected, atol=1e-5)


def test_weights_by_depth():
    np.testing.assert_array_equal(depth_weights(3, 0.0), [1, 1, 1])
    np.testing.assert_allclose(depth_weights(2, 7.0), np.exp([-1 / 7, -2 / 7]), rtol=1e-6)
    values = f32([[1.0, 10.0], [3.0, 30.0]])
    assert float(weighted_mean(values, f32([3.0, 1.0]))) == pytest.approx((2 * 3 + 20) / 4)


def test_accepted_length_counts_leading_matches():
    matches = jnp.array([[True, True, False, True], [False, True, True, True], [True] * 4])
    assert float(accepted_length(matches)) == pytest.approx((2 + 0 + 4) / 3)
