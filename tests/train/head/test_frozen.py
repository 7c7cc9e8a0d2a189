"""A target on a mesh of training: who holds what, who decodes, and what does not go together."""

import dataclasses

import jax
import numpy as np
import pytest

from jetspec_jax import Target, logits
from jetspec_jax.checkpoint.loading import read_target
from jetspec_jax.checkpoint.source import Source
from tests.decode.test_fp8 import BLOCKS, quantised_weights
from tests.decode.tiny import TINY, random_target
from tests.meshes import mesh_of, training_mesh
from tests.train.folders import write_target
from tests.train.head.tiny import MASK, MIXTURE
from train.head.frozen import freeze
from train.head.recipe import HeadSettings
from train.head.start import begin_head
from train.head.training import fingerprint


def addresses(weights):
    """Where each device has its part of every parameter."""
    return [
        {shard.device: shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
        for leaf in jax.tree.leaves(weights)
    ]


def test_the_first_group_decodes_with_the_parts_that_it_has():
    target, mesh = random_target(TINY, 0), training_mesh(2, 1, 1, 2)
    frozen = freeze(target, mesh)
    assert frozen.decoding.mesh.shape == {"expert": 1, "tensor": 2}
    assert list(frozen.decoding.mesh.devices.flat) == list(mesh.devices.flat[:2])
    for own, everywhere in zip(*map(addresses, (frozen.decoding.weights, frozen.weights)), strict=True):
        assert len(own) == 2
        assert own.items() <= everywhere.items()
    ids = [[3, 1, 4, 1, 5]]
    np.testing.assert_allclose(logits(frozen.decoding, ids), logits(target, ids), atol=1e-4)


@pytest.mark.wide
def test_a_quantised_target_decodes_with_the_scales_of_its_parts():
    # Features are split into two parts of 24.
    config = dataclasses.replace(TINY, quantization=dataclasses.replace(BLOCKS, rows=8, columns=8))
    target = Target(config, quantised_weights(config, 0))
    everywhere = freeze(target, training_mesh(1, 2, 1, 1)).weights["layers"][0]["mlp"]["down_proj"]
    assert not everywhere["values"].is_fully_replicated
    assert everywhere["scales"].is_fully_replicated
    frozen, ids = freeze(target, training_mesh(2, 1, 1, 2)), [[3, 1, 4, 1, 5]]
    np.testing.assert_allclose(logits(frozen.decoding, ids), logits(target, ids), atol=1e-4)


def test_a_target_that_was_read_onto_the_mesh_stays_where_it_is(tmp_path):
    source, mesh = Source(write_target(tmp_path / "target"), "float32"), training_mesh(1, 2, 1, 2)
    target, there = read_target(source), read_target(source, mesh)
    frozen = freeze(there, mesh)
    assert frozen.weights is there.weights
    ids = [[3, 1, 4, 1, 5]]
    np.testing.assert_allclose(logits(frozen.decoding, ids), logits(target, ids), atol=1e-4)
    for other in (training_mesh(2, 1, 1, 2), training_mesh(1, 1, 1, 1)):
        with pytest.raises(
            ValueError, match="the target lies on a mesh of data 1 x fsdp 2 x expert 1 x tensor 2"
        ):
            freeze(there, other)
    group = mesh_of(1, 2)
    with pytest.raises(ValueError, match="lies on a mesh of expert 1 x tensor 2"):
        freeze(read_target(source, group), mesh)


def test_a_mesh_that_cannot_split_the_target_is_refused_by_what_does_not_divide():
    with pytest.raises(ValueError, match=r"3 devices cannot split the model: .*4 query heads over 3 parts"):
        freeze(random_target(TINY, 0), training_mesh(1, 1, 1, 3))
    with pytest.raises(ValueError, match="for models with experts"):
        freeze(random_target(TINY, 0), training_mesh(1, 1, 2, 1))
    with pytest.raises(ValueError, match="4 experts over 3 parts"):
        freeze(random_target(MIXTURE, 0), training_mesh(1, 1, 3, 1))


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_head_begins_as_whole_layers_of_a_shared_target(tensor):
    target = random_target(TINY, 0)
    shared = freeze(target, training_mesh(1, 1, 1, tensor)).decoding
    settings = HeadSettings(start="target", layers=2, block_size=4, taps=(0, 1), mask_token=MASK)
    begun, wanted = (begin_head(own, settings, None, 0) for own in (shared, target))
    assert begun.raw == wanted.raw
    jax.tree.map(np.testing.assert_array_equal, begun.weights, wanted.weights)
    for leaf in jax.tree.leaves(begun.weights):
        assert len(leaf.devices()) == 1


def test_shared_weights_have_a_fingerprint():
    mesh = training_mesh(1, 1, 1, 2)
    one, again, other = (fingerprint(freeze(random_target(TINY, seed), mesh).weights) for seed in (0, 0, 1))
    assert one == again != other
