"""Losses and their gradients against float64 NumPy, whatever the chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from train.loss.objectives import LOSSES, Mean, accepted_length, depth_weights, draft_losses, pace_weights

B, T, N, M, V = 2, 7, 13, 6, 11
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(V, M))
STUDENT, TEACHER = RNG.normal(size=(B, N, M)), RNG.normal(size=(B, T, M))
ROWS, LABELS = RNG.integers(0, T, (B, N)), RNG.integers(0, V, (B, N))
# What the rows are weighted by later: the gradient must be right for any.
WEIGHTS = RNG.normal(size=(B, N))


def logits(hidden):
    return jnp.einsum("brm,vm->brv", hidden, jnp.asarray(TABLE, hidden.dtype))


def table(function, *arrays):
    return function(logits, logits, *arrays)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def i32(x):
    return jnp.asarray(x, jnp.int32)


def ours(student, loss="forward_kl", temperature=1.0, chunk=4, teacher=TEACHER):
    return draft_losses(
        student,
        f32(teacher),
        i32(ROWS),
        i32(LABELS),
        table,
        loss=loss,
        temperature=temperature,
        chunk=chunk,
    )


values = jax.jit(ours, static_argnames=("loss", "temperature", "chunk"))


def expected(student, loss, temperature):
    """The loss of each row in float64."""
    if loss == "sft":
        log_q = scipy.special.log_softmax(student @ TABLE.T, axis=-1)
        return -np.take_along_axis(log_q, LABELS[:, :, None], axis=-1)[:, :, 0]
    teacher = np.take_along_axis(TEACHER, ROWS[:, :, None], axis=1)
    log_p, log_q = (scipy.special.log_softmax(x @ TABLE.T / temperature, axis=-1) for x in (teacher, student))
    if loss == "total_variation":
        return np.abs(np.exp(log_p) - np.exp(log_q)).sum(-1) / 2
    if loss == "reverse_kl":
        log_p, log_q = log_q, log_p
    return (np.exp(log_p) * (log_p - log_q)).sum(-1) * temperature**2


def slope(function, x, step=1e-6):
    """Derivatives of rows' values by each of their elements: a row depends on no other."""
    shifts = step * np.eye(x.shape[-1])
    return np.stack([(function(x + s) - function(x - s)) / (2 * step) for s in shifts], axis=-1)


@pytest.mark.parametrize(
    ("loss", "temperature", "chunk"),
    [
        ("forward_kl", 1.0, 4),
        ("forward_kl", 2.5, 100),
        ("reverse_kl", 2.5, 4),
        ("sft", 2.5, N),
        ("total_variation", 0.5, 4),
    ],
)
def test_rows_and_their_gradient(loss, temperature, chunk):
    def total(student):
        rows = ours(student, loss, temperature, chunk)
        return jnp.sum(rows.loss * f32(WEIGHTS)), rows

    @jax.jit
    def run(student):
        return jax.grad(total, has_aux=True)(student), ours(student, loss, temperature, chunk)

    (gradient, rows), without_gradient = run(f32(STUDENT))
    for losses in (rows.loss, without_gradient.loss):
        np.testing.assert_allclose(losses, expected(STUDENT, loss, temperature), rtol=1e-5, atol=1e-5)
    best = np.take_along_axis((TEACHER @ TABLE.T).argmax(-1), ROWS, axis=1)
    np.testing.assert_array_equal(rows.matches, (STUDENT @ TABLE.T).argmax(-1) == best)
    assert 0 < rows.matches.sum() < rows.matches.size
    numeric = WEIGHTS[:, :, None] * slope(lambda x: expected(x, loss, temperature), STUDENT)
    np.testing.assert_allclose(gradient, numeric, atol=2e-5)


