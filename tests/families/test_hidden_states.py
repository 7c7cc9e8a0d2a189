"""`hidden_states`: what the output head reads, and the outputs of layers."""

import dataclasses

import numpy as np
import pytest

from jetspec_jax import Target, hidden_states, logits
from jetspec_jax.models import bind
from tests.decode.tiny import HYBRID, TINY, random_target

IDS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [TINY, HYBRID], ids=["attention", "recurrent"])
def test_layers_and_what_the_output_head_reads(config):
    target = random_target(config, 0)
    last = config.num_layers - 1
    normed, layers = hidden_states(target, IDS), hidden_states(target, IDS, layers=(last, 0, last))
    assert (normed.shape, layers.shape) == ((2, 5, 32), (3, 2, 5, 32))
    assert normed.dtype == layers.dtype == np.float32
    module = bind(config, target.weights)
    close(module.logits(normed), logits(target, IDS))
    close(module.norm(layers[0]), normed)
    np.testing.assert_array_equal(layers[0], layers[2])
    # A model of the first layer alone ends with that layer's output.
    first = dataclasses.replace(config, layers=config.layers[:1])
    cut = Target(first, target.weights | {"layers": {0: target.weights["layers"][0]}})
    close(bind(first, cut.weights).norm(layers[1]), hidden_states(cut, IDS))


def test_no_layer_and_no_such_layer():
    target = random_target(TINY, 0)
    assert hidden_states(target, IDS, layers=[]).shape == (0, 2, 5, 32)
    for layer in (2, -1):
        with pytest.raises(ValueError, match=rf"layers\[1\] must lie in 0\.\.1, not {layer}"):
            hidden_states(target, IDS, layers=[0, layer])
    for layers in (1, ["a"], [True], "01"):
        with pytest.raises(TypeError, match="layers"):
            hidden_states(target, IDS, layers=layers)
