"""The whole loss of a draft head against float64 NumPy, its gradient, and how much memory it may take."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jetspec_jax import logits
from jetspec_jax.models import abstract, bind, weights_of
from tests.decode.tiny import TINY, head_config, random_head, random_target
from tests.marks import wide
from train.loss.attention import CausalAttend
from train.loss.blocks import draft_blocks, sample_anchors
from train.loss.distillation import distillation_loss
from train.loss.objectives import Objective

B, T, K, ANCHORS = 4, 12, 4, 5
FLOAT32 = jnp.dtype(jnp.float32)


def spans(*pairs):
    return [any(start <= t < stop for start, stop in pairs) for t in range(T)]


# Two answers; one that ends in a window that is filled up; nothing to learn; the last tokens only, so that
# blocks run over the end.
LEARN = np.array([spans((2, 5), (7, 11)), spans((1, 9)), spans(), spans((9, 12))])
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size - 1, (B, T)).astype(np.int32)
TOKENS[1, 9:] = 0
BATCH = {"tokens": jnp.asarray(TOKENS), "learn": jnp.asarray(LEARN)}
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def target():
    return random_target(TINY, 0)


@pytest.fixture(scope="module")
def heads():
    return {causal: random_head(TINY, 1, block_size=K, causal=causal) for causal in (True, False)}


@pytest.fixture(scope="module")
def teacher(target):
    return np.asarray(logits(target, TOKENS), np.float64)


@pytest.fixture(scope="module")
def drafts(target, heads):
    """Draft logits ``[B, T, K - 1, V]`` at every anchor; other tests hold them against decoding."""

    def at_every_anchor(head):
        @jax.jit
        def compute(weights):
            module = bind(target.config, target.weights)
            places = jnp.broadcast_to(jnp.arange(T)[None, :], TOKENS.shape)
            out = module(BATCH["tokens"], places, CausalAttend(), taps=head.config.tap_layers)
            bound = bind(head.config, weights)
            hidden = draft_blocks(bound, module, BATCH["tokens"], out.taps, places)[:, :, 1:]
            flat = module.logits(hidden.reshape(B, T * (K - 1), -1))
            return flat.reshape(B, T, K - 1, -1)

        return np.asarray(compute(head.weights), np.float64)

    return {causal: at_every_anchor(head) for causal, head in heads.items()}


def expected(teacher, drafts, objective, learn=LEARN, tokens=TOKENS):
    anchors = np.asarray(sample_anchors(KEY, jnp.asarray(learn), objective.anchors))
    value = np.zeros((*anchors.shape, K - 1))
    counted, matches = np.zeros_like(value), np.zeros_like(value)
    for (b, a), anchor in np.ndenumerate(anchors):
        for k in range(1, K):
            place = anchor + k
            if place >= T or not learn[b, anchor + 1 : place + 1].all():
                break
            given, own = teacher[b, place - 1], drafts[b, anchor, k - 1]
            scale = 1.0 if objective.loss in ("sft", "dpace") else objective.temperature
            log_p, log_q = (scipy.special.log_softmax(x / scale) for x in (given, own))
            value[b, a, k - 1] = {
                "forward_kl": scale**2 * np.sum(np.exp(log_p) * (log_p - log_q)),
                "reverse_kl": scale**2 * np.sum(np.exp(log_q) * (log_q - log_p)),
                "sft": -log_q[tokens[b, place]],
                "total_variation": np.abs(np.exp(log_p) - np.exp(log_q)).sum() / 2,
                "dpace": -log_q[tokens[b, place]],
            }[objective.loss]
            counted[b, a, k - 1] = 1
            matches[b, a, k - 1] = given.argmax() == own.argmax()
    depth = np.arange(1, K)
    weight = counted * (np.exp(-depth / objective.gamma) if objective.gamma else 1)
    if objective.loss == "dpace":
        confidence = (1 - objective.smoothing) * np.exp(-value) + objective.smoothing
        reached = counted * np.cumprod(np.where(counted, confidence, 1), -1)
        weight = counted * np.stack([reached[..., k:].sum(-1) for k in range(K - 1)], -1)
    each = np.maximum(counted.sum((0, 1)), 1)
    return {
        "loss": (weight * value).sum() / max(weight.sum(), 1e-9),
        "loss_by_depth": value.sum((0, 1)) / each,
        "accuracy_by_depth": matches.sum((0, 1)) / each,
        "accepted_length": np.cumprod(matches, -1).sum() / max(counted[:, :, 0].sum(), 1),
    }


@pytest.mark.parametrize(
    ("causal", "objective"),
    [
        (True, Objective("forward_kl", temperature=1.0, gamma=0.0, anchors=ANCHORS, chunk=5)),
        (False, Objective("reverse_kl", temperature=2.5, gamma=4.0, anchors=ANCHORS, chunk=4)),
        (True, Objective("sft", temperature=2.5, gamma=4.0, anchors=ANCHORS, chunk=1024)),
        wide(True, Objective("total_variation", temperature=0.5, anchors=ANCHORS, chunk=5)),
        wide(True, Objective("dpace", anchors=ANCHORS, chunk=5, smoothing=0.3)),
    ],
    ids=lambda x: x.loss if isinstance(x, Objective) else ("causal" if x else "bidirectional"),
)
def test_the_whole_loss_against_numpy(target, heads, teacher, drafts, causal, objective):
    head = heads[causal]
    loss = jax.jit(distillation_loss(head.config, target.config, objective, FLOAT32))
    means = loss(head.weights, target.weights, BATCH, KEY)
    wanted = expected(teacher, drafts[causal], objective)
    assert means.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(means[name].value(), value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert wanted["loss"] > 0.1

    # Sequences with nothing to learn add nothing, and alone they are 0, not a division by it.
    nothing = loss(head.weights, target.weights, {**BATCH, "learn": jnp.zeros_like(BATCH["learn"])}, KEY)
    for mean in nothing.values():
        np.testing.assert_array_equal(mean.value(), 0)
        np.testing.assert_array_equal(mean.weight, 0)


def test_the_gradient_against_finite_differences(target, heads):
    head = heads[True]
    objective = Objective("forward_kl", temperature=1.5, gamma=4.0, anchors=ANCHORS, chunk=4)
    loss = distillation_loss(head.config, target.config, objective, FLOAT32)

    @jax.jit
    def run(weights, frozen):
        return jax.value_and_grad(lambda w: loss(w, frozen, BATCH, KEY)["loss"].value())(weights)

    _, gradient = run(head.weights, target.weights)
    leaves, tree = jax.tree.flatten(gradient)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in leaves))
    rng = np.random.default_rng(5)
    noise = [rng.normal(size=g.shape).astype(np.float32) for g in leaves]
    size = np.sqrt(sum(float(np.sum(n**2)) for n in noise))
    # Half of the direction is the gradient itself, so that the slope is far above the rounding.
    direction = [0.5 * n / size + 0.5 * g / norm for n, g in zip(noise, leaves, strict=True)]
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(leaves, direction, strict=True))
    step = 2e-2

    def at(shift):
        moved = jax.tree.map(lambda w, d: w + shift * d, head.weights, tree.unflatten(direction))
        return float(run(moved, target.weights)[0])

    assert slope > 1e-2
    assert (at(step) - at(-step)) / (2 * step) == pytest.approx(slope, rel=1e-2)


def arrays_of(jaxpr):
    """All arrays that a program makes, those of its inner programs too."""
    for equation in jaxpr.eqns:
        yield from (out.aval for out in equation.outvars)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from arrays_of(inner)


def most_rows(objective):
    """The most rows of logits in float32, and in any type, that the gradient's program holds in one array."""
    vocabulary = 509  # a prime: no other axis has this length
    target = dataclasses.replace(TINY, vocab_size=vocabulary)
    head = head_config(target, block_size=K)
    loss = distillation_loss(head, target, objective, jnp.dtype(jnp.bfloat16))
    weights = weights_of(abstract(head))
    frozen = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), weights_of(abstract(target)))

    def total(weights, frozen):
        return loss(weights, frozen, BATCH, KEY)["loss"].value()

    program = jax.make_jaxpr(jax.jit(jax.value_and_grad(total)))(weights, frozen)
    arrays = [x for x in arrays_of(program.jaxpr) if vocabulary in getattr(x, "shape", ())]
    floats = [x.size // vocabulary for x in arrays if x.dtype == jnp.float32]
    return max(floats), max(x.size // vocabulary for x in arrays)


@pytest.mark.parametrize("loss", ["forward_kl", wide("reverse_kl"), wide("sft")])
def test_the_draft_slots_logits_never_exist_at_once(loss):
    anchors, chunk = 30, 5
    in_float32, in_any = most_rows(Objective(loss, anchors=anchors, chunk=chunk))
    assert in_float32 == B * chunk
    # The target's rows exist once each, in its own type.
    assert in_any == B * T < B * anchors * (K - 1)
    # One chunk for all is what this would look like otherwise.
    assert most_rows(Objective(loss, anchors=anchors, chunk=1024))[0] == B * anchors * (K - 1)
