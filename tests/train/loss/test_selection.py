"""The losses of a selector against float64 NumPy: of rows, and the whole loss over a batch."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jetspec_jax import logits
from jetspec_jax.config import SelectorConfig
from jetspec_jax.models import bind
from tests.decode.tiny import TINY, head_config, random_target, random_weights
from tests.train.loss.test_distillation import ANCHORS, BATCH, KEY, LEARN, TOKENS, B, K, T
from train.loss.attention import CausalAttend
from train.loss.blocks import draft_blocks, sample_anchors
from train.loss.objectives import Objective
from train.loss.selection import Choices, SelectionLossName, selected_rows, selection_loss

FLOAT32 = jnp.dtype(jnp.float32)
# Of the rows alone, and of those of the whole loss, which are to hold some of the text's random tokens.
CANDIDATES, SELECTED = 5, 20
LOSSES = get_args(SelectionLossName)

rows_of = jax.jit(selected_rows, static_argnames=("loss", "tail"))


def in_float64(log_q, p, scores, *, loss, tail):
    """The loss of a row, by its candidates; the tails are what they lack."""
    log_q, p, scores = (np.asarray(x, np.float64) for x in (log_q, p, scores))
    q = np.exp(log_q + scores)
    q_tail = 1 - np.exp(log_q).sum() if tail else 0.0
    q, q_tail = q / (q.sum() + q_tail), q_tail / (q.sum() + q_tail)
    if loss == "candidates_kl":
        p, q = p / p.sum(), q / q.sum()
        return np.sum(scipy.special.rel_entr(p, q))
    p_tail = 1 - p.sum()
    if loss == "total_variation":
        return (np.abs(p - q).sum() + abs(p_tail - q_tail)) / 2
    return np.sum(scipy.special.rel_entr(p, q)) + scipy.special.rel_entr(p_tail, q_tail)


def random_choices(seed, scale):
    rng = np.random.default_rng(seed)
    log_q, log_p = (scipy.special.log_softmax(rng.normal(0, scale, (3, 4, 24)), -1) for _ in range(2))
    tokens = np.argsort(-log_q, axis=-1)[..., :CANDIDATES]
    best = np.take_along_axis(log_q, tokens, -1).astype(np.float32)
    p = np.exp(np.take_along_axis(log_p, tokens, -1)).astype(np.float32)
    arrays = tokens.astype(np.int32), best, p, log_p.argmax(-1).astype(np.int32)
    return Choices(*map(jnp.asarray, arrays)), rng.normal(0, 1, best.shape).astype(np.float32)


@pytest.mark.parametrize(
    ("loss", "tail"),
    # Without its tail a distribution has an infinite divergence from one that has a tail.
    [(loss, tail) for loss in LOSSES for tail in (True, False) if tail or loss != "forward_kl"],
)
def test_rows_are_float64_s(loss, tail):
    choices, scores = random_choices(1, 2.0)
    found = rows_of(choices, jnp.asarray(scores), loss=loss, tail=tail)
    for place in np.ndindex(3, 4):
        own = choices.log_q[place], choices.p[place], scores[place]
        expected = in_float64(*own, loss=loss, tail=tail)
        # Tails are differences from 1, so their logarithms lose digits where little is left.
        left = 1 - np.exp(np.float64(choices.log_q[place])).sum()
        bound = 16 * np.finfo(np.float32).eps * (1 + np.abs(scores[place]).max() + 1 / left)
        assert abs(float(found.loss[place]) - expected) <= bound
        best = choices.tokens[place][np.argmax(np.asarray(choices.log_q[place]) + scores[place])]
        assert bool(found.matches[place]) == (int(best) == int(choices.likeliest[place]))


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_finite_where_a_distribution_is_a_point(loss):
    """The head is sure of its best candidate, and the target of another, or of none of them."""
    log_q = jnp.array([[[0.0, -60.0, -80.0], [-1e-7, -20.0, -90.0]]], jnp.float32)
    p = jnp.array([[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]], jnp.float32)
    choices = Choices(
        jnp.array([[[4, 7, 2], [1, 2, 3]]], jnp.int32), log_q, p, jnp.array([[7, 9]], jnp.int32)
    )

    def total(scores, log_q):
        rows = selected_rows(choices._replace(log_q=log_q), scores, loss=loss, tail=True)
        return jnp.sum(rows.loss)

    value, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(jnp.zeros_like(log_q), log_q)
    assert np.isfinite(value)
    for gradient in gradients:
        assert np.isfinite(gradient).all()


@pytest.fixture(scope="module")
def pair():
    """A target, and the config and weights of a head with a selector."""
    plain = head_config(TINY, block_size=K)
    config = dataclasses.replace(plain, selector=SelectorConfig(4, SELECTED, tail=True))
    weights = {**random_weights(config, 1), "selector": random_weights(config, 2)["selector"]}
    weights["selector"] = jax.tree.map(lambda x: 2 * x, weights["selector"])
    return random_target(TINY, 0), config, weights


@pytest.fixture(scope="module")
def drafts(pair):
    """Hidden states ``[B, T, K - 1, M]`` and draft logits at every anchor."""
    target, config, weights = pair

    @jax.jit
    def compute(weights):
        module = bind(target.config, target.weights)
        places = jnp.broadcast_to(jnp.arange(T)[None, :], TOKENS.shape)
        out = module(BATCH["tokens"], places, CausalAttend(), taps=config.tap_layers)
        head = bind(config, weights)
        hidden = draft_blocks(head, module, BATCH["tokens"], out.taps, places)[:, :, 1:]
        return hidden, module.logits(hidden.reshape(B, T * (K - 1), -1)).reshape(B, T, K - 1, -1)

    return [np.asarray(x, np.float64) for x in compute(weights)]


def expected(pair, drafts, objective, loss, temperature):
    target, _, weights = pair
    selector = {name: np.asarray(own, np.float64) for name, own in weights["selector"].items()}
    teacher = np.asarray(logits(target, TOKENS), np.float64)
    anchors = np.asarray(sample_anchors(KEY, jnp.asarray(LEARN), objective.anchors))
    names = ("loss", "loss_without", "accuracy", "accuracy_without", "coverage", "counted")
    rows = {name: np.zeros((*anchors.shape, K - 1)) for name in names}
    for (b, a), anchor in np.ndenumerate(anchors):
        for k in range(1, K):
            place = anchor + k
            if place >= T or not LEARN[b, anchor + 1 : place + 1].all():
                break
            hidden, own = (x[b, anchor, k - 1] for x in drafts)
            log_q = scipy.special.log_softmax(own)
            tokens = np.argsort(-log_q, kind="stable")[:SELECTED]
            p = scipy.special.softmax(teacher[b, place - 1] / temperature)
            gate = hidden @ selector["hidden_projection"]
            scores = selector["successors"][tokens] @ (selector["predecessors"][TOKENS[b, place - 1]] * gate)
            at = b, a, k - 1
            for suffix, given in (("", scores), ("_without", 0 * scores)):
                value = in_float64(log_q[tokens], p[tokens], given, loss=loss, tail=True)
                rows[f"loss{suffix}"][at] = value
                rows[f"accuracy{suffix}"][at] = tokens[np.argmax(log_q[tokens] + given)] == p.argmax()
            rows["coverage"][at] = TOKENS[b, place] in tokens
            rows["counted"][at] = 1
    counted, depth = rows.pop("counted"), np.arange(1, K)
    weight = counted * (np.exp(-depth / objective.gamma) if objective.gamma else 1)
    each = np.maximum(counted.sum((0, 1)), 1)
    lengths = {
        f"accepted_length{suffix}": np.cumprod(rows[f"accuracy{suffix}"], -1).sum() / counted[:, :, 0].sum()
        for suffix in ("", "_without")
    }
    return {
        "loss": (weight * rows["loss"]).sum() / weight.sum(),
        **lengths,
        **{
            f"{name}_by_depth{suffix}": rows[f"{name}{suffix}"].sum((0, 1)) / each
            for name in ("loss", "accuracy")
            for suffix in ("", "_without")
        },
        "coverage_by_depth": rows["coverage"].sum((0, 1)) / each,
    }


@pytest.mark.parametrize(
    ("loss", "temperature"),
    [("forward_kl", 1.0), pytest.param("total_variation", 0.5, marks=pytest.mark.wide)],
)
def test_the_whole_loss_against_numpy(pair, drafts, loss, temperature):
    target, config, weights = pair
    objective = Objective(gamma=4.0, anchors=ANCHORS, chunk=5)
    compute = selection_loss(
        config, target.config, objective, FLOAT32, loss=loss, temperature=temperature, joint=None
    )
    means = jax.jit(compute)(weights, target.weights, BATCH, KEY)
    wanted = expected(pair, drafts, objective, loss, temperature)
    assert means.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(means[name].value(), value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert wanted["loss"] > 0.1
    # The selector counts for a hundred times what rounding may; a total variation is at most 1.
    assert abs(wanted["loss_by_depth"] - wanted["loss_by_depth_without"]).max() > 0.01
    assert 0 < wanted["coverage_by_depth"].mean() < 1