def test_the_divergences_differ_and_vanish_where_head_and_target_agree():
    student = f32(np.take_along_axis(TEACHER, ROWS[:, :, None], axis=1))
    for loss in ("forward_kl", "reverse_kl", "total_variation"):
        rows = values(student, loss, 2.5)
        np.testing.assert_allclose(rows.loss, 0, atol=1e-5)
        assert rows.matches.all()
    forward, reverse = (values(f32(STUDENT), loss).loss for loss in ("forward_kl", "reverse_kl"))
    assert np.abs(forward - reverse).max() > 0.1


def test_rows_of_a_sequence_with_more_tokens_than_drafts():
    longer = np.concatenate([TEACHER, RNG.normal(size=(B, N - T + 1, M))], axis=1)
    for one, other in zip(values(f32(STUDENT)), values(f32(STUDENT), teacher=longer), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_weights_of_the_docstring():
    learn = jnp.array([[True, True, True], [True, False, False], [False, False, False]])
    weights = pace_weights(jnp.full((3, 3), np.log(2.0)), learn, 0.0)
    np.testing.assert_allclose(weights, [[0.875, 0.375, 0.125], [0.5, 0, 0], [0, 0, 0]], rtol=1e-6)
    # A confidence of 1/2 becomes 3/4.
    smooth = pace_weights(jnp.full((1, 3), np.log(2.0)), learn[:1], 0.5)
    np.testing.assert_allclose(smooth, [[0.75 + 0.5625 + 0.421875, 0.5625 + 0.421875, 0.421875]], rtol=1e-6)


def test_the_weights_are_the_slope_of_the_expected_length():
    log_q = -np.array([0.3, 1.1, 0.2, 2.0])

    def length(log_q):
        return np.exp(np.cumsum(log_q, -1)).sum(-1)

    weights = pace_weights(f32(-log_q)[None], jnp.ones((1, 4), bool), 0.0)[0]
    np.testing.assert_allclose(weights, slope(length, log_q), rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_teacher_gets_no_gradient(loss):
    slope_of = jax.jit(jax.grad(lambda teacher: jnp.sum(ours(f32(STUDENT), loss, teacher=teacher).loss)))
    gradient = slope_of(f32(TEACHER))
    np.testing.assert_array_equal(gradient, 0)


def test_rows_in_bfloat16_are_summed_in_float32():
    student = f32(STUDENT).astype(jnp.bfloat16)
    rows = values(student)
    assert rows.loss.dtype == jnp.float32
    # Inputs and logits are rounded to 8 bits; what is made of them is not.
    np.testing.assert_allclose(rows.loss, expected(STUDENT, "forward_kl", 1.0), atol=0.2)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(ours(x).loss)))(student)
    assert gradient.dtype == jnp.bfloat16


def test_weights_by_depth():
    np.testing.assert_array_equal(depth_weights(3, 0.0), [1, 1, 1])
    np.testing.assert_allclose(depth_weights(2, 7.0), np.exp([-1 / 7, -2 / 7]), rtol=1e-6)


def test_a_mean_of_parts_is_the_mean_of_all_and_0_where_nothing_was_weighed():
    left, right = Mean(f32([6.0, 0.0]), f32([2.0, 0.0])), Mean(f32([4.0, 0.0]), f32([3.0, 0.0]))
    np.testing.assert_array_equal(jax.tree.map(jnp.add, left, right).value(), [2.0, 0.0])
    assert float(Mean(jnp.float32(1e-3), jnp.float32(1e-4)).value()) == pytest.approx(10.0)


def test_accepted_length_counts_leading_matches_of_what_is_learnt():
    matches = jnp.array([[True, True, False, True], [False, True, True, True], [True] * 4, [True] * 4])
    learn = jnp.array([[True] * 4, [True] * 4, [True, True, True, False], [False] * 4])
    mean = accepted_length(matches, learn)
    assert float(mean.weight) == 3  # the last block has nothing to learn
    assert float(mean.value()) == pytest.approx((2 + 0 + 3) / 3)
