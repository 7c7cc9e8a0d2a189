"""Heads of targets unlike Qwen3 draft in training as in decoding: scaled, capped, recurrent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import draft_logits
from jetspec_jax.models import bind
from tests.decode.tiny import HYBRID, TINY, random_head, random_target
from train.loss.attention import CausalAttend
from train.loss.blocks import draft_blocks

CAP = 3.0
IDS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def target():
    return random_target(dataclasses.replace(TINY, embedding_scale=5.5, logit_softcap=CAP), 0)


@pytest.fixture(scope="module")
def head():
    return random_head(TINY, 1, block_size=4)


def with_flags(head, **flags):
    return dataclasses.replace(head, config=dataclasses.replace(head.config, **flags))


def test_the_cap_is_the_config_s_say(target, head):
    unscaled = with_flags(head, scaled_embeddings=False)
    free = np.asarray(draft_logits(target, unscaled, IDS))
    assert np.abs(free).max() > CAP
    capped = np.asarray(draft_logits(target, with_flags(unscaled, capped_logits=True), IDS))
    np.testing.assert_allclose(capped, CAP * np.tanh(free / CAP), atol=1e-5)


def test_the_scale_is_the_config_s_say(target, head):
    # A target of the same layers without a scale, over embeddings that have it already.
    weights = {**target.weights, "embed_tokens": 5.5 * target.weights["embed_tokens"]}
    plain = dataclasses.replace(
        target, config=dataclasses.replace(target.config, embedding_scale=1.0), weights=weights
    )
    scaled = np.asarray(draft_logits(target, head, IDS))
    np.testing.assert_allclose(scaled, draft_logits(plain, head, IDS), atol=1e-4)
    unscaled = np.asarray(draft_logits(target, with_flags(head, scaled_embeddings=False), IDS))
    assert np.abs(unscaled - scaled).max() > 0.1


def drafts_in_training(target, head):
    @jax.jit
    def blocks(weights, head_weights):
        model, module = bind(target.config, weights), bind(head.config, head_weights)
        positions = jnp.broadcast_to(jnp.arange(IDS.shape[1])[None, :], IDS.shape)
        taps = model(jnp.asarray(IDS), positions, CausalAttend(), taps=head.config.tap_layers).taps
        anchors = jnp.full((2, 1), IDS.shape[1] - 1, jnp.int32)
        hidden = draft_blocks(module, model, jnp.asarray(IDS), taps, anchors)[:, 0, 1:]
        return model.logits(hidden, capped=head.config.capped_logits)

    return np.asarray(blocks(target.weights, head.weights))


@pytest.mark.parametrize("flags", [{}, {"scaled_embeddings": False, "capped_logits": True}])
def test_training_drafts_as_decoding_does(target, head, flags):
    head = with_flags(head, **flags)
    np.testing.assert_allclose(drafts_in_training(target, head), draft_logits(target, head, IDS), atol=1e-4)


def test_taps_behind_recurrent_layers():
    target, head = random_target(HYBRID, 0), random_head(HYBRID, 1, block_size=4)
    assert [HYBRID.layers[i].recurrence is None for i in head.config.tap_layers] == [True, False]
    np.testing.assert_allclose(drafts_in_training(target, head), draft_logits(target, head, IDS), atol=1e-4)
