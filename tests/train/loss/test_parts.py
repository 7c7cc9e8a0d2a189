"""The loss with a target in parts against the same with a whole one: its means, and the head's gradient."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.config import ModelConfig
from tests.decode.tiny import HYBRID, SLIDING, TINY, random_head, random_target
from tests.marks import wide
from tests.meshes import training_mesh
from tests.train.head.tiny import MIXTURE
from train.head.frozen import freeze
from train.loop.mesh import put_batch, replicated
from train.loss import block_attention
from train.loss.distillation import distillation_loss
from train.loss.objectives import Objective

B, T = 4, 12
# Of two parts of the vocabulary the second ends with padding, of four the last.
UNEVEN = dataclasses.replace(TINY, vocab_size=61, logit_softcap=9.0)
RNG = np.random.default_rng(0)
BATCH = {"tokens": RNG.integers(0, 61, (B, T)).astype(np.int32), "learn": RNG.random((B, T)) < 0.8}
# Documents of other lengths in each sequence, and padding at the end of the last.
STARTS = [[0] * 5 + [5] * 7, [0] * 12, [0] * 2 + [2] * 2 + [4] * 8, [0] * 3 + [3] * 6 + [9] * 3]
PACKED = {**BATCH, "starts": np.array(STARTS, np.int32), "real": np.array([12, 12, 12, 9], np.int32)}


@pytest.mark.parametrize(
    ("config", "loss", "sizes"),
    [
        (UNEVEN, "reverse_kl", (1, 1, 1, 2)),
        wide(MIXTURE, "forward_kl", (2, 1, 2, 2)),
        wide(HYBRID, "reverse_kl", (2, 2, 1, 2)),
        wide(SLIDING, "sft", (1, 1, 1, 2)),
    ],
    ids=lambda x: x.model_type if isinstance(x, ModelConfig) else str(x),
)
def test_devices_that_share_the_target_make_the_loss_and_gradient_of_one(config, loss, sizes):
    compare(config, Objective(loss, temperature=1.5, gamma=4.0, anchors=5, chunk=4), sizes, BATCH)


@pytest.mark.wide
def test_packed_sequences_in_chunks_do_too(monkeypatch):
    """Devices have different sequences, and run the loops over chunks of all of them together."""
    monkeypatch.setattr(block_attention, "SLOTS", 8)
    monkeypatch.setattr(block_attention, "TOKENS", 5)
    # Fewer drafts than tokens.
    compare(SLIDING, Objective("dpace", temperature=1.5, anchors=3, chunk=4), (4, 1, 1, 2), PACKED)


def compare(config, objective, sizes, batch):
    target, head = random_target(config, 0), random_head(config, 1, block_size=4)
    compute = distillation_loss(head.config, config, objective, jnp.dtype("float32"))

    @jax.jit
    def run(weights, frozen, batch):
        def total(weights):
            means = compute(weights, frozen, batch, jax.random.key(3))
            return means["loss"].total, means

        return jax.value_and_grad(total, has_aux=True)(weights)

    (_, wanted), slopes = run(head.weights, target.weights, jax.tree.map(jnp.asarray, batch))
    assert wanted["loss"].total > 1
    mesh = training_mesh(*sizes)
    arrays = jax.device_put(head.weights, replicated(mesh)), freeze(target, mesh).weights
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda x: put_batch(x, mesh, axis=0), batch)
        (_, means), own_slopes = run(*arrays, placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), means, wanted)

    def near(own, slope):
        np.testing.assert_allclose(own, slope, atol=1e-5 * float(jnp.max(jnp.abs(slope))))

    jax.tree.map(near, own_slopes, slopes)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), wide((2, 2, 1, 2))], ids=str)
def test_nothing_of_the_vocabulary_s_size_moves(sizes):
    vocabulary = 509  # a prime: no other axis has this length, or half of the next even one
    config = dataclasses.replace(TINY, vocab_size=vocabulary)
    target, head, mesh = random_target(config, 0), random_head(config, 1, block_size=4), training_mesh(*sizes)
    compute = distillation_loss(head.config, config, Objective(anchors=5, chunk=4), jnp.dtype("float32"))

    def total(weights, frozen, batch):
        return compute(weights, frozen, batch, jax.random.key(3))["loss"].total

    arrays = jax.device_put(head.weights, replicated(mesh)), freeze(target, mesh).weights
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda x: put_batch(x, mesh, axis=0), BATCH)
        text = jax.jit(jax.value_and_grad(total)).lower(*arrays, placed).compile().as_text()
    moved = [line for line in text.splitlines() if " all-" in line or " collective-" in line]
    assert any("all-reduce" in line for line in moved)
    assert any("all-gather" in line for line in moved)
    lengths = {
        int(n) for line in moved for sizes in re.findall(r"\w\[([\d,]+)\]", line) for n in sizes.split(",")
    }
    assert 32 in lengths  # the model's width
    assert not lengths & {vocabulary, vocabulary // 2 + 1, 2 * (vocabulary // 2 + 1)}
